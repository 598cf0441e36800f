"""Runs the benchmarks one after another: two at once would measure each other.

    make bench                      those that answer the goals, then the table: at most 10 minutes
    make bench ARGS="scheduler"     one
    make bench ARGS="tables"        those behind the other tables of docs/performance.md
    make bench ARGS="all"           every one
    make bench ARGS=--table         measures nothing: the table of what was measured last

Each script interleaves what it compares in rounds and prints JSON lines; they are gathered, with
what the machine is and how long each took, in bench/results/latest.jsonl; what was not run again
stays there. One beside which the machine had other work is run once more, after all others, if time
is left.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import goals
import pictures
import table

HERE = Path(__file__).parent
LATEST = table.RESULTS / "latest.jsonl"
AGAIN_SECONDS = 480.0
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
)
TABLES = ("batching", "generate", "curves", "cache", "split_ttft", "int8_accuracy", "memory")
OTHERS = (
    "admission",
    "model",
    "media",
    "gateway_overhead",
    "overload",
    "simulate",
    "operator_scale",
)
ALL = (*GOALS, *TABLES, *OTHERS)
GROUPS = {"goals": GOALS, "tables": TABLES, "all": ALL}


def main() -> int:
    """Run what is named, or what answers the goals; draw, print; the worst exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join((*GROUPS, *ALL)))
    parser.add_argument("--table", action="store_true", help="measure nothing")
    args = parser.parse_args()
    unknown = sorted(set(args.names) - {*GROUPS, *ALL})
    if unknown:
        parser.error(f"unknown benchmark {', '.join(unknown)}; there are {', '.join(ALL)}")
    worst = 0 if args.table else _run(chosen(args.names))
    pictures.write_all(table.recorded(), table.RESULTS)
    print(goals.latest())
    return worst


def chosen(names: Sequence[str]) -> list[str]:
    """The benchmarks of groups and names, each once."""
    wanted = [one for name in names or ["goals"] for one in GROUPS.get(name, (name,))]
    return list(dict.fromkeys(wanted))


def _run(names: Sequence[str]) -> int:
    """Run, print and keep; the worst exit status."""
    began = time.perf_counter()
    earlier, runs = [json.dumps(_machine()), *_kept(names)], dict[str, Run]()
    for name in names:
        runs[name] = _measure(name)
        _write(earlier, runs)
    for name in names:
        if not runs[name].is_quiet and time.perf_counter() - began < AGAIN_SECONDS:
            print("the machine had other work: once more", flush=True)
            runs[name] = _measure(name)
            _write(earlier, runs)
    return max(run.status for run in runs.values())


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What one script said."""

    status: int
    lines: list[str]

    @property
    def is_quiet(self) -> bool:
        """Whether the machine had no other work."""
        lines = [json.loads(line) for line in self.lines]
        return all(table.is_quiet(line, lines) for line in lines)


def _write(earlier: Sequence[str], runs: Mapping[str, Run]) -> None:
    lines = [*earlier, *(line for run in runs.values() for line in run.lines)]
    LATEST.parent.mkdir(exist_ok=True)
    LATEST.write_text("\n".join(lines) + "\n")


def _measure(name: str) -> Run:
    print(f"== {name}", flush=True)
    began, others = time.perf_counter(), _seconds_of_others()
    done = subprocess.run(
        [sys.executable, HERE / f"{name}.py"], stdout=subprocess.PIPE, text=True, check=False
    )
    seconds = time.perf_counter() - began
    others = (_seconds_of_others() - others) / (seconds * (os.cpu_count() or 1))
    took = {"bench": f"{name}.took", "seconds": round(seconds), "by_others": round(others, 2)}
    lines = [*done.stdout.splitlines(), json.dumps(took)]
    print("\n".join(lines), flush=True)
    return Run(done.returncode, lines)


def _seconds_of_others() -> float:
    """Processor time that went elsewhere since the start: other processes, the host's other guests.

    A benchmark's own is that of children that have ended.
    """
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _iowait, *more = map(
        int, stat.read_text().split("\n")[0].split()[1:9]
    )
    own = resource.getrusage(resource.RUSAGE_CHILDREN)
    busy = (user + nice + system + sum(more)) / os.sysconf("SC_CLK_TCK")
    return busy - own.ru_utime - own.ru_stime


def _kept(names: Sequence[str]) -> list[str]:
    """What earlier runs said of benchmarks that do not run now."""
    kept = []
    for line in LATEST.read_text().splitlines() if LATEST.exists() else []:
        name = json.loads(line)["bench"].partition(".")[0]
        if name != "machine" and name not in names:
            kept.append(line)
    return kept


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
    }


if __name__ == "__main__":
    sys.exit(main())
