"""How the engine speaks to the loop: streams of events, one per submitted piece of work.

engine thread --(`Outbox.post`)--> EventStream.push --> `async for event in stream`
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import enum
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

from vlm_worker.types import EngineEvent, RequestKey

E = TypeVar("E")


@dataclasses.dataclass(frozen=True, slots=True)
class NeedItems:
    """Embeddings of these items (indices into `Request.items`) are missing: `put_embedding` them.

    Said at submit, and again when a preemption or an eviction took what had been on hand.
    """

    items: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ItemReady:
    """One picture is encoded. Times are seconds on the engine's clock; a cache hit takes none.

    `rows` are those of `Engine.export_embedding`, where no prompt is computed here: whoever fetches
    them need not wait until the encoder is done with the next picture.
    """

    item: int
    cache_hit: bool
    num_bytes: int
    queued_at: float
    started_at: float
    finished_at: float
    rows: memoryview | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ItemFailed:
    """One picture could not be encoded; the others of its batch are not touched by it."""

    item: int
    error: Exception


PrefillEvent = EngineEvent | NeedItems
"""What `submit_prefill`, `start_decode` and `adopt_local` stream."""

EncodeEvent = ItemReady | ItemFailed
"""What `encode` streams: one per item, in the order in which they become ready."""


class CancelOutcome(enum.Enum):
    """What a cancellation found; mirrors `vlm.v1.CancelOutcome`."""

    NOT_FOUND = 1
    ALREADY_COMPLETE = 2
    CANCELLED_BEFORE_ADVERTISED = 3
    CANCEL_REQUESTED_IN_FLIGHT = 4


class EventStream(AsyncIterator[E], Generic[E]):
    """Events of one piece of work, in order; iteration ends after its last word.

    Written by the engine through the loop, read by one task. Dropping it does not cancel the work:
    whoever gives up calls `Engine.cancel`.
    """

    def __init__(self, key: RequestKey) -> None:
        self.key = key
        self._events: collections.deque[E] = collections.deque()
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> EventStream[E]:
        """Iterate once."""
        return self

    async def __anext__(self) -> E:
        """The next event; StopAsyncIteration after the last."""
        while not self._events:
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._events.popleft()

    def close_with(self, *events: E) -> None:
        """Last words. Called on the loop only."""
        for event in events:
            self.push(event)
        self.push(None)

    def push(self, event: E | None) -> None:
        """Add an event, or end the stream with None. Called on the loop only."""
        if event is None:
            self._ended = True
        else:
            self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
