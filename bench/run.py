"""Runs the benchmarks one after another, so that none disturbs another.

    make bench                      benchmarks with goals, then their table: at most 12 minutes
    make bench ARGS="scheduler"     one benchmark
    make bench ARGS="tables"        benchmarks of the other tables of docs/performance.md
    make bench ARGS="all"           all benchmarks
    make bench ARGS=--table         measures nothing, prints the tables of the latest figures
    make bench ARGS=--document      measures nothing, writes them into `DOCUMENTS`
    make bench ARGS="--machine=amx" records the figures of another machine in a file of its own

Each script runs the compared programs in turn and prints JSON lines. bench/results/latest.jsonl
collects them with the machine and the duration of each benchmark. Lines of benchmarks that did not
run stay, if they are of this machine. A benchmark that other work disturbed runs once more at the
end, if time is left. An interrupted run prints the table of the figures so far.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import charts
import table
import tables
from sides import seconds_of_others

HERE = Path(__file__).parent
DOCUMENTS = tuple(HERE.parent / "docs" / name for name in ("performance.md", "visual-tokens.md"))
LATEST = table.RESULTS / "latest.jsonl"
GOALS_MINUTES, DAY_MINUTES = 12.0, 24 * 60.0
MARGIN_SECONDS = 10.0
"""Time for an interrupted benchmark to end its processes."""
GOALS = (
    "mixed_trace",
    "decode",
    "paged_attention",
    "prefill",
    "attention",
    "ttft",
    "image",
    "transfer",
    "handoff",
    "scheduler",
    "engine_step",
    "startup",
    "interference",
    "cache",
)
TABLES = (
    "batching",
    "generate",
    "curves",
    "split_ttft",
    "int8_accuracy",
    "jpeg_scaling",
    "visual_tokens",
    "visual_speed",
    "memory",
)
OTHERS = (
    "admission",
    "routing",
    "model",
    "media",
    "gateway_overhead",
    "gateway_speed",
    "hostile_mix",
    "overload",
    "stealing",
    "simulate",
    "operator_scale",
)
WITH_MODEL = frozenset(
    {
        "mixed_trace",
        "decode",
        "prefill",
        "ttft",
        "startup",
        "interference",
        "generate",
        "memory",
        "visual_speed",
    }
)
"""Benchmarks that share one model, which is created once."""
ALL = (*GOALS, *TABLES, *OTHERS)
VISUAL = ("visual_tokens", "visual_speed")
GROUPS = {"goals": GOALS, "tables": TABLES, "all": ALL, "visual_tokens": VISUAL}


def main() -> int:
    """Run the named benchmarks, or those with goals; draw, print; the worst exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join((*GROUPS, *ALL)))
    parser.add_argument("--table", action="store_true", help="measure nothing, print all tables")
    parser.add_argument("--document", action="store_true", help="write them into the pages of docs")
    parser.add_argument("--machine", type=_name, help="name of another machine")
    parser.add_argument("--minutes", type=float, help="time limit; default: 12 without names")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - {*GROUPS, *ALL})
    if unknown:
        parser.error(f"unknown benchmark {', '.join(unknown)}; there are {', '.join(ALL)}")
    minutes = args.minutes or (DAY_MINUTES if args.names else GOALS_MINUTES)
    only_tables = args.table or args.document
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    file = table.file_of(args.machine) if args.machine else LATEST
    runs = {} if only_tables else measure(chosen(args.names), file, seconds=60 * minutes)
    elsewhere = table.elsewhere()
    lines = elsewhere.get(args.machine, []) if args.machine else table.recorded()
    if not args.machine:
        charts.write_all(lines, table.RESULTS)
    for name in tables.TABLES if only_tables else ("goals",):
        print(f"{name}\n\n{tables.render(name, lines)}\n")
    if args.document:
        for document in DOCUMENTS:
            text = tables.fill(document.read_text(), table.recorded(), elsewhere)
            document.write_text(text)
    return max((run.status for run in runs.values()), default=0)


