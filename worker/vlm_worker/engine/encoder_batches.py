"""Encode images by priority: one encoder call per turn, with images of any requests.

    push -> queue -> [a batch within the budget] -> runner.encode -> cache -> all waiting calls

If the runner supports it, a batch is encoded asynchronously, overlapped with steps: one at a time,
and a later turn takes its result.

A turn never waits for a fuller batch. A call that is large enough to use the device well takes one
image of each request, so that prompts compute their first images while the next ones are encoded.
While sequences decode, the budget is smaller: a long queue delays each token by one short call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from vlm_worker.core.encoder_cache import Entry
from vlm_worker.core.image_queue import EncodeTask, ImageQueue
from vlm_worker.core.measurements import BusyTimeCounter
from vlm_worker.core.step_time import StepTimeModel
from vlm_worker.engine.embedding_cache import EmbeddingCache
from vlm_worker.engine.runner import (
    Runner,
    encode_isolated,
    is_device_lost,
    is_out_of_memory,
)
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.errors import CancelledError
from vlm_worker.types import PreparedImage, RequestKey

ENOUGH_TOKENS: Final = 256
"""Visual tokens of a call that uses the device well: 1,024 patches if four are merged."""


class EncoderQueue:
    """Fills entries of the cache. Engine thread only.

    It calls `on_ready` with the key of every image that becomes READY. Another thread calls
    `on_ended` when an asynchronous batch has ended; the next turn takes its result.
    """

    def __init__(
        self,
        runner: Runner,
        cache: EmbeddingCache,
        *,
        settings: EngineSettings,
        clock: Callable[[], float],
    ) -> None:
        self.work = StepTimeModel()
        self.busy = BusyTimeCounter()
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
        self._queue = ImageQueue(ageing_seconds=settings.admission.ageing_seconds)
        self._num_pushed = 0
        self._async_batch: tuple[list[EncodeTask], Future[tuple[list[Any], float]]] | None = None

    def __len__(self) -> int:
        """Images in the queue."""
        return len(self._queue)

    @property
    def async_encode_started(self) -> float | None:
        """When the current overlapped batch began; None if there is none."""
        return None if self._async_batch is None else self.batch_started

    @property
    def num_pixels(self) -> int:
        """Pixels of the queued images."""
        return self._queue.num_pixels

    @property
    def seconds(self) -> float:
        """Predicted encoder seconds of the queue."""
        return self.predict(self._queue.num_tokens)

    def predict(self, num_tokens: int) -> float:
        """Predicted encoder seconds for `num_tokens` visual tokens."""
        return self.work.predict(num_tokens, units_per_step=self._settings.max_encode_tokens)

    def push(self, entry: Entry, image: PreparedImage, key: RequestKey, *, priority: int) -> None:
        """Queue the encoding of an entry, for a request."""
        self._num_pushed += 1
        self._queue.push(EncodeTask(entry, image, key, priority, self._num_pushed, self._clock()))

    def abandon(self, entry: Entry) -> None:
        """Remove an entry from the queue: no call waits for it."""
        if self._queue.remove(entry) is not None:
            self._fail(entry, CancelledError("no call waits for this image"))

    def note_failure(self, error: Exception) -> None:
        """Record a device failure: a lost device makes the engine unhealthy."""
        self.num_out_of_memory += is_out_of_memory(error)
        self.device_lost = self.device_lost or is_device_lost(error)

    def drain(self, error: Exception) -> int:
        """Fail all queued images; returns their number."""
        num_failed = len(self._queue)
        while (fill := self._queue.first(now=self._clock())) is not None:
            self._queue.remove(fill.entry)
            self._fail(fill.entry, error)
        return num_failed

    def turn(self, *, decoding: bool) -> bool:
        """Encode the next batch, or start it asynchronously; True if a batch has ended."""
        begun = self._async_batch
        if begun is not None:
            fills, made = begun
            if not made.done():
                return False
            self._async_batch = None
            self._encoded(fills, *made.result())
        batch = self._next_batch(decoding=decoding)
        if not batch:
            return begun is not None
        self.admitted_seconds += self.predict(sum(fill.image.num_tokens for fill in batch))
        self.batch_started = self._clock()
        call = functools.partial(self._encode, batch)
        future = self._runner.encode_async(call)
        if future is not None:
            self._async_batch = batch, future
            future.add_done_callback(lambda _: self.on_ended())
            return begun is not None
        self._encoded(batch, *call())
        return True

    def _encode(self, batch: list[EncodeTask]) -> tuple[list[Any], float]:
        """One embedding or exception per image, and the duration in seconds."""
        began = self._clock()
        results = encode_isolated(self._runner, [fill.image for fill in batch])
        return results, self._clock() - began

    def _encoded(self, batch: list[EncodeTask], results: list[Any], seconds: float) -> None:
        self.work.observe(sum(fill.image.num_tokens for fill in batch), seconds)
        self.busy.encoded([fill.num_patches for fill in batch], seconds)
        for fill, result in zip(batch, results, strict=True):
            if isinstance(result, Exception):
                self.note_failure(result)
                self._fail(fill.entry, result)
            else:
                self._complete(fill, result)

    def _next_batch(self, *, decoding: bool) -> list[EncodeTask]:
        """Images from the head of the queue, within the budget; at least one."""
        settings = self._settings
        budget = settings.max_encode_tokens
        if decoding:
            budget = min(budget, settings.max_encode_tokens_decoding)
        batch: list[EncodeTask] = []
        later: list[EncodeTask] = []
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

    def _complete(self, fill: EncodeTask, embedding: Any) -> None:
        self._cache.complete(fill.entry, embedding, now=self._clock())
        self.num_images += 1
        self.num_visual_tokens += fill.image.num_tokens
        self.num_patches += fill.num_patches
        self._notify(fill.entry, None)
        self.on_ready(fill.image.image_key)

    def _fail(self, entry: Entry, error: Exception) -> None:
        self._cache.fail(entry)
        self._notify(entry, error)

    def _notify(self, entry: Entry, error: Exception | None) -> None:
        waiters, entry.waiters = entry.waiters, []
        for on_filled in waiters:
            on_filled(error)
