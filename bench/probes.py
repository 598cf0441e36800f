"""Probes the speed of the machine in every round: read bandwidth and matrix products.

Limits use `peak_probe`, the speed of oneDNN's product in bfloat16, which a library can reach. The
peak of the processor (`machine_peak`) is higher and is reported too.

A benchmark of the model runner is timed between these probes, in the same rounds, so that other
work on the machine slows all of them equally.
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
SECONDS = 0.5  # per case and round
MAX_PROBE_RATIO, MIN_ROUNDS = 1.3, 3
"""A round counts if its limit is within this ratio of the median round. If fewer than MIN_ROUNDS
count, other work disturbed the machine: all rounds count, and `met` is null."""


class Rounds:
    """Cases that are measured in turn with the probes; results are medians of rounds.

    `seconds` of each case, `bandwidths`, `peaks` (oneDNN's product) and `machine_peaks` (the
    processor's own; None if it cannot be probed) have one value per round, in bytes and operations
    per second.
    """

    def __init__(self, cases: dict[Hashable, Callable[[], Any]], *, threads: int) -> None:
        self._cases, self._threads = cases, threads
        self.seconds: dict[Hashable, list[float]] = {case: [] for case in cases}
        self.bandwidths: list[float] = []
        self.peaks: list[float] = []
        self.machine_peaks: list[float | None] = []

    def run(self, count: int) -> None:
        """Run each case once as a warm-up, then `count` rounds."""
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
        """Compares a case with its limit: the longer of reading its bytes and of its operations.

        Medians are of the rounds that count; `rounds` has their number and the total.
        """
        limits = [
            max(num_bytes / bandwidth, operations / peak)
            for bandwidth, peak in zip(self.bandwidths, self.peaks, strict=True)
        ]
        seconds = self.seconds[case]
        shares = [limit / each for limit, each in zip(limits, seconds, strict=True)]
        counted = stable_rounds(limits)
        if len(counted) < MIN_ROUNDS:
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
            figures |= {"goal": goal, "met": share >= goal if moved <= MAX_PROBE_RATIO else None}
        return figures

    def against(self, case: Hashable, other: Hashable) -> float:
        """Seconds of one case divided by those of another, median of the rounds."""
        pairs = zip(self.seconds[case], self.seconds[other], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)


def stable_rounds(limits: Sequence[float]) -> list[int]:
    """Indices of the rounds whose limit is near the median."""
    middle, width = statistics.median(limits), MAX_PROBE_RATIO**0.5
    return [i for i, limit in enumerate(limits) if middle / width <= limit <= middle * width]


def arguments(description: str) -> argparse.Namespace:
    """Parse the command line. torch threads that start later wait passively, as in a worker."""
    os.putenv("OMP_WAIT_POLICY", "PASSIVE")
    return random_vlm.arguments(description, rounds=5).parse_args()


def peak_probe(*, seconds: float) -> Callable[[], float]:
    """A probe of operations per second of a square bfloat16 product."""
    import torch

    a, b = (torch.randn(PEAK_SIZE, PEAK_SIZE).to(torch.bfloat16) for _ in range(2))
    product = functools.partial(torch.nn.functional.linear, a, b)
    return lambda: 2 * PEAK_SIZE**3 / seconds_per_call(product, seconds=seconds)


def seconds_per_call(run: Callable[[], Any], *, seconds: float) -> float:
    """Mean of as many calls as fit into `seconds`."""
    began, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - began) < seconds:
        run()
        count += 1
    return passed / count
