"""The time from the start of a worker to ready, less the time to import torch.

    python bench/run.py startup          python bench/startup.py [--model DIR] [--rounds 2]

Each role is `vlm-worker` as a pod starts it, with Qwen2-VL of random weights (`random_vlm`) in the
page cache and compiled kernels. Rounds alternate between the roles and a process that only imports
torch; a figure is the median of the differences. `cpu_over_torch` is the same in processor time of
the worker, which other processes hardly affect. `parts` are wall seconds between its log lines.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import random_vlm
from workers import message_of, worker

ROLES = {
    "encoder": "encoder",
    "prefill": "prefill",
    "decode": "decode",
    "colocated": "encoder,prefill,decode",
}
GOAL_SECONDS = 3.0
MARKS = ("listening", "model loaded", "ready")


def main() -> None:
    """Print every role."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, help="where the model is, or is to be made")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--roles", nargs="*", choices=ROLES, default=list(ROLES))
    args = parser.parse_args()
    with random_vlm.model_directory(args.model) as model_dir:
        torch_runs: list[dict[str, float]] = []
        runs: dict[str, list[dict[str, Any]]] = {role: [] for role in args.roles}
        start_worker(model_dir, args.roles[0])  # compiles kernels and fills the page cache
        for _ in range(args.rounds):
            torch_runs.append(import_torch())
            for role, kept in runs.items():
                kept.append(start_worker(model_dir, role))
    for role, kept in runs.items():
        print(json.dumps(figures(role, kept, torch_runs)), flush=True)


def figures(
    role: str, runs: list[dict[str, Any]], torch_runs: list[dict[str, float]]
) -> dict[str, Any]:
    """One line of the report: medians."""
    pairs = list(zip(runs, torch_runs, strict=True))
    over = statistics.median(run["wall"] - torch["wall"] for run, torch in pairs)
    return {
        "bench": "startup",
        "role": role,
        "seconds": round(statistics.median(run["wall"] for run in runs), 2),
        "torch_seconds": round(statistics.median(run["wall"] for run in torch_runs), 2),
        "over_torch": round(over, 2),
        "cpu_over_torch": round(statistics.median(r["cpu"] - t["cpu"] for r, t in pairs), 2),
        "parts": {
            name: round(statistics.median(run["parts"][name] for run in runs), 2) for name in MARKS
        },
        "goal": GOAL_SECONDS,
        "met": over <= GOAL_SECONDS,
    }


def import_torch() -> dict[str, float]:
    """Wall and CPU seconds of a process that only imports torch."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", "import torch"])
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    return {"wall": time.perf_counter() - began, "cpu": usage.ru_utime + usage.ru_stime}


def start_worker(model_dir: Path, role: str) -> dict[str, Any]:
    """Seconds until its log says that it is ready, in parts, and CPU seconds so far."""
    began = last = time.perf_counter()
    parts: dict[str, float] = {}
    with worker(model_dir, ROLES[role], "--kv-memory-bytes=268435456") as (process, _):
        assert process.stdout is not None
        for line in process.stdout:
            message = message_of(line)
            if message in MARKS:
                now = time.perf_counter()
                parts[message], last = now - last, now
            if message == "ready":
                return {"wall": last - began, "cpu": cpu_seconds(process.pid), "parts": parts}
        raise SystemExit(f"the {role} ended with {process.wait()} before it was ready")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
