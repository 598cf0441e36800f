"""Runs the benchmarks one after another: two at once would measure each other.

    make bench                      all of them, about 5 minutes
    make bench ARGS="scheduler"     one

Each script interleaves what it compares in rounds and prints JSON lines; they are gathered, with
what the machine is, in bench/results/latest.jsonl; what was not run again stays there.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BENCHES = (
    "scheduler",
    "admission",
    "model",
    "paged_attention",
    "attention",
    "memory",
    "decode",
    "prefill",
    "mixed_trace",
    "generate",
    "int8_accuracy",
    "curves",
    "cache",
    "media",
    "image",
    "transfer",
    "handoff",
    "startup",
    "interference",
    "gateway_overhead",
    "split_ttft",
    "overload",
    "simulate",
    "operator_scale",
)


def main() -> int:
    """Run the benches named on the command line, or all; returns the worst exit status."""
    chosen = sys.argv[1:] or list(BENCHES)
    unknown = sorted(set(chosen) - set(BENCHES))
    if unknown:
        print(f"unknown benchmark {', '.join(unknown)}; there are {', '.join(BENCHES)}")
        return 2
    lines = [json.dumps(_machine()), *_kept(chosen)]
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


def _kept(chosen: list[str]) -> list[str]:
    """What earlier runs said of benchmarks that do not run now."""
    latest = HERE / "results" / "latest.jsonl"
    kept = []
    for line in latest.read_text().splitlines() if latest.exists() else []:
        name = json.loads(line)["bench"].partition(".")[0]
        if name != "machine" and name not in chosen:
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
