"""Embeddings on the engine thread: who asked for them, who holds them, and until when.

    encode(key, images) --HIT--> ItemReady
                        --JOIN-> wait with whoever began it
                        --MINE-> EncoderQueue -> cache -> all who wait

Prompts (`prompt_images`) wait here too: what this engine makes reaches its prefill without a copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

from vlm_worker.cache.embeddings import EmbeddingCache
from vlm_worker.core.encoder_cache import Lookup
from vlm_worker.core.encoder_entries import Entry
from vlm_worker.core.picture_queue import num_pixels
from vlm_worker.core.work import retry_after
from vlm_worker.engine.encoder_queue import EncoderQueue
from vlm_worker.engine.events import EncodeEvent, EventStream, ItemFailed, ItemReady
from vlm_worker.engine.guard import guarded
from vlm_worker.engine.outbox import Outbox
from vlm_worker.engine.runner import Runner
from vlm_worker.engine.settings import Bound, EngineSettings
from vlm_worker.errors import (
    DrainingError,
    DuplicateError,
    EngineError,
    GoneError,
    InvalidRequestError,
    OverloadedError,
    WorkerError,
)
from vlm_worker.types import ImageItem, PreparedImage, RequestKey


@dataclasses.dataclass(eq=False, slots=True)
class Job:
    """One `encode` call and its items that still lack their event."""

    key: RequestKey
    stream: EventStream[EncodeEvent]
    pending: set[int]
    priority: int


class Pictures:
    """The encoder's half of the engine. Lives on the engine thread.

    Attributes:
        held_bytes: embeddings that are queued or held for peers, each request by itself.

    Raises:
        ValueError: the largest picture has no room in the cache, with the numbers.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        settings: EngineSettings,
        outbox: Outbox,
        clock: Callable[[], float],
    ) -> None:
        _check_capacity(runner, settings)
        self.cache = EmbeddingCache(
            runner,
            max_bytes=settings.embedding_cache_bytes,
            cold_bytes=settings.embedding_cold_cache_bytes,
            ttl_seconds=settings.embedding_ttl_seconds,
        )
        self.queue = EncoderQueue(runner, self.cache, settings=settings, clock=clock)
        self.draining = False
        self.held_bytes = 0
        self.num_refused = dict.fromkeys(Bound, 0)
        self._runner = runner
        self._settings = settings
        self._outbox = outbox
        self._clock = clock
        self._pinned: dict[RequestKey, dict[int, Entry]] = {}
        self._known: dict[RequestKey, set[Entry]] = {}
        self._jobs: dict[RequestKey, Job] = {}

    # ---- commands --------------------------------------------------------------------------------
    def hold_known(self, key: RequestKey, image_key: bytes, num_tokens: int) -> bool:
        """See `Engine.hold_known`."""
        now = self._clock()
        entry = self.cache.find(image_key, num_tokens=num_tokens, now=now)
        if entry is None or not entry.ready:
            return False
        # `encode` will count it
        entry = self.cache.lookup(image_key, key, num_tokens=num_tokens, now=now, counted=False)
        if entry is None:
            return False
        known = self._known.setdefault(key, set())
        if entry not in known:
            known.add(entry)
            self._held(entry.num_tokens)
        return True

    def release_known(self, key: RequestKey) -> None:
        """See `Engine.release_known`."""
        for entry in self._known.pop(key, ()):
            self._held(-entry.num_tokens)
            self.unpin(entry, key)

    def encode(
        self,
        key: RequestKey,
        images: tuple[PreparedImage, ...],
        stream: EventStream[EncodeEvent],
        *,
        priority: int = 0,
    ) -> None:
        """See `Engine.encode`."""
        if not images:
            self._outbox.end(stream)
            return
        job = Job(key, stream, set(range(len(images))), priority)
        own_bytes = sum(self._num_bytes(entry.num_tokens) for entry in self._known.get(key, ()))
        refusal = self._refusal(key, images, own_bytes)
        if refusal is not None:
            for item in range(len(images)):
                self._settle(job, ItemFailed(item, refusal))
            return
        self._jobs[key] = job
        self._pinned[key] = {}
        for item, image in enumerate(images):
            self._begin(job, item, image)
        self.release_known(key)  # each is pinned as an item now

    def export(self, key: RequestKey, item: int) -> memoryview:
        """See `Engine.export_embedding`."""
        entry = self._pinned.get(key, {}).get(item)
        if entry is None or not entry.ready:
            raise GoneError(f"embedding {item} of {key.request_id} is not held here")
        return self._rows(entry)

    def release(self, key: RequestKey, item: int) -> None:
        """See `Engine.release_embedding`."""
        pinned = self._pinned.get(key, {})
        entry = pinned.pop(item, None)
        if entry is not None:
            self._held(-entry.num_tokens)
            self.unpin(entry, (key, item))
        if not pinned and key not in self._jobs:
            self._pinned.pop(key, None)

    def cancel(self, key: RequestKey) -> bool:
        """End an `encode`, queued or done; False where there was none."""
        self.release_known(key)
        job = self._jobs.pop(key, None)
        if job is not None:
            self._outbox.end(job.stream)
        pinned = self._pinned.pop(key, None)
        for item, entry in (pinned or {}).items():
            self._held(-entry.num_tokens)
            self.unpin(entry, (key, item))
        return pinned is not None

    def drain(self, error: WorkerError) -> int:
        """Refuse what comes and fail what waits; returns how many pictures did."""
        self.draining = True
        return self.queue.drain(error)

    def say_last_words(self, error: WorkerError) -> None:
        """End every stream without touching the books."""
        for job in self._jobs.values():
            for item in sorted(job.pending):
                self._outbox.emit(job.stream, ItemFailed(item, error))
            self._outbox.end(job.stream)

    @property
    def num_pinned(self) -> int:
        """Embeddings that wait for a peer to fetch or release them."""
        return sum(len(held) for held in (*self._pinned.values(), *self._known.values()))

    # ---- for prompts -----------------------------------------------------------------------------
    def is_known(self, image: ImageItem) -> bool:
        """Whether an image is on hand, or on its way."""
        now = self._clock()
        return self.cache.find(image.image_key, num_tokens=image.num_tokens, now=now) is not None

    def is_ready(self, image: ImageItem) -> bool:
        """Whether an image is on hand."""
        now = self._clock()
        entry = self.cache.find(image.image_key, num_tokens=image.num_tokens, now=now)
        return entry is not None and entry.ready

    def take(self, image: ImageItem, owner: Hashable, *, key: RequestKey) -> Entry | None:
        """Pin what is on hand, or on its way, for an image of the request `key`."""
        return self.cache.lookup(
            image.image_key,
            owner,
            num_tokens=image.num_tokens,
            now=self._clock(),
            counted=key not in self._pinned,  # else its `encode` was counted
        )

    def insert(self, image: ImageItem, embedding: Any, owner: Hashable) -> Entry:
        """Keep an embedding that a peer sent, pinned for `owner`."""
        entry = self.cache.begin(image.image_key, owner, num_tokens=image.num_tokens)
        self.cache.complete(entry, embedding, now=self._clock())
        self.queue.on_ready(image.image_key)
        return entry

    def unpin(self, entry: Entry, owner: Hashable) -> None:
        """Let an entry go; what nobody waits for any more leaves the queue."""
        self.cache.unpin(entry, owner, now=self._clock())
        if not entry.ready and not entry.pins:
            self.queue.abandon(entry)

    # ---- parts -----------------------------------------------------------------------------------
    def _num_bytes(self, num_tokens: int) -> int:
        return num_tokens * self._runner.embed_layout.row_bytes

    def _held(self, num_tokens: int) -> None:
        """So many more rows are queued or held for a peer; less if negative."""
        self.held_bytes += self._num_bytes(num_tokens)
        assert self.held_bytes >= 0

    def _refusal(
        self, key: RequestKey, images: tuple[PreparedImage, ...], own_bytes: int
    ) -> WorkerError | None:
        if self.draining:
            return DrainingError("this worker is draining")
        if key in self._pinned:
            return DuplicateError(f"{key.request_id} attempt {key.attempt} is encoded already")
        needed = self._num_bytes(sum(image.num_tokens for image in images))
        if needed > self._settings.embedding_cache_bytes:
            return InvalidRequestError(
                f"the embeddings of this request take {needed} bytes, and this worker has "
                f"{self._settings.embedding_cache_bytes}: send fewer or smaller images, or raise "
                "--embedding-cache-bytes"
            )
        return self._overload(images, needed - own_bytes)

    def _overload(
        self, images: tuple[PreparedImage, ...], more_bytes: int
    ) -> OverloadedError | None:
        """Why so many more pictures may not wait; whatever their pixels, one call's may alone.

        `more_bytes` of embeddings are held for each request by itself, shared images included:
        each has copies made for its own consumer.
        """
        queue, settings = self.queue, self._settings
        more_pixels = sum(num_pixels(image) for image in images) if queue else 0
        for bound, queued, more, most in (
            (Bound.IMAGES, len(queue), len(images), settings.max_waiting_images),
            (Bound.PIXELS, queue.num_pixels, more_pixels, settings.max_waiting_pixels),
            (Bound.EMBEDDINGS, self.held_bytes, more_bytes, settings.embedding_cache_bytes),
        ):
            if queued + more > most:
                self.num_refused[bound] += 1
                what = f"{queued} {bound.value} wait for the encoder, {most} may"
                if bound is Bound.EMBEDDINGS:
                    what = f"{queued} bytes of {bound.value} are queued or held, {most} may be"
                return OverloadedError(what, retry_after_seconds=retry_after(queue.seconds))
        return None

    def _begin(self, job: Job, item: int, image: PreparedImage) -> None:
        now = self._clock()
        found, entry = self.cache.lookup_or_begin(
            image.image_key, (job.key, item), num_tokens=image.num_tokens, now=now
        )
        self._pinned[job.key][item] = entry
        self._held(image.num_tokens)
        if found is Lookup.HIT:
            self._ready(job, item, entry, cache_hit=True, times=(now, now, now))
            return
        if found is Lookup.MINE:
            self.queue.push(entry, image, job.key, priority=job.priority)
        self.queue.when_settled(
            entry, lambda error: self._item_settled(job, item, entry, now, error)
        )

    def _item_settled(
        self, job: Job, item: int, entry: Entry, queued_at: float, error: Exception | None
    ) -> None:
        if self._jobs.get(job.key) is not job:  # cancelled
            return
        if error is not None:
            self._failed(job, item, error)
        else:
            times = (queued_at, self.queue.batch_started, self._clock())
            self._ready(job, item, entry, cache_hit=False, times=times)

    def _ready(
        self,
        job: Job,
        item: int,
        entry: Entry,
        *,
        cache_hit: bool,
        times: tuple[float, float, float],
    ) -> None:
        rows = None
        if self._runner.kv_layout is None:  # only peers have a use for it
            try:
                rows = self._rows(entry)
            except EngineError as error:
                self._failed(job, item, error)
                return
        self._settle(job, ItemReady(item, cache_hit, entry.num_bytes, *times, rows))

    def _failed(self, job: Job, item: int, error: Exception) -> None:
        self.release(job.key, item)
        self._settle(job, ItemFailed(item, error))

    def _settle(self, job: Job, event: EncodeEvent) -> None:
        self._outbox.emit(job.stream, event)
        job.pending.discard(event.item)
        if job.pending:
            return
        self._outbox.end(job.stream)
        if self._jobs.get(job.key) is job:  # not one that was refused
            del self._jobs[job.key]
            if not self._pinned[job.key]:
                del self._pinned[job.key]

    def _rows(self, entry: Entry) -> memoryview:
        embedding = self.cache.get(entry)
        try:
            return guarded(
                "copying an embedding out", lambda: self._runner.export_embedding(embedding)
            )
        except EngineError as error:  # an encoder runs no step that would find a lost device
            self.queue.note_failure(error)
            raise


def _check_capacity(runner: Runner, settings: EngineSettings) -> None:
    """Raise ValueError where a picture that may come could never lie idle in the cache (E6)."""
    num_tokens = settings.max_image_tokens or settings.max_model_len
    needed = num_tokens * runner.embed_layout.row_bytes
    if needed > settings.embedding_cache_bytes:
        raise ValueError(
            f"the largest picture has {num_tokens} visual tokens, {needed} bytes of embedding; "
            f"embedding_cache_bytes is {settings.embedding_cache_bytes}: give it at least as much"
        )
