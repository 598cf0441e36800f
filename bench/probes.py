"""What the machine can do at this moment: read bandwidth and speeds of products, in every round.

Limits are made of `peak_probe`, the speed of oneDNN's product in bfloat16: what a library reaches.
Beside it stands the peak of the processor itself (`machine_peak`), which is higher.

What a benchmark of the model runner asks is timed between these probes, in the same rounds, so that
whatever else the machine does slows all of them alike.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import random_vlm
from machine_peak import machine_peak_probe
from sides import read_bandwidth

PEAK_SIZE = 2048
SECONDS = 0.5  # of one case in one round
MOST_MOVED, LEAST_ROUNDS = 1.3, 3
"""Rounds count whose limits, as probed, are within this of each other. Where fewer than so many do,
the machine had other work: all count, the limit is not known, and `met` is null."""


class Rounds:
    """Cases measured in turn with both probes; medians of rounds.

    `seconds` of each case, `bandwidths`, `peaks` (oneDNN's product) and `machine_peaks` (the
    processor's own; None if it cannot be probed) have one value a round, in bytes and operations
    per second.
    """

    def __init__(self, cases: dict[Hashable, Callable[[], Any]], *, threads: int) -> None:
        self._cases, self._threads = cases, threads
        self.seconds: dict[Hashable, list[float]] = {case: [] for case in cases}
        self.bandwidths: list[float] = []
        self.peaks: list[float] = []
        self.machine_peaks: list[float | None] = []

    def run(self, count: int) -> None:
        """Each case once uncounted, then so many rounds."""
        peak = peak_probe(seconds=SECONDS)
        machine_peak = machine_peak_probe(self._threads, seconds=SECONDS)
        for run in self._cases.values():
            run()
        for _ in range(count):
            self.bandwidths.append(read_bandwidth(self._threads))
            self.peaks.append(peak())
            self.machine_peaks.append(machine_peak())
            for case, run in self._cases.items():
                self.seconds[case].append(seconds_per_call(run, seconds=SECONDS))

    def figures(
        self, case: Hashable, *, num_bytes: int, operations: float, goal: float | None
    ) -> dict[str, Any]:
        """Against the longer of reading so many bytes and of so many operations, by round.

        Medians are of the rounds that count; `rounds` says how many of how many do.
        """
        limits = [
            max(num_bytes / bandwidth, operations / peak)
            for bandwidth, peak in zip(self.bandwidths, self.peaks, strict=True)
        ]
        seconds = self.seconds[case]
        shares = [limit / each for limit, each in zip(limits, seconds, strict=True)]
        counted = alike(limits)
        if len(counted) < LEAST_ROUNDS:
            counted = list(range(len(limits)))

        def middle(values: Sequence[float]) -> float:
            return statistics.median(values[i] for i in counted)

        moved = max(limits[i] for i in counted) / min(limits[i] for i in counted)
        share = round(middle(shares), 3)
        figures: dict[str, Any] = {
            "ms": round(middle(seconds) * 1e3, 2),
            "ms_per_round": [round(each * 1e3, 1) for each in seconds],
            "of_limit": share,
            "of_limit_per_round": [round(one, 2) for one in shares],
            "read_gb_per_second": round(middle(self.bandwidths) / 1e9, 1),
            "peak_gflop_per_second": round(middle(self.peaks) / 1e9),
            "probes_moved": round(moved, 2),
            "rounds": [len(counted), len(limits)],
        }
        machine_peaks = [peak for peak in self.machine_peaks if peak is not None]
        if operations and len(machine_peaks) == len(seconds):
            shares = [
                operations / peak / each for peak, each in zip(machine_peaks, seconds, strict=True)
            ]
            figures["of_machine"] = round(middle(shares), 3)
            figures["machine_gflop_per_second"] = round(middle(machine_peaks) / 1e9)
        if num_bytes:
            figures["gb_per_second"] = round(num_bytes / middle(seconds) / 1e9, 1)
        if goal is not None:
            figures |= {"goal": goal, "met": share >= goal if moved <= MOST_MOVED else None}
        return figures

    def against(self, case: Hashable, other: Hashable) -> float:
        """Seconds of one case over those of another, median of the rounds."""
        pairs = zip(self.seconds[case], self.seconds[other], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)


def alike(limits: Sequence[float]) -> list[int]:
    """The rounds in which the machine was as it mostly was: those around the median."""
    middle, width = statistics.median(limits), MOST_MOVED**0.5
    return [i for i, limit in enumerate(limits) if middle / width <= limit <= middle * width]


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
