"""How many tokens of each prompt run in the next step. Pure.

tokens    t t t [image 0: 6 tokens] t t [image 1] t
start     ^ remaining ............................|
chunk     |---- budget ----|                            may end inside an image on hand
          |---|                                         ends before a missing one

Prompts share the budget in two passes: each in turn gets what it can use, a long one up to a cap;
then what is left goes to those that the cap held back, in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Seq
from typing import Any

from vlm_worker.core.sequence import Sequence
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
    items: Seq[ImageItem],
    embeddings: Seq[Any],
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


class PromptShares:
    """One step's budget of prompt tokens, and what becomes of it.

    Attributes:
        left: tokens that nobody has yet.
        chunks: who computes how many, in the order in which they came.
        stalled: sequences that found an embedding missing at once, and where they stood.
    """

    def __init__(self, budget: int, *, cap: int | None, whole_images: bool) -> None:
        self.left = budget
        self.chunks: list[tuple[Sequence, int]] = []
        self.stalled: list[tuple[Sequence, int]] = []
        self._cap = budget if cap is None else cap
        self._whole_images = whole_images
        self._held_back: list[tuple[int, int]] = []  # index into chunks, start

    def offer(self, sequence: Sequence, start: int) -> int:
        """Tokens from `start` on that the sequence may compute; 0 may mean that it is stalled now.

        An image that may not be cut goes beyond the cap: there is no smaller chunk.
        """
        if sequence.stalled or not self.left:
            return 0
        chunk = self._chunk(sequence, start, min(self.left, self._cap))
        if not chunk.size and chunk.missing is None and self._cap < self.left:
            chunk = self._chunk(sequence, start, self.left)
        if not chunk.size and chunk.missing is not None:
            sequence.stall()
            self.stalled.append((sequence, start))
        return chunk.size

    def take(self, sequence: Sequence, start: int, count: int) -> None:
        """Let the sequence have what was offered."""
        if self._cap < self.left and start + count < sequence.num_tokens:
            self._held_back.append((len(self.chunks), start))
        self.chunks.append((sequence, count))
        self.left -= count

    def give_rest(self) -> None:
        """Share out what is left among those that the cap held back."""
        for index, start in self._held_back:
            if not self.left:
                return
            sequence, count = self.chunks[index]
            size = self._chunk(sequence, start, count + self.left).size
            self.chunks[index] = sequence, size
            self.left -= size - count

    def _chunk(self, sequence: Sequence, start: int, budget: int) -> Chunk:
        return next_chunk(
            start,
            sequence.num_tokens - start,
            budget=budget,
            items=sequence.items,
            embeddings=sequence.embeddings,
            whole_images=self._whole_images,
        )
