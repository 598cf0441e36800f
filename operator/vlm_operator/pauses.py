"""Exponential backoff with jitter."""

from __future__ import annotations

import random


def growing(failures: int, *, longest: float, first: float = 1.0) -> float:
    """Return the pause in seconds: `first` after one failure, doubled with each further one.

    It is at most `longest` before the jitter of ±30 %.
    """
    doubled = first * 2.0 ** min(max(0, failures - 1), 30)
    return min(longest, doubled) * random.uniform(0.7, 1.3)  # noqa: S311
