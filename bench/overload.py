"""Ten times the capacity for 20 s: bounded queues, refusals within 20 ms, recovery within 10 s.

    python bench/overload.py [--seconds 20] [--factor 10]

The service is that of the fault tests: real processes with a stub model and steps of a fixed
length. One JSON line; `met` says which limits hold. The gateway times refusals, and so do the
clients, which share the processors.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "worker"), str(ROOT / "tests")]

from worker.faults.figures import quantile  # noqa: E402
from worker.faults.overload import CAPACITY, MAX_QUEUED, MAX_WAITING, overload  # noqa: E402

REJECT_SECONDS = 0.020
RECOVERED_SECONDS = 10.0


async def main() -> None:
    """One run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--factor", type=float, default=10.0)
    options = parser.parse_args()
    got = await overload(options.seconds, factor=options.factor)
    met = {
        "exact": got.accepted + got.rejected + got.cancelled == got.sent
        and sum(got.own_account.values()) == got.sent,
        "bounded": got.longest_queue <= MAX_QUEUED and got.longest_wait_for_room <= MAX_WAITING,
        "reject_p99_within_20_ms": quantile(got.own_reject_seconds, 0.99) <= REJECT_SECONDS,
        "also_as_the_crowd_sees_it": quantile(got.reject_seconds, 0.99) <= REJECT_SECONDS,
        "recovered_within_10_s": got.recovered_seconds <= RECOVERED_SECONDS,
    }
    figure = {
        "bench": "overload",
        "seconds": options.seconds,
        "factor": options.factor,
        "capacity_per_s": CAPACITY,
        "goodput": round(got.accepted / options.seconds / CAPACITY, 2),
        **got.line,
        "met": met,
    }
    print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
