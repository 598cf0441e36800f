"""Runs the benchmarks one after another: two at once would measure each other.

    make bench                      those that answer the goals, then the table: at most 12 minutes
    make bench ARGS="scheduler"     one
    make bench ARGS="tables"        those behind the other tables of docs/performance.md
    make bench ARGS="all"           every one
    make bench ARGS=--table         measures nothing: the tables of what was measured last
    make bench ARGS=--document      writes them into docs/performance.md
    make bench ARGS="--machine=amx" keeps what it measures apart: of another machine than the rest

Each script interleaves what it compares in rounds and prints JSON lines; they are gathered, with
what the machine is and how long each took, in bench/results/latest.jsonl; what was not run again
stays there, if it is of this machine. One beside which the machine had other work is run once more,
after all others, if time is left. A run that is cut, by its time or by a signal, still prints the
table of what there is.
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

import pictures
import table
import tables
from sides import seconds_of_others

HERE = Path(__file__).parent
DOCUMENT = HERE.parent / "docs" / "performance.md"
LATEST = table.RESULTS / "latest.jsonl"
GOALS_MINUTES, DAY_MINUTES = 12.0, 24 * 60.0
MARGIN_SECONDS = 10.0
"""For a benchmark that is cut to end what it started."""
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
    "memory",
)
OTHERS = (
    "admission",
    "model",
    "media",
    "gateway_overhead",
    "hostile_mix",
    "overload",
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
    }
)
"""Those that share one model, which is made once."""
ALL = (*GOALS, *TABLES, *OTHERS)
GROUPS = {"goals": GOALS, "tables": TABLES, "all": ALL}


def main() -> int:
    """Run what is named, or what answers the goals; draw, print; the worst exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join((*GROUPS, *ALL)))
    parser.add_argument("--table", action="store_true", help="measure nothing; every table")
    parser.add_argument("--document", action="store_true", help=f"the same, into {DOCUMENT.name}")
    parser.add_argument("--machine", type=_name, help="of another machine: a file of its own")
    parser.add_argument("--minutes", type=float, help="at most; 12 for the goals alone")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - {*GROUPS, *ALL})
    if unknown:
        parser.error(f"unknown benchmark {', '.join(unknown)}; there are {', '.join(ALL)}")
    minutes = args.minutes or (DAY_MINUTES if args.names else GOALS_MINUTES)
    only_tables = args.table or args.document
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    file = table.file_of(args.machine) if args.machine else LATEST
    runs = {} if only_tables else measured(chosen(args.names), file, seconds=60 * minutes)
    elsewhere = table.elsewhere()
    lines = elsewhere.get(args.machine, []) if args.machine else table.recorded()
    if not args.machine:
        pictures.write_all(lines, table.RESULTS)
    for name in tables.TABLES if only_tables else ("goals",):
        print(f"{name}\n\n{tables.said(name, lines)}\n")
    if args.document:
        text = tables.filled(DOCUMENT.read_text(), table.recorded(), elsewhere)
        DOCUMENT.write_text(text)
    return max((run.status for run in runs.values()), default=0)


def chosen(names: Sequence[str]) -> list[str]:
    """The benchmarks of groups and names, each once."""
    wanted = [one for name in names or ["goals"] for one in GROUPS.get(name, (name,))]
    return list(dict.fromkeys(wanted))


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What one script said, last of all how long it took."""

    status: int
    seconds: float
    lines: list[str]

    @property
    def is_quiet(self) -> bool:
        """Whether the machine had no other work."""
        lines = [json.loads(line) for line in self.lines]
        return all(table.is_quiet(line, lines) for line in lines)

    def disturbance(self) -> tuple[int, bool, float]:
        """Less is better: of two runs that said all, the one with less other work counts."""
        return -len(self.lines), not self.is_quiet, json.loads(self.lines[-1])["by_others"]


def _name(text: str) -> str:
    if not text.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} must be a word: letters, digits, underscores")
    return text


def measured(names: Sequence[str], file: Path, *, seconds: float) -> dict[str, Run]:
    """Run, print and keep what fits into so many seconds; what began but did not end, too."""
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
    """All in turn, then those again beside which the machine had other work; fills `runs`."""
    earlier = table.read(file)
    if earlier and {**earlier[0], "commit": ""} != {**_machine(), "commit": ""}:
        print(f"{file.name} is of another machine, and begins anew", flush=True)
        earlier = []
    for name in names:
        left = end - time.monotonic()
        if left > 0:
            runs[name] = _measure(name, model, left)
            _write(file, earlier, runs)
        else:
            print(f"== {name} is left out: the time is over", flush=True)
    for name, run in list(runs.items()):
        left = end - time.monotonic()
        if not run.is_quiet and run.seconds < left:
            print("the machine had other work: once more", flush=True)
            runs[name] = min(run, _measure(name, model, left), key=Run.disturbance)
            _write(file, earlier, runs)


def _write(file: Path, earlier: Sequence[table.Line], runs: Mapping[str, Run]) -> None:
    """Replace what was said earlier of benchmarks that now gave figures."""
    new = {name: run.lines for name, run in runs.items() if len(run.lines) > 1}
    said = [json.loads(line) for lines in new.values() for line in lines]
    machine = earlier[0] if earlier else _machine()
    table.write(file, [machine, *table.beside(earlier, {"machine", *new}), *said])


def _measure(name: str, model: Path, most_seconds: float) -> Run:
    print(f"== {name}", flush=True)
    began, others = time.perf_counter(), seconds_of_others()
    command = [sys.executable, str(HERE / f"{name}.py")]
    if name in WITH_MODEL:
        command.append(f"--model={model}")
    status, said = _ended(command, most_seconds)
    seconds = time.perf_counter() - began
    others = (seconds_of_others() - others) / (seconds * (os.cpu_count() or 1))
    took = {
        "bench": f"{name}.took",
        "seconds": round(seconds),
        "by_others": round(others, 2),
        "commit": _commit(),
    }
    lines = [*said.splitlines(), json.dumps(took)]
    print("\n".join(lines), flush=True)
    return Run(status, seconds, lines)


def _ended(command: Sequence[str], most_seconds: float) -> tuple[int, str]:
    """Exit status and output; what takes longer is interrupted, ends what it started, and is 0."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            said, _ = process.communicate(timeout=most_seconds)
        except subprocess.TimeoutExpired:
            print("cut: the time is over", flush=True)
            process.send_signal(signal.SIGINT)
            return 0, process.communicate()[0]
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            raise
        return process.returncode, said


def _commit() -> str:
    """What was measured, with a plus sign if files differ from it."""
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
