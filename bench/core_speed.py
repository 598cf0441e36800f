"""Probes how fast this core runs Python and numpy, by a fixed amount of work.

A figure in microseconds changes with the core: its clock, and the caches that neighbours and the
model leave. So a benchmark of Python times this work in the same rounds. A round counts if its
probe is within `probes.MAX_PROBE_RATIO` of the median. If fewer than `probes.MIN_ROUNDS` count, all
do, and `probes_moved` makes the table of goals report a busy machine.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from probes import MIN_ROUNDS, stable_rounds

_COUNTS = np.arange(256, dtype=np.int64)
_KNOWN = {number: [number] for number in range(256)}
NUM_PASSES = 4


def core_seconds() -> float:
    """This thread's processor time for a fixed amount of work, about 100 us."""
    began = time.thread_time()
    for _ in range(NUM_PASSES):
        counts = _COUNTS + 1
        counts[counts > 128] -= 1
        for number in counts.take(_COUNTS).tolist():
            _KNOWN[number & 255][0] = number
    return time.thread_time() - began


@dataclasses.dataclass(frozen=True, slots=True)
class Counted:
    """The rounds that count, of `num_rounds`, and the ratio of their probes."""

    rounds: Sequence[int]
    num_rounds: int
    probe_us: float
    probes_moved: float

    @classmethod
    def of(cls, probes: Sequence[float]) -> Counted:
        """Select rounds by the seconds of their probe."""
        rounds = stable_rounds(probes)
        if len(rounds) < MIN_ROUNDS:
            rounds = list(range(len(probes)))
        kept = [probes[i] for i in rounds]
        moved = max(kept) / min(kept)
        return cls(rounds, len(probes), statistics.median(kept) * 1e6, moved)

    def median(self, values: Sequence[float]) -> float:
        """The median over the rounds that count; one value per round."""
        return statistics.median(values[i] for i in self.rounds)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a line of results."""
        return {
            "probe_us": round(self.probe_us, 1),
            "probes_moved": round(self.probes_moved, 2),
            "rounds": [len(self.rounds), self.num_rounds],
        }
