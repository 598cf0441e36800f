"""Pictures are encoded, the most important first: one call a turn, whoever they belong to.

    push -> queue -> [a batch within the budget] -> runner.encode -> cache -> all who wait for it

Where a runner can, a batch is encoded beside steps; one at a time, and a later turn finds it done.

Nobody waits for a fuller batch: what is there when a turn comes is encoded. A call that is large
enough to use the device well takes one picture of each request: the prompts, here or elsewhere,
compute the first pictures while the next ones are encoded. While sequences decode the budget is
smaller, so that a long queue costs each of their tokens one short call and no more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from vlm_worker.cache.embeddings import EmbeddingCache
from vlm_worker.core.busy import BusyMeter
from vlm_worker.core.encoder_entries import Entry
from vlm_worker.core.picture_queue import Fill, PictureQueue
from vlm_worker.core.work import WorkModel
from vlm_worker.engine.guard import encode_guarded, is_device_lost, is_out_of_memory
from vlm_worker.engine.runner import Runner
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.errors import CancelledError
from vlm_worker.types import PreparedImage, RequestKey

ENOUGH_TOKENS: Final = 256
"""Visual tokens of a call that uses the device well: 1,024 patches where four are merged."""

Settled = Callable[[Exception | None], None]
"""Called once when an entry is filled (None) or has failed."""


class EncoderQueue:
    """Fills entries of the cache. Lives on the engine thread.

    `on_ready` is called with the key of every image that becomes READY, encoded here or put.
    `on_ended` is called by another thread when a batch that was encoded beside steps has ended: the
    next turn takes it in.
    """

    def __init__(
        self,
        runner: Runner,
        cache: EmbeddingCache,
        *,
        settings: EngineSettings,
        clock: Callable[[], float],
    ) -> None:
        self.work = WorkModel()
        self.busy = BusyMeter()
        self.on_ready: Callable[[bytes], None] = lambda _: None
        self.on_ended: Callable[[], None] = lambda: None
        self.batch_started = 0.0
        self.num_images = 0
        self.num_visual_tokens = 0
        self.num_patches = 0
        self.num_out_of_memory = 0
        self.device_lost = False
        self.admitted_seconds = 0.0
        self._runner = runner
        self._cache = cache
        self._settings = settings
        self._clock = clock
        self._queue = PictureQueue(ageing_seconds=settings.admission.ageing_seconds)
        self._num_pushed = 0
        self._beside: tuple[list[Fill], Future[tuple[list[Any], float]]] | None = None
        self._waiters: dict[int, list[Settled]] = {}

    def __len__(self) -> int:
        """Pictures in the queue."""
        return len(self._queue)

    @property
    def beside_since(self) -> float | None:
        """When the batch began that is encoded beside steps; None where there is none."""
        return None if self._beside is None else self.batch_started

    @property
    def num_pixels(self) -> int:
        """Their pixels."""
        return self._queue.num_pixels

    @property
    def seconds(self) -> float:
        """Predicted encoder time of the queue."""
        return self.predict(self._queue.num_tokens)

    def predict(self, num_tokens: int) -> float:
        """Predicted encoder time of so many visual tokens."""
        return self.work.predict(num_tokens, units_per_step=self._settings.max_encode_tokens)

    def push(self, entry: Entry, image: PreparedImage, key: RequestKey, *, priority: int) -> None:
        """Have an entry filled, for a request."""
        self._num_pushed += 1
        self._queue.push(Fill(entry, image, key, priority, self._num_pushed, self._clock()))

    def when_settled(self, entry: Entry, settled: Settled) -> None:
        """Have `settled` called when an entry that is being filled is READY, or has failed."""
        self._waiters.setdefault(entry.id, []).append(settled)

    def abandon(self, entry: Entry) -> None:
        """Take an entry that nobody waits for any more out of the queue."""
        if self._queue.remove(entry) is not None:
            self._fail(entry, CancelledError("nobody waits for this picture any more"))

    def note_failure(self, error: Exception) -> None:
        """Count what a call of the device failed with: a lost device makes the engine unhealthy."""
        self.num_out_of_memory += is_out_of_memory(error)
        self.device_lost = self.device_lost or is_device_lost(error)

    def drain(self, error: Exception) -> int:
        """Fail what waits; returns how many pictures did."""
        num_failed = len(self._queue)
        while (fill := self._queue.first(now=self._clock())) is not None:
            self._queue.remove(fill.entry)
            self._fail(fill.entry, error)
        return num_failed

    def turn(self, *, decoding: bool) -> bool:
        """Encode one batch, if there is one, or have it encoded; whether one has ended."""
        begun = self._beside
        if begun is not None:
            fills, made = begun
            if not made.done():
                return False
            self._beside = None
            self._encoded(fills, *made.result())
        batch = self._next_batch(decoding=decoding)
        if not batch:
            return begun is not None
        self.admitted_seconds += self.predict(sum(fill.image.num_tokens for fill in batch))
        self.batch_started = self._clock()
        call = functools.partial(self._encode, batch)
        future = self._runner.beside(call)
        if future is not None:
            self._beside = batch, future
            future.add_done_callback(lambda _: self.on_ended())
            return begun is not None
        self._encoded(batch, *call())
        return True

    def _encode(self, batch: list[Fill]) -> tuple[list[Any], float]:
        """One embedding or exception per picture, and the seconds that they took."""
        began = self._clock()
        results = encode_guarded(self._runner, [fill.image for fill in batch])
        return results, self._clock() - began

    def _encoded(self, batch: list[Fill], results: list[Any], seconds: float) -> None:
        self.work.observe(sum(fill.image.num_tokens for fill in batch), seconds)
        self.busy.encoded([fill.num_patches for fill in batch], seconds)
        for fill, result in zip(batch, results, strict=True):
            if isinstance(result, Exception):
                self.note_failure(result)
                self._fail(fill.entry, result)
            else:
                self._complete(fill, result)

    def _next_batch(self, *, decoding: bool) -> list[Fill]:
        """Pictures from the head of the queue, within the budget; at least one."""
        settings = self._settings
        budget = settings.max_encode_tokens
        if decoding:
            budget = min(budget, settings.max_encode_tokens_decoding)
        batch: list[Fill] = []
        later: list[Fill] = []
        num_tokens = 0
        now = self._clock()
        while (fill := self._queue.first(now=now)) is not None:
            if batch and num_tokens + fill.image.num_tokens > budget:
                break
            self._queue.remove(fill.entry)
            if num_tokens >= ENOUGH_TOKENS and any(other.key == fill.key for other in batch):
                later.append(fill)
                continue
            batch.append(fill)
            num_tokens += fill.image.num_tokens
        for fill in later:
            self._queue.push(fill)
        return batch

    def _complete(self, fill: Fill, embedding: Any) -> None:
        self._cache.complete(fill.entry, embedding, now=self._clock())
        self.num_images += 1
        self.num_visual_tokens += fill.image.num_tokens
        self.num_patches += fill.num_patches
        self._settled(fill.entry, None)
        self.on_ready(fill.image.image_key)

    def _fail(self, entry: Entry, error: Exception) -> None:
        self._cache.fail(entry)
        self._settled(entry, error)

    def _settled(self, entry: Entry, error: Exception | None) -> None:
        for settled in self._waiters.pop(entry.id, []):
            settled(error)
