"""Randomness that can be had again: every run draws its own seed and prints it."""

from __future__ import annotations

import random


def drawing(seed: int | None = None) -> random.Random:
    """A generator; to have a failure again, give the seed that it printed here."""
    seed = random.randrange(1 << 32) if seed is None else seed
    print(f"seed {seed}")
    return random.Random(seed)
