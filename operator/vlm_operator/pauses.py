"""How long to wait before the next try: longer each time, and not all at the same moment."""

from __future__ import annotations

import random


def growing(failures: int, *, longest: float, first: float = 1.0) -> float:
    """Return seconds: `first` after one failure, doubled with each, `longest` at most, jittered."""
    doubled = first * 2.0 ** min(max(0, failures - 1), 30)
    return min(longest, doubled) * random.uniform(0.7, 1.3)  # noqa: S311
