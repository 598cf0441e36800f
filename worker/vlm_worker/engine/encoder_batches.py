"""Encode images by priority: one encoder call per turn, with images of any requests.

    push -> queue -> [a batch within the budget] -> runner.encode -> cache -> all waiting calls

If the runner supports it, a batch is encoded asynchronously, overlapped with steps: one at a time,
and a later turn takes its result.

A turn never waits for a fuller batch. A call that is large enough to use the device well takes one
image of each request, so that prompts compute their first images while the next ones are encoded.
While sequences decode, the budget is smaller: a long queue delays each token by one short call.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from vlm_worker.core.encoder_cache import EncoderCache, Entry
from vlm_worker.core.fair_order import FairOrder, Rank
from vlm_worker.core.step_time import StepTimeModel
from vlm_worker.core.waiting_queue import WaitingQueue
from vlm_worker.engine.attempts import EngineContext
from vlm_worker.engine.runner import encode_isolated
from vlm_worker.errors import CancelledError
from vlm_worker.types import PreparedImage, RequestKey

ENOUGH_TOKENS: Final = 256
"""Visual tokens of a call that uses the device well: 1,024 patches if four are merged."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EncodeTask:
    """An image to encode into `entry`, for the request `key`. `arrived_at` is in seconds."""

    entry: Entry
    image: PreparedImage
    key: RequestKey
    rank: Rank
    arrival: int
    arrived_at: float

    @property
    def priority(self) -> int:
        return self.rank.priority

    @property
    def virtual_start(self) -> float:
        return -1.0  # it is admitted once

    @property
    def num_patches(self) -> int:
        """Patches that the encoder computes; of an approximate reduction, those of its tokens."""
        image = self.image
        return math.prod(image.grid_thw) * image.encoded_tokens // image.num_tokens


def num_pixels(image: PreparedImage) -> int:
    """Pixels of all frames of an image at the encoder's resolution: three float32 each."""
    return image.patches.nbytes // 12


