"""The images that wait for the encoder. Pure."""

from __future__ import annotations

import dataclasses
import math

from vlm_worker.core.encoder_cache import Entry
from vlm_worker.core.waiting_queue import WaitingQueue
from vlm_worker.types import PreparedImage, RequestKey


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class EncodeTask:
    """An image to encode into `entry`, for the request `key`. `arrived_at` is in seconds."""

    entry: Entry
    image: PreparedImage
    key: RequestKey
    priority: int = 0
    arrival: int = 0
    arrived_at: float = 0.0

    @property
    def num_pixels(self) -> int:
        return num_pixels(self.image)

    @property
    def num_patches(self) -> int:
        """The encoder's work is proportional to it."""
        return math.prod(self.image.grid_thw)


def num_pixels(image: PreparedImage) -> int:
    """Pixels of all frames of an image at the encoder's resolution: three float32 each."""
    return image.patches.nbytes // 12


class ImageQueue:
    """A `WaitingQueue` of tasks with totals and an index. Only `EncoderQueue` writes it.

    Attributes:
        num_tokens: visual tokens of all tasks.
        num_pixels: pixels of all tasks.
    """

    def __init__(self, *, ageing_seconds: float) -> None:
        self.num_tokens = 0
        self.num_pixels = 0
        self._queue: WaitingQueue[EncodeTask] = WaitingQueue(ageing_seconds=ageing_seconds)
        self._by_entry: dict[int, EncodeTask] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def push(self, task: EncodeTask) -> None:
        """Add a task, or return one that was taken: it keeps its arrival and so its position."""
        assert task.entry.id not in self._by_entry
        self._by_entry[task.entry.id] = task
        self._queue.push(task)
        self.num_tokens += task.image.num_tokens
        self.num_pixels += task.num_pixels

    def first(self, *, now: float) -> EncodeTask | None:
        """The next task: the oldest if it has aged, else by priority and arrival."""
        return self._queue.next(now=now)

    def remove(self, entry: Entry) -> EncodeTask | None:
        """Remove and return the task of an entry; None if it has none."""
        task = self._by_entry.pop(entry.id, None)
        if task is not None:
            self._queue.discard(task)
            self.num_tokens -= task.image.num_tokens
            self.num_pixels -= task.num_pixels
        return task
