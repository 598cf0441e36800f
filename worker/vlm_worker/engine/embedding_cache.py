"""Encoder outputs by image key: the buffers of `core.encoder_cache`.

    EncoderCache (pins, lifetimes, sizes)  --moves-->  hot   embeddings of the runner, on its device
                                                       cold  the same rows as bytes, on the host

The engine thread copies between the tiers, between two steps, which wait for the copies.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any, Protocol

from vlm_worker.core.encoder_cache import EncoderCache, Entry, Lookup, Tier

logger = logging.getLogger(__name__)


class Codec(Protocol):
    """Converts embeddings to bytes and back: a part of the runner's interface."""

    def export_embedding(self, embedding: Any) -> memoryview:
        """The rows as bytes; `embedding_bytes` gives their number."""

    def import_embedding(self, rows: memoryview, num_tokens: int) -> Any:
        """The embedding of rows as bytes."""

    def embedding_bytes(self, embedding: Any) -> int:
        """Number of bytes of the rows."""


class EmbeddingCache:
    """The encoder cache with its buffers. Engine thread only.

    Args:
        codec: converts embeddings.
        max_bytes: budget of the hot tier.
        cold_bytes: budget of the cold tier; 0 disables it.
        ttl_seconds: an embedding that was unused for this time is not served again.
    """

    def __init__(
        self, codec: Codec, *, max_bytes: int, cold_bytes: int = 0, ttl_seconds: float
    ) -> None:
        self.index = EncoderCache(
            max_bytes=max_bytes, cold_bytes=cold_bytes, ttl_seconds=ttl_seconds
        )
        self._codec = codec
        self._hot: dict[int, Any] = {}
        self._cold: dict[int, memoryview] = {}

    def lookup_or_begin(
        self, image_key: bytes, owner: Hashable, *, num_tokens: int, now: float
    ) -> tuple[Lookup, Entry]:
        """Pin an existing entry for `owner`, or a new one, which the caller completes or fails."""
        entry = self.lookup(image_key, owner, num_tokens=num_tokens, now=now)
        if entry is not None:
            return (Lookup.HIT if entry.ready else Lookup.JOIN), entry
        return Lookup.MISS, self.begin(image_key, owner, num_tokens=num_tokens)

    def lookup(
        self,
        image_key: bytes,
        owner: Hashable,
        *,
        num_tokens: int,
        now: float,
        counted: bool = True,
    ) -> Entry | None:
        """Pin an entry for `owner`, READY or pending; None if there is none.

        With `counted` False, the statistics are unchanged: they contain this lookup already.
        """
        entry = self.index.find(image_key, num_tokens=num_tokens, now=now)
        if entry is None or not self._promote(entry):
            return None
        self.index.use(entry, owner, now=now, counted=counted)
        self._move_buffers()
        return entry

    def find(self, image_key: bytes, *, num_tokens: int, now: float) -> Entry | None:
        """The entry that a lookup would pin. Changes nothing."""
        return self.index.find(image_key, num_tokens=num_tokens, now=now)

    def begin(self, image_key: bytes, owner: Hashable, *, num_tokens: int) -> Entry:
        """A new entry, pinned for `owner`, for the caller to complete or fail."""
        entry = self.index.begin(image_key, owner, num_tokens=num_tokens)
        self._move_buffers()
        return entry

    def complete(self, entry: Entry, embedding: Any, *, now: float) -> None:
        """Set the embedding of a pending entry."""
        self._hot[entry.id] = embedding
        self.index.complete(entry, num_bytes=self._codec.embedding_bytes(embedding), now=now)
        self._move_buffers()

    def fail(self, entry: Entry) -> None:
        """Remove a pending entry that failed."""
        self.index.fail(entry)
        self._move_buffers()

    def get(self, entry: Entry) -> Any:
        """The embedding of a READY entry that the caller pins."""
        return self._hot[entry.id]

    def unpin(self, entry: Entry, owner: Hashable, *, now: float) -> None:
        """Unpin an entry; idempotent."""
        self.index.unpin(entry, owner, now=now)
        self._move_buffers()

    def expire(self, *, now: float) -> None:
        """Drop embeddings that were unused for the time to live."""
        self.index.expire(now=now)
        self._move_buffers()

    def check(self) -> None:
        """Raise AssertionError if the index and the buffers differ."""
        self.index.check()
        tiers = self.index.hot, self.index.cold
        assert (len(self._hot), len(self._cold)) == tuple(tier.num_entries for tier in tiers)
        assert self.index.cold.num_bytes == sum(rows.nbytes for rows in self._cold.values())

    def _promote(self, entry: Entry) -> bool:
        """Move the buffer of an entry to the hot tier; if that fails, drop the entry, return False.

        If the device is out of memory, this is a miss: the image is encoded again, or fails then.
        """
        if entry.tier is Tier.HOT:
            return True
        try:
            embedding = self._codec.import_embedding(self._cold[entry.id], entry.num_tokens)
        except Exception:
            logger.exception("an embedding could not be copied from host memory to the device")
            self.index.discard(entry)
            self._move_buffers()
            return False
        del self._cold[entry.id]
        self._hot[entry.id] = embedding
        return True

    def _move_buffers(self) -> None:
        """Move and free buffers as the index says."""
        while moves := self.index.take_moves():
            for move in moves:
                if move.to is None:
                    self._hot.pop(move.entry.id, None)
                    self._cold.pop(move.entry.id, None)
                else:
                    self._demote(move.entry)

    def _demote(self, entry: Entry) -> None:
        """Copy a buffer to the cold tier; if that fails, drop the entry."""
        embedding = self._hot.pop(entry.id)
        try:
            self._cold[entry.id] = self._codec.export_embedding(embedding)
        except Exception:
            logger.exception("an embedding could not be copied to host memory")
            self.index.discard(entry)
