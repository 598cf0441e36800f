"""The pictures that wait for the encoder, and which of them is next. Pure.

by rank   priority, then arrival        by age   arrival alone: who waited for so long goes first

Its totals are kept, and whatever leaves, leaves in O(log n) amortised, however many wait.
"""

from __future__ import annotations

import dataclasses
import math

from vlm_worker.core.encoder_entries import Entry
from vlm_worker.core.queues import Heap
from vlm_worker.types import PreparedImage, RequestKey


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Fill:
    """A picture in the queue: whose it is, how important, and since when it waits."""

    entry: Entry
    image: PreparedImage
    key: RequestKey
    priority: int = 0
    arrival: int = 0
    arrived_at: float = 0.0

    @property
    def num_pixels(self) -> int:
        """See `num_pixels`."""
        return num_pixels(self.image)

    @property
    def num_patches(self) -> int:
        """What the encoder's work grows with."""
        return math.prod(self.image.grid_thw)


def num_pixels(image: PreparedImage) -> int:
    """Pixels of a picture as the encoder sees it: three float32 each, frames counted apart."""
    return image.patches.nbytes // 12


class PictureQueue:
    """Fills by rank and by age. Written by the encoder queue alone.

    Attributes:
        num_tokens: visual tokens of all.
        num_pixels: pixels of all.
    """

    def __init__(self, *, ageing_seconds: float) -> None:
        self.num_tokens = 0
        self.num_pixels = 0
        self._ageing_seconds = ageing_seconds
        self._ranked: Heap[Fill] = Heap()
        self._aging: Heap[Fill] = Heap()
        self._by_entry: dict[int, Fill] = {}

    def __len__(self) -> int:
        """Pictures in it."""
        return len(self._by_entry)

    def push(self, fill: Fill) -> None:
        """Let one wait; whoever comes back keeps the place that its arrival gives it."""
        assert fill.entry.id not in self._by_entry
        self._by_entry[fill.entry.id] = fill
        self._ranked.push((-fill.priority, fill.arrival), fill)
        self._aging.push(fill.arrival, fill)
        self.num_tokens += fill.image.num_tokens
        self.num_pixels += fill.num_pixels

    def first(self, *, now: float) -> Fill | None:
        """Who is next: the oldest if it waited for so long, else by rank."""
        oldest = self._aging.first
        if oldest is not None and now - oldest.arrived_at >= self._ageing_seconds:
            return oldest
        return self._ranked.first

    def remove(self, entry: Entry) -> Fill | None:
        """Take out what fills an entry; None where nothing does."""
        fill = self._by_entry.pop(entry.id, None)
        if fill is not None:
            self._ranked.discard(fill)
            self._aging.discard(fill)
            self.num_tokens -= fill.image.num_tokens
            self.num_pixels -= fill.num_pixels
        return fill
