"""How a question is worded, and which objects of a scene it can be about."""

from __future__ import annotations

import random

Turns = list[tuple[str, str]]
"""Questions and answers of one conversation."""


def pick(rng: random.Random, *xs: str) -> str:
    """One of several wordings."""
    return rng.choice(xs)


def color_word(rng):
    """Both spellings."""
    return rng.choice(["color", "color", "colour"])


def name(o):
    """What an object is called."""
    return f"{o['color']} {o['shape']}"


def only_ones(objs, key):
    """Objects that no other has the key of, by key."""
    c = {}
    for o in objs:
        c.setdefault(key(o), []).append(o)
    return {k: v[0] for k, v in c.items() if len(v) == 1}
