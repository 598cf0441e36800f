"""How many tokens of a prompt run in the next step. A pure function.

tokens    t t t [image 0: 6 tokens] t t [image 1] t
start     ^ remaining ............................|
chunk     |---- budget ----|                            may end inside an image on hand
          |---|                                         ends before a missing one
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from vlm_worker.types import ImageItem


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """`size` tokens from the start; `missing` is the item whose embedding ended it, if one did."""

    size: int
    missing: int | None = None


def next_chunk(
    start: int,
    remaining: int,
    *,
    budget: int,
    items: Sequence[ImageItem],
    embeddings: Sequence[Any],
    whole_images: bool,
) -> Chunk:
    """Choose the chunk `[start, start + size)`.

    Args:
        start: tokens computed so far.
        remaining: tokens to compute.
        budget: tokens that the step has left.
        items: pictures of the sequence, in order.
        embeddings: per item, what is on hand, or None.
        whole_images: an image, or what is left of it, runs in one chunk.
    """
    size = min(remaining, budget)
    for number, item in enumerate(items):
        if item.offset >= start + size:
            break
        if item.end <= start:
            continue
        if embeddings[number] is None:
            return Chunk(max(item.offset - start, 0), missing=number)
        if whole_images and item.end > start + size:
            return Chunk(max(item.offset - start, 0))
    return Chunk(size)
