"""What the machine can do at this moment: read bandwidth and bfloat16 peak, in every round.

What a benchmark of the model runner asks is timed between these probes, in the same rounds, so that
whatever else the machine does slows all of them alike.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable, Hashable
from typing import Any

import random_vlm
from sides import read_bandwidth

PEAK_SIZE = 2048
SECONDS = 0.5  # of one case in one round
MOST_MOVED = 1.3
"""Where a probe's best round is more than this times its worst, the machine had other work: the
limits are not known, and `met` is null."""


class Rounds:
    """Cases measured in turn with both probes; medians of rounds.

    `seconds` of each case, `bandwidths` and `peaks` (bytes and operations per second) have one
    value a round.
    """

    def __init__(self, cases: dict[Hashable, Callable[[], Any]], *, threads: int) -> None:
        self._cases, self._threads = cases, threads
        self._peak = peak_probe(seconds=SECONDS)
        self.seconds: dict[Hashable, list[float]] = {case: [] for case in cases}
        self.bandwidths: list[float] = []
        self.peaks: list[float] = []

    def run(self, count: int) -> None:
        """Each case once uncounted, then so many rounds."""
        for run in self._cases.values():
            run()
        for _ in range(count):
            self.bandwidths.append(read_bandwidth(self._threads))
            self.peaks.append(self._peak())
            for case, run in self._cases.items():
                self.seconds[case].append(seconds_per_call(run, seconds=SECONDS))

    def figures(
        self, case: Hashable, *, num_bytes: int, operations: float, goal: float | None
    ) -> dict[str, Any]:
        """Against the longer of reading so many bytes and of so many operations, by round."""
        limits = [
            max(num_bytes / bandwidth, operations / peak)
            for bandwidth, peak in zip(self.bandwidths, self.peaks, strict=True)
        ]
        shares = [limit / each for limit, each in zip(limits, self.seconds[case], strict=True)]
        moved = max(max(probe) / min(probe) for probe in (self.bandwidths, self.peaks))
        share = round(statistics.median(shares), 3)
        figures: dict[str, Any] = {
            "ms": round(statistics.median(self.seconds[case]) * 1e3, 2),
            "ms_per_round": [round(each * 1e3, 1) for each in self.seconds[case]],
            "of_limit": share,
            "of_limit_per_round": [round(one, 2) for one in shares],
            "read_gb_per_second": round(statistics.median(self.bandwidths) / 1e9, 1),
            "peak_gflop_per_second": round(statistics.median(self.peaks) / 1e9),
            "probes_moved": round(moved, 2),
        }
        if num_bytes:
            figures["gb_per_second"] = round(
                num_bytes / statistics.median(self.seconds[case]) / 1e9, 1
            )
        if goal is not None:
            figures |= {"goal": goal, "met": share >= goal if moved <= MOST_MOVED else None}
        return figures

    def against(self, case: Hashable, other: Hashable) -> float:
        """Seconds of one case over those of another, median of the rounds."""
        pairs = zip(self.seconds[case], self.seconds[other], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)


def arguments(description: str) -> argparse.Namespace:
    """What the command line says; threads that torch starts from here on wait as a worker's do."""
    os.putenv("OMP_WAIT_POLICY", "PASSIVE")
    return random_vlm.arguments(description, rounds=5).parse_args()


def peak_probe(*, seconds: float) -> Callable[[], float]:
    """Gives operations per second of a product of squares in bfloat16."""
    import torch

    a, b = (torch.randn(PEAK_SIZE, PEAK_SIZE).to(torch.bfloat16) for _ in range(2))
    product = functools.partial(torch.nn.functional.linear, a, b)
    return lambda: 2 * PEAK_SIZE**3 / seconds_per_call(product, seconds=seconds)


def seconds_per_call(run: Callable[[], Any], *, seconds: float) -> float:
    """Of as many calls as fit into so many seconds."""
    began, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        run()
        count += 1
    return passed / count
