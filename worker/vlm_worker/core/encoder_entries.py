"""What the encoder cache keeps account of: entries, the tiers that they lie in, and their moves."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Hashable


class Tier(enum.Enum):
    """Where a buffer lies."""

    HOT = "hot"
    COLD = "cold"


@dataclasses.dataclass(eq=False, slots=True)
class Entry:
    """One encoder output. The cache is its only writer.

    One that was discarded while pinned is not found any more, and goes with its last pin.
    """

    id: int
    image_key: bytes
    num_tokens: int
    ready: bool = False
    num_bytes: int = 0
    expires: float = 0.0
    tier: Tier = Tier.HOT
    pins: set[Hashable] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True, slots=True)
class Move:
    """What is to be done with the buffer of an entry: carried to a tier, or dropped (None)."""

    entry: Entry
    to: Tier | None


@dataclasses.dataclass(eq=False, slots=True)
class Shelf:
    """One tier's account. `idle` holds what may be evicted, least recently used first."""

    max_bytes: int
    num_bytes: int = 0
    num_entries: int = 0
    num_hits: int = 0
    num_evictions: int = 0
    idle: collections.OrderedDict[int, Entry] = dataclasses.field(
        default_factory=collections.OrderedDict
    )

    @property
    def oldest(self) -> Entry:
        """The idle entry that was not used for longest."""
        return next(iter(self.idle.values()))

    def add(self, entry: Entry) -> None:
        """Its bytes lie here now."""
        self.num_bytes += entry.num_bytes
        self.num_entries += 1

    def remove(self, entry: Entry) -> None:
        """Its bytes lie here no longer."""
        self.idle.pop(entry.id, None)
        self.num_bytes -= entry.num_bytes
        self.num_entries -= 1
