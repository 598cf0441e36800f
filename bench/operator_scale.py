"""The operator with 100 services and 1,000 pods: event to first write, idle writes, memory.

    python bench/operator_scale.py [--services 100] [--pods 10] [--idle 120]

A real control plane, nodes that only set the status of pods, and the operator in its own process
with the rights of the chart. One JSON line; `met` says which goals are met. If all services change
at once, the figure is the wait of the last one; it has no goal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "operator"), str(ROOT / "tests" / "operator")]

from support.scale import Load, quantile, running_services  # noqa: E402

FIRST_WRITE_SECONDS = 1.0
MEMORY_BYTES = 250 * 2**20


async def main() -> None:
    """One run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--services", type=int, default=100)
    parser.add_argument("--pods", type=int, default=10, help="of each service")
    parser.add_argument("--idle", type=float, default=120.0, help="seconds without an event")
    options = parser.parse_args()
    async with running_services(Load(options.services, options.pods, options.idle)) as found:
        got = await found.measure()
    met = {
        "first_write_p99_within_1_s": quantile(got.first_write_seconds, 0.99)
        <= FIRST_WRITE_SECONDS,
        "no_idle_write": not got.idle_writes,
        "lease_kept": not got.lapses and not got.transitions,
        "memory_within_250_mib": got.rss_bytes <= MEMORY_BYTES,
    }
    figure = {
        "bench": "operator_scale",
        "services": options.services,
        "pods": options.services * options.pods,
        "idle_s": options.idle,
        "created_s": round(got.created_seconds, 1),
        "first_write_p50_s": round(quantile(got.first_write_seconds, 0.5), 3),
        "first_write_p99_s": round(quantile(got.first_write_seconds, 0.99), 3),
        "burst_p50_s": round(quantile(got.burst_seconds, 0.5), 2),
        "burst_p99_s": round(quantile(got.burst_seconds, 0.99), 2),
        "idle_writes": len(got.idle_writes),
        "idle_cpu": round(got.idle_cpu, 3),
        "rss_mib": round(got.rss_bytes / 2**20),
        "reads_per_turn": round(got.reads_per_turn, 2),
        "turns_per_event": round(got.turns_per_event, 1),
        "loop_lag_p99_s": got.lag_p99_seconds,
        "burst_loop_lag_p99_s": got.burst_lag_p99_seconds,
        "lease_lapses": got.lapses,
        "lease_transitions": got.transitions,
        "load_average": round(got.load_average, 1),
        "met": met,
    }
    print(json.dumps(figure), flush=True)
    for write in got.idle_writes[:10]:
        print("idle write:", *write, file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main())
