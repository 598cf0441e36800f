"""Runs the benchmarks one after another: two at once would measure each other.

    make bench                      all of them, about 5 minutes
    make bench ARGS="scheduler"     one

Each script interleaves what it compares in rounds and prints JSON lines; they are gathered, with
what the machine is, in bench/results/latest.jsonl.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BENCHES = ("scheduler", "model", "cache", "gateway_overhead")


def main() -> int:
    """Run the benches named on the command line, or all; returns the worst exit status."""
    chosen = sys.argv[1:] or list(BENCHES)
    unknown = sorted(set(chosen) - set(BENCHES))
    if unknown:
        print(f"unknown benchmark {', '.join(unknown)}; there are {', '.join(BENCHES)}")
        return 2
    lines = [json.dumps(_machine())]
    worst = 0
    for name in chosen:
        print(f"== {name}", flush=True)
        done = subprocess.run(
            [sys.executable, HERE / f"{name}.py"], stdout=subprocess.PIPE, text=True, check=False
        )
        worst = max(worst, done.returncode)
        for line in done.stdout.splitlines():
            print(line)
            lines.append(line)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "latest.jsonl").write_text("\n".join(lines) + "\n")
    return worst


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
