"""Encoder outputs by content: the buffers behind `core.encoder_cache`.

    EncoderCache  (who, how long, how much)  --Entry.id-->  Tier  (where the bytes are)

One tier, the runner's own memory, is there; a colder one goes behind the same three methods.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

from vlm_worker.core.encoder_cache import EncoderCache, Entry, Lookup


class Tier(Protocol):
    """Keeps buffers by entry id."""

    def put(self, entry_id: int, buffer: Any) -> None:
        """Keep a buffer."""

    def get(self, entry_id: int) -> Any:
        """The buffer; KeyError if it is not here."""

    def drop(self, entry_id: int) -> None:
        """Forget a buffer, if it is here."""


class MemoryTier:
    """References to what the runner made, wherever that lies."""

    def __init__(self) -> None:
        self._buffers: dict[int, Any] = {}

    def put(self, entry_id: int, buffer: Any) -> None:
        """Keep a buffer."""
        self._buffers[entry_id] = buffer

    def get(self, entry_id: int) -> Any:
        """The buffer; KeyError if it is not here."""
        return self._buffers[entry_id]

    def drop(self, entry_id: int) -> None:
        """Forget a buffer, if it is here."""
        self._buffers.pop(entry_id, None)

    def __len__(self) -> int:
        """Buffers."""
        return len(self._buffers)


class EmbeddingCache:
    """The encoder cache with its buffers. Used by the engine thread alone."""

    def __init__(self, *, max_bytes: int, ttl_seconds: float, tier: Tier | None = None) -> None:
        self.index = EncoderCache(max_bytes=max_bytes, ttl_seconds=ttl_seconds)
        self.tier = MemoryTier() if tier is None else tier

    def lookup_or_begin(
        self, image_key: bytes, *, num_tokens: int, now: float
    ) -> tuple[Lookup, Entry]:
        """Find an entry, or begin one (see `EncoderCache`)."""
        found = self.index.lookup_or_begin(image_key, num_tokens=num_tokens, now=now)
        self._free_dropped()
        return found

    def find(self, image_key: bytes, *, num_tokens: int, now: float) -> Entry | None:
        """The entry that a lookup would hit or join. Changes nothing."""
        return self.index.find(image_key, num_tokens=num_tokens, now=now)

    def begin(self, image_key: bytes, *, num_tokens: int) -> Entry:
        """A new entry for the caller to complete (see `EncoderCache`)."""
        entry = self.index.begin(image_key, num_tokens=num_tokens)
        self._free_dropped()
        return entry

    def complete(self, entry: Entry, embedding: Any, *, num_bytes: int, now: float) -> None:
        """Fill an entry."""
        self.tier.put(entry.id, embedding)
        self.index.complete(entry, num_bytes=num_bytes, now=now)
        self._free_dropped()

    def fail(self, entry: Entry) -> None:
        """Give an entry up."""
        self.index.fail(entry)
        self._free_dropped()

    def get(self, entry: Entry) -> Any:
        """The buffer of a READY entry that the caller pins."""
        return self.tier.get(entry.id)

    def touch(self, entry: Entry, *, now: float) -> None:
        """A READY entry is used now."""
        self.index.touch(entry, now=now)

    def pin(self, entry: Entry, owner: Hashable) -> None:
        """Keep an entry for `owner`."""
        self.index.pin(entry, owner)

    def unpin(self, entry: Entry, owner: Hashable) -> None:
        """Let an entry go; idempotent."""
        self.index.unpin(entry, owner)
        self._free_dropped()

    def expire(self, *, now: float) -> None:
        """Drop what was not used for the time to live."""
        self.index.expire(now=now)
        self._free_dropped()

    def _free_dropped(self) -> None:
        for entry_id in self.index.take_dropped():
            self.tier.drop(entry_id)