def chosen(names: Sequence[str]) -> list[str]:
    """The benchmarks of groups and names, each once."""
    wanted = [one for name in names or ["goals"] for one in GROUPS.get(name, (name,))]
    return list(dict.fromkeys(wanted))


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """The output of one script; the last line is its duration."""

    status: int
    seconds: float
    lines: list[str]

    @property
    def is_quiet(self) -> bool:
        """Whether no other work disturbed it."""
        lines = [json.loads(line) for line in self.lines]
        return all(table.is_quiet(line, lines) for line in lines)

    def disturbance(self) -> tuple[int, bool, float]:
        """Sort key, lower is better: more lines, then no disturbance, then less work of others."""
        return -len(self.lines), not self.is_quiet, json.loads(self.lines[-1])["by_others"]


def _name(text: str) -> str:
    if not text.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} must be a word: letters, digits, underscores")
    return text


def measure(names: Sequence[str], file: Path, *, seconds: float) -> dict[str, Run]:
    """Run, print and record the benchmarks that fit into `seconds`, also an interrupted one."""
    end, runs = time.monotonic() + seconds - MARGIN_SECONDS, dict[str, Run]()
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder:
        model = Path(folder) / "model"
        try:
            if WITH_MODEL & set(names):
                subprocess.run(
                    [sys.executable, HERE / "peers" / "peer_model.py", model], check=True
                )
            _measure_all(names, model, end, runs, file)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    return runs


def _measure_all(
    names: Sequence[str], model: Path, end: float, runs: dict[str, Run], file: Path
) -> None:
    """Run all, then the disturbed ones again; fills `runs`."""
    earlier = table.read(file)
    if earlier and {**earlier[0], "commit": ""} != {**_machine(), "commit": ""}:
        print(f"{file.name} has figures of another machine: it is replaced", flush=True)
        earlier = []
    for name in names:
        left = end - time.monotonic()
        if left > 0:
            runs[name] = _measure(name, model, left)
            _write(file, earlier, runs)
        else:
            print(f"== {name} is skipped: no time is left", flush=True)
    for name, run in list(runs.items()):
        left = end - time.monotonic()
        if not run.is_quiet and run.seconds < left:
            print("other work disturbed it: once more", flush=True)
            runs[name] = min(run, _measure(name, model, left), key=Run.disturbance)
            _write(file, earlier, runs)


def _write(file: Path, earlier: Sequence[table.Line], runs: Mapping[str, Run]) -> None:
    """Replace the earlier lines of benchmarks that now printed figures."""
    printed = {name: run.lines for name, run in runs.items() if len(run.lines) > 1}
    new = {name: lines for name, lines in printed.items() if name not in table.APART}
    if not new:
        return  # figures of another machine stay, too
    added = [json.loads(line) for lines in new.values() for line in lines]
    machine = earlier[0] if earlier else _machine()
    table.write(file, [machine, *table.without(earlier, {"machine", *new}), *added])


def _measure(name: str, model: Path, max_seconds: float) -> Run:
    print(f"== {name}", flush=True)
    began, others = time.perf_counter(), seconds_of_others()
    command = [sys.executable, str(HERE / f"{name}.py")]
    if name in WITH_MODEL:
        command.append(f"--model={model}")
    status, output = _run(command, max_seconds)
    seconds = time.perf_counter() - began
    others = (seconds_of_others() - others) / (seconds * (os.cpu_count() or 1))
    took = {
        "bench": f"{name}.took",
        "seconds": round(seconds),
        "by_others": round(others, 2),
        "commit": _commit(),
    }
    lines = [*output.splitlines(), json.dumps(took)]
    print("\n".join(lines), flush=True)
    return Run(status, seconds, lines)


def _run(command: Sequence[str], max_seconds: float) -> tuple[int, str]:
    """Exit status and output. After `max_seconds` it is interrupted, and the status is 0."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate(timeout=max_seconds)
        except subprocess.TimeoutExpired:
            print("interrupted: no time is left", flush=True)
            process.send_signal(signal.SIGINT)
            return 0, process.communicate()[0]
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            raise
        return process.returncode, output


def measured() -> dict[str, object]:
    """The machine and the commit, for a benchmark that records its own lines."""
    return {key: value for key, value in _machine().items() if key != "bench"}


def _commit() -> str:
    """The measured commit, with a plus sign if files differ from it."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _machine() -> dict[str, object]:
    cpuinfo = Path("/proc/cpuinfo")
    models = [
        line.split(":", 1)[1].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else [])
        if line.startswith("model name")
    ]
    return {
        "bench": "machine",
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "commit": _commit(),
    }


if __name__ == "__main__":
    sys.exit(main())