class EncoderQueue:
    """The images that wait for the encoder, which fills their entries. Engine thread only.

    It calls `on_ready` with the key of every image that becomes READY. Another thread calls
    `on_ended` when an asynchronous batch has ended; the next turn takes its result.
    """

    def __init__(self, context: EngineContext, cache: EncoderCache) -> None:
        self.waiting_tokens = 0
        self.waiting_pixels = 0
        self.work = StepTimeModel()
        self.on_ready: Callable[[bytes], None] = lambda _: None
        self.on_ended: Callable[[], None] = lambda: None
        self.batch_started = 0.0
        self.num_images = 0
        self.num_visual_tokens = 0
        self.num_patches = 0
        self.admitted_seconds = 0.0
        self._context, self._cache = context, cache
        self._runner, self._settings, self._clock = context.runner, context.settings, context.clock
        ageing_seconds = context.settings.admission.ageing_seconds
        self._fair_order = FairOrder()
        self._queue: WaitingQueue[EncodeTask] = WaitingQueue(
            self._fair_order, ageing_seconds=ageing_seconds
        )
        self._tasks: dict[Entry, EncodeTask] = {}
        self._num_pushed = 0
        self._async_batch: tuple[list[EncodeTask], Future[tuple[list[Any], float]]] | None = None

    def __len__(self) -> int:
        """Images in the queue."""
        return len(self._queue)

    @property
    def num_unencoded(self) -> int:
        """Images in the queue and in the current overlapped batch."""
        return len(self) + (0 if self._async_batch is None else len(self._async_batch[0]))

    @property
    def async_encode_started(self) -> float | None:
        """When the current overlapped batch began; None if there is none."""
        return None if self._async_batch is None else self.batch_started

    @property
    def seconds(self) -> float:
        """Predicted encoder seconds of the queue."""
        return self.predict(self.waiting_tokens)

    def predict(self, num_tokens: int) -> float:
        """Predicted encoder seconds for `num_tokens` visual tokens."""
        return self.work.predict(num_tokens, units_per_step=self._settings.max_encode_tokens)

    def push(self, entry: Entry, image: PreparedImage, key: RequestKey, *, rank: Rank) -> None:
        """Queue the encoding of an entry, for a request."""
        self._num_pushed += 1
        self._fair_order.arrived(rank.flow)
        self._push(EncodeTask(entry, image, key, rank, self._num_pushed, self._clock()))

    def abandon(self, entry: Entry) -> None:
        """Remove an entry from the queue: no call waits for it."""
        if entry in self._tasks:
            self._leave(self._tasks[entry])
            self._fail(entry, CancelledError("no call waits for this image"))

    def drain(self, error: Exception) -> int:
        """Fail all queued images; returns their number."""
        num_failed = len(self)
        while (task := self._queue.oldest) is not None:
            self._leave(task)
            self._fail(task.entry, error)
        return num_failed

    def turn(self, *, decoding: bool) -> bool:
        """Encode the next batch, or start it asynchronously; True if a batch has ended."""
        ended = self._async_batch
        if ended is not None:
            tasks, future = ended
            if not future.done():
                return False
            self._async_batch = None
            self._encoded(tasks, *future.result())
        batch = self._next_batch(decoding=decoding)
        if not batch:
            return ended is not None
        self.admitted_seconds += self.predict(sum(task.image.encoded_tokens for task in batch))
        self.batch_started = self._clock()
        call = functools.partial(self._encode, batch)
        started = self._runner.encode_async(call)
        if started is not None:
            self._async_batch = batch, started
            started.add_done_callback(lambda _: self.on_ended())
            return ended is not None
        self._encoded(batch, *call())
        return True

    def _encode(self, batch: list[EncodeTask]) -> tuple[list[Any], float]:
        """One embedding or exception per image, and the duration in seconds."""
        began = self._clock()
        results = encode_isolated(self._runner, [task.image for task in batch])
        return results, self._clock() - began

    def _encoded(self, batch: list[EncodeTask], results: list[Any], seconds: float) -> None:
        self.work.observe(sum(task.image.encoded_tokens for task in batch), seconds)
        self._context.busy.encoded([task.num_patches for task in batch], seconds)
        for task, result in zip(batch, results, strict=True):
            if isinstance(result, Exception):
                self._context.device_errors.record(result)
                self._fail(task.entry, result)
            else:
                self._complete(task, result)

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
        while (task := self._queue.next(now=now)) is not None:
            if batch and num_tokens + task.image.encoded_tokens > budget:
                break
            self._remove(task)
            if num_tokens >= ENOUGH_TOKENS and any(other.key == task.key for other in batch):
                later.append(task)
                continue
            batch.append(task)
            self._fair_order.admitted(task.rank)
            num_tokens += task.image.encoded_tokens
        for task in later:
            self._push(task)
        return batch

    def _push(self, task: EncodeTask) -> None:
        """Add a task, or return one that was taken: it keeps its arrival and so its position."""
        assert task.entry not in self._tasks
        self._tasks[task.entry] = task
        self._queue.push(task)
        self.waiting_tokens += task.image.encoded_tokens
        self.waiting_pixels += num_pixels(task.image)

    def _leave(self, task: EncodeTask) -> None:
        """Remove a task that is not encoded."""
        self._remove(task)
        self._fair_order.left(task.rank.flow)

    def _remove(self, task: EncodeTask) -> None:
        del self._tasks[task.entry]
        self._queue.discard(task)
        self.waiting_tokens -= task.image.encoded_tokens
        self.waiting_pixels -= num_pixels(task.image)

    def _complete(self, task: EncodeTask, embedding: Any) -> None:
        self._cache.complete(task.entry, embedding, now=self._clock())
        self.num_images += 1
        self.num_visual_tokens += task.image.encoded_tokens
        self.num_patches += task.num_patches
        task.entry.notify(None)
        self.on_ready(task.entry.image_key)

    def _fail(self, entry: Entry, error: Exception) -> None:
        self._cache.fail(entry)
        entry.notify(error)
