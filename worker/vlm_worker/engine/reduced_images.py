"""Embeddings of reduced images: from the whole image, cached or encoded first.

    kept entry  <── reduce ── whole entry, cached              no encoder call
                <── reduce ── whole entry, from the disk or the encoder (pinned until then)

Both entries stay in the encoder cache. The whole one serves every other reduction of the image.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

from vlm_worker.core.encoder_cache import EncoderCache, Entry, Tier
from vlm_worker.core.fair_order import Rank
from vlm_worker.engine.attempts import EngineContext
from vlm_worker.engine.embedding_reads import EmbeddingReads
from vlm_worker.engine.encoder_batches import EncoderQueue
from vlm_worker.engine.runner import EmbeddingCopies
from vlm_worker.errors import CancelledError, EngineError
from vlm_worker.types import PreparedImage, RequestKey


class ReducedImages:
    """Fills entries of reduced images. Engine thread only."""

    def __init__(
        self,
        context: EngineContext,
        cache: EncoderCache,
        queue: EncoderQueue,
        copies: EmbeddingCopies,
        reads: EmbeddingReads,
    ) -> None:
        self._context, self._clock = context, context.clock
        self._cache, self._queue, self._copies = cache, queue, copies
        self._reads = reads
        self._wholes: dict[Entry, Entry] = {}  # kept entry, not filled yet: its whole entry

    @property
    def num_pins(self) -> int:
        """Whole entries that are pinned until they are filled, once for each kept entry."""
        return len(self._wholes)

    def from_cache(
        self, image: PreparedImage, owner: Hashable, *, counted: bool = True
    ) -> Entry | None:
        """Reduce the cached whole image; returns the filled entry, pinned for `owner`.

        Returns None if the whole image is not cached, or cannot tell which tokens to keep. Else it
        counts as a hit, with `counted`.

        Raises:
            EngineError: the device fails.
        """
        now, num_tokens = self._clock(), image.num_tokens
        whole = self._cache.find(image.image_key, num_tokens=num_tokens, now=now)
        if whole is None or not whole.ready:
            return None
        tier = self._cache.cold if whole.tier is Tier.COLD else self._cache.hot
        whole = self._cache.lookup(
            image.image_key, self, num_tokens=num_tokens, now=now, counted=False
        )
        if whole is None:
            return None
        try:
            embedding = self._reduce(whole, image)
        finally:
            self._cache.unpin(whole, self, now=now)
        if embedding is None:
            return None
        entry = self._begin(image, owner)
        if counted:
            self._cache.count_hit(whole, tier)
        else:  # the lookup of `encode` counts it
            entry.counts_as_disk, whole.counts_as_disk = whole.counts_as_disk, False
        self._complete(entry, image, embedding)
        return entry

    def encode(
        self, image: PreparedImage, owner: Hashable, key: RequestKey, *, rank: Rank
    ) -> Entry:
        """Read or encode the whole image, or join that; returns the entry to be filled."""
        entry = self._begin(image, owner)
        whole = self._cache.find(image.image_key, num_tokens=image.num_tokens, now=self._clock())
        self._fill_whole(entry, image, key, rank, may_read=whole is None)
        return entry

    def abandon(self, entry: Entry) -> bool:
        """Fail an entry that nobody waits for; False if it is not one of a reduced image."""
        whole = self._wholes.pop(entry, None)
        if whole is None:
            return False
        self._unpin(whole, entry)
        self._fail(entry, CancelledError("no call waits for this image"))
        return True

    def _begin(self, image: PreparedImage, owner: Hashable) -> Entry:
        return self._cache.begin(
            image.kept_key, owner, num_tokens=image.kept_tokens, counted=False
        )  # the lookup of the whole image is counted

    def _fill_whole(
        self,
        entry: Entry,
        image: PreparedImage,
        key: RequestKey,
        rank: Rank,
        *,
        may_read: bool,
    ) -> None:
        """Join what fills the whole image, or begin it; without `may_read`, at the encoder."""
        now = self._clock()
        whole = self._cache.find(image.image_key, num_tokens=image.num_tokens, now=now)
        if whole is not None and not whole.ready:
            self._cache.lookup(image.image_key, entry, num_tokens=image.num_tokens, now=now)
            self._reads.join(whole, self._reads.encoding(whole, image, key, rank))
        else:
            whole = self._cache.begin(
                image.image_key, entry, num_tokens=image.num_tokens, counted=not may_read, now=now
            )
            encode = self._reads.encoding(whole, image, key, rank)
            if may_read:
                self._reads.fill(whole, encode)
            else:
                encode()
        self._wholes[entry] = whole
        filled = functools.partial(self._on_filled, entry, whole, image, key, rank)
        whole.waiters.append(filled)

    def _on_filled(
        self,
        entry: Entry,
        whole: Entry,
        image: PreparedImage,
        key: RequestKey,
        rank: Rank,
        error: Exception | None,
    ) -> None:
        if self._wholes.get(entry) is not whole:  # abandoned meanwhile
            return
        del self._wholes[entry]
        embedding = None
        if error is None:
            try:
                embedding = self._reduce(whole, image)
            except EngineError as failure:
                error = failure
        self._unpin(whole, entry)
        if error is not None:
            self._fail(entry, error)
        elif embedding is None:  # a request for another reduction began the encoding
            self._fill_whole(entry, image, key, rank, may_read=False)
        else:
            entry.is_from_disk = whole.is_from_disk
            self._complete(entry, image, embedding)

    def _reduce(self, whole: Entry, image: PreparedImage) -> Any:
        try:
            return self._copies.reduce_embedding(whole.buffer, image)
        except EngineError as error:
            self._context.device_errors.record(error)
            raise

    def _complete(self, entry: Entry, image: PreparedImage, embedding: Any) -> None:
        self._cache.complete(entry, embedding, now=self._clock())
        entry.notify(None)
        self._queue.on_ready(image.kept_key)

    def _fail(self, entry: Entry, error: Exception) -> None:
        self._cache.fail(entry)
        entry.notify(error)

    def _unpin(self, whole: Entry, entry: Entry) -> None:
        self._cache.unpin(whole, entry, now=self._clock())
        if not whole.ready and not whole.pins:
            self._reads.abandon(whole)
