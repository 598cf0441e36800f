"""Computes the pauses between retries."""

from __future__ import annotations

import dataclasses
import random


@dataclasses.dataclass(frozen=True)
class Backoff:
    """Seconds before the next retry: `first` after one failure, then doubled up to `longest`.

    They are before a jitter of ±30 %.
    """

    longest: float
    first: float = 1.0

    def seconds(self, failures: int) -> float:
        """Return the pause after a number of failures in a row."""
        doubled = self.first * 2.0 ** min(max(0, failures - 1), 30)
        return min(self.longest, doubled) * random.uniform(0.7, 1.3)  # noqa: S311
