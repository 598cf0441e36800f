"""Pictures on the engine thread: a queue, one encoder call a turn, and who waits for what.

    encode(key, images) --HIT--> ItemReady
                        --JOIN-> wait with whoever began it
                        --MINE-> queue -> runner.encode(batch) -> cache -> all who wait

Prompts wait here too: an embedding made by this engine reaches its prefill without a copy.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

from vlm_worker.cache.embeddings import EmbeddingCache
from vlm_worker.core.encoder_cache import Entry, Lookup
from vlm_worker.core.work import WorkModel
from vlm_worker.engine.events import EncodeEvent, EventStream, ItemFailed, ItemReady
from vlm_worker.engine.outbox import Outbox
from vlm_worker.engine.runner import Runner
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.engine.step import encode_guarded
from vlm_worker.errors import (
    CancelledError,
    DrainingError,
    DuplicateError,
    GoneError,
    OverloadedError,
    WorkerError,
)
from vlm_worker.types import ImageItem, PreparedImage, RequestKey

Settled = Callable[[Exception | None], None]
"""Called once when an entry is filled (None) or has failed."""


@dataclasses.dataclass(eq=False, slots=True)
class Job:
    """One `encode` call and its items that still lack their event."""

    key: RequestKey
    stream: EventStream[EncodeEvent]
    pending: set[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Fill:
    """A picture in the queue."""

    entry: Entry
    image: PreparedImage


class Pictures:
    """The encoder's half of the engine. Lives on the engine thread.

    `on_ready` is called with the key of every image that becomes READY, encoded or put.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        settings: EngineSettings,
        outbox: Outbox,
        clock: Callable[[], float],
    ) -> None:
        self.cache = EmbeddingCache(
            max_bytes=settings.embedding_cache_bytes, ttl_seconds=settings.embedding_ttl_seconds
        )
        self.work = WorkModel()
        self.draining = False
        self.on_ready: Callable[[bytes], None] = lambda _: None
        self.num_images = 0
        self.num_visual_tokens = 0
        self.admitted_seconds = 0.0
        self._runner = runner
        self._settings = settings
        self._outbox = outbox
        self._clock = clock
        self._queue: collections.deque[Fill] = collections.deque()
        self._waiters: dict[int, list[Settled]] = {}
        self._pinned: dict[RequestKey, dict[int, Entry]] = {}
        self._known: dict[RequestKey, set[Entry]] = {}
        self._jobs: dict[RequestKey, Job] = {}
        self._batch_started = 0.0

    # ---- commands --------------------------------------------------------------------------------
    def hold_known(self, key: RequestKey, image_key: bytes, num_tokens: int) -> bool:
        """See `Engine.hold_known`."""
        entry = self.cache.find(image_key, num_tokens=num_tokens, now=self._clock())
        if entry is None or not entry.ready:
            return False
        self.cache.touch(entry, now=self._clock())
        self.cache.pin(entry, key)
        self._known.setdefault(key, set()).add(entry)
        return True

    def release_known(self, key: RequestKey) -> None:
        """See `Engine.release_known`."""
        for entry in self._known.pop(key, ()):
            self.unpin(entry, key)

    def encode(
        self, key: RequestKey, images: tuple[PreparedImage, ...], stream: EventStream[EncodeEvent]
    ) -> None:
        """See `Engine.encode`."""
        if not images:
            self._outbox.end(stream)
            return
        job = Job(key, stream, set(range(len(images))))
        refusal = self._refusal(key, images)
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
        return self._runner.export_embedding(self.cache.get(entry))

    def release(self, key: RequestKey, item: int) -> None:
        """See `Engine.release_embedding`."""
        pinned = self._pinned.get(key, {})
        entry = pinned.pop(item, None)
        if entry is not None:
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
            self.unpin(entry, (key, item))
        return pinned is not None

    def drain(self, error: WorkerError) -> int:
        """Refuse what comes and fail what waits; returns how many pictures did."""
        self.draining = True
        num_failed = len(self._queue)
        while self._queue:
            self._fail(self._queue.popleft().entry, error)
        return num_failed

    def say_last_words(self, error: WorkerError) -> None:
        """End every stream without touching the books."""
        for job in self._jobs.values():
            for item in sorted(job.pending):
                self._outbox.emit(job.stream, ItemFailed(item, error))
            self._outbox.end(job.stream)

    # ---- for prompts -----------------------------------------------------------------------------
    def find(self, image: ImageItem) -> Entry | None:
        """What is on hand, or on its way, for an image."""
        return self.cache.find(image.image_key, num_tokens=image.num_tokens, now=self._clock())

    def insert(self, image: ImageItem, embedding: Any, owner: Hashable) -> Entry:
        """Keep an embedding that a peer sent, pinned for `owner`."""
        entry = self.cache.begin(image.image_key, num_tokens=image.num_tokens)
        num_bytes = self._runner.embedding_bytes(embedding)
        self.cache.pin(entry, owner)
        self.cache.complete(entry, embedding, num_bytes=num_bytes, now=self._clock())
        self.on_ready(image.image_key)
        return entry

    def when_settled(self, entry: Entry, settled: Settled) -> None:
        """Have `settled` called when an entry that is being filled is READY, or has failed."""
        self._waiters.setdefault(entry.id, []).append(settled)

    def unpin(self, entry: Entry, owner: Hashable) -> None:
        """Let an entry go; what nobody waits for any more leaves the queue."""
        self.cache.unpin(entry, owner)
        if entry.ready or entry.pins:
            return
        for fill in [fill for fill in self._queue if fill.entry is entry]:
            self._queue.remove(fill)
            self._fail(entry, CancelledError("nobody waits for this picture any more"))

    # ---- a turn ----------------------------------------------------------------------------------
    def turn(self) -> bool:
        """Encode one batch, if there is one; whether there was."""
        batch = self._next_batch()
        if not batch:
            return False
        num_tokens = sum(fill.image.num_tokens for fill in batch)
        self.admitted_seconds += self.predict(num_tokens)
        self._batch_started = self._clock()
        results = encode_guarded(self._runner, [fill.image for fill in batch])
        self.work.observe(num_tokens, self._clock() - self._batch_started)
        for fill, result in zip(batch, results, strict=True):
            if isinstance(result, Exception):
                self._fail(fill.entry, result)
            else:
                self._complete(fill, result)
        return True

    @property
    def num_queued(self) -> int:
        """Pictures in the queue."""
        return len(self._queue)

    @property
    def num_pinned(self) -> int:
        """Embeddings that wait for a peer to fetch or release them."""
        return sum(len(held) for held in (*self._pinned.values(), *self._known.values()))

    @property
    def queued_seconds(self) -> float:
        """Predicted encoder time of the queue."""
        return self.predict(sum(fill.image.num_tokens for fill in self._queue))

    def predict(self, num_tokens: int) -> float:
        """Predicted encoder time of so many visual tokens."""
        return self.work.predict(num_tokens, units_per_step=self._settings.max_encode_tokens)

    # ---- parts -----------------------------------------------------------------------------------
    def _refusal(self, key: RequestKey, images: tuple[PreparedImage, ...]) -> WorkerError | None:
        if self.draining:
            return DrainingError("this worker is draining")
        if key in self._pinned:
            return DuplicateError(f"{key.request_id} attempt {key.attempt} is encoded already")
        if len(self._queue) + len(images) > self._settings.max_waiting_images:
            return OverloadedError(
                f"{len(self._queue)} pictures wait for the encoder, "
                f"{self._settings.max_waiting_images} may",
                retry_after_seconds=max(self.queued_seconds, 0.1),
            )
        return None

    def _begin(self, job: Job, item: int, image: PreparedImage) -> None:
        now = self._clock()
        found, entry = self.cache.lookup_or_begin(
            image.image_key, num_tokens=image.num_tokens, now=now
        )
        self.cache.pin(entry, (job.key, item))
        self._pinned[job.key][item] = entry
        if found is Lookup.HIT:
            self._settle(job, ItemReady(item, True, entry.num_bytes, now, now, now))
            return
        if found is Lookup.MINE:
            self._queue.append(Fill(entry, image))
        self.when_settled(entry, lambda error: self._item_settled(job, item, entry, now, error))

    def _item_settled(
        self, job: Job, item: int, entry: Entry, queued_at: float, error: Exception | None
    ) -> None:
        if self._jobs.get(job.key) is not job:  # cancelled
            return
        if error is not None:
            self.release(job.key, item)
            self._settle(job, ItemFailed(item, error))
        else:
            started, now = self._batch_started, self._clock()
            self._settle(job, ItemReady(item, False, entry.num_bytes, queued_at, started, now))

    def _settle(self, job: Job, event: EncodeEvent) -> None:
        self._outbox.emit(job.stream, event)
        job.pending.discard(event.item)
        if not job.pending:
            self._outbox.end(job.stream)
            self._jobs.pop(job.key, None)

    def _next_batch(self) -> list[Fill]:
        """Pictures from the head of the queue, within the budget; at least one."""
        batch: list[Fill] = []
        budget = self._settings.max_encode_tokens
        while self._queue and (not batch or self._queue[0].image.num_tokens <= budget):
            batch.append(self._queue.popleft())
            budget -= batch[-1].image.num_tokens
        return batch

    def _complete(self, fill: Fill, embedding: Any) -> None:
        num_bytes = self._runner.embedding_bytes(embedding)
        self.cache.complete(fill.entry, embedding, num_bytes=num_bytes, now=self._clock())
        self.num_images += 1
        self.num_visual_tokens += fill.image.num_tokens
        for settled in self._waiters.pop(fill.entry.id, []):
            settled(None)
        self.on_ready(fill.image.image_key)

    def _fail(self, entry: Entry, error: Exception) -> None:
        self.cache.fail(entry)
        for settled in self._waiters.pop(entry.id, []):
            settled(error)
