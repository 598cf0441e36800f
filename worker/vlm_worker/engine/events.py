"""Events from the engine thread to the event loop: streams, one buffer, one wake-up per flush.

step k-1 ends -> bookkeeping, schedule, inputs -> flush -> step k computes
                                                   '--> the loop delivers the events of step k-1

    engine thread --EventBuffer.emit--> buffer --flush--> LoopNotifier --> loop: deliver
    loop          --EventStream.push--> `async for event in stream`

The engine flushes the buffer when the model is about to compute, because a kernel needs no
interpreter. `call_soon_threadsafe` releases the interpreter when it wakes the loop, so that the
loop may run first and delay the start of the model. `LoopNotifier` therefore writes to an eventfd
while it holds the interpreter.
"""

from __future__ import annotations

import asyncio
import collections
import ctypes
import dataclasses
import itertools
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from vlm_worker.types import EngineEvent, FailedEvent, RequestKey

E = TypeVar("E")

_eventfd_write = ctypes.PyDLL(None).eventfd_write  # PyDLL keeps the interpreter lock
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)


@dataclasses.dataclass(frozen=True, slots=True)
class NeedItems:
    """Embeddings of these items are missing: `put_embedding` them.

    `items` are indices into `Request.items`. The engine sends it at submit, and again if a
    preemption or an eviction removed an embedding.
    """

    items: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ItemReady:
    """One image is encoded. Times are seconds on the engine's clock; a cache hit takes none.

    If this worker computes no prompts, `rows` are those of `Engine.export_embedding`: a consumer
    that fetches them does not wait for the encoder's next batch.
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
    """One image could not be encoded; the other images of its batch are not affected."""

    item: int
    error: Exception


PrefillEvent = EngineEvent | NeedItems
"""What `submit_prefill`, `start_decode` and `adopt_local` stream."""

EncodeEvent = ItemReady | ItemFailed
"""What `encode` streams: one per item, in the order in which they become ready."""


class EventStream(AsyncIterator[E], Generic[E]):
    """Events of one submission, in order; iteration ends after the last event.

    The engine writes it through the loop; one task reads it. Dropping the stream does not cancel
    the work: a caller that stops reading calls `Engine.cancel`.
    """

    def __init__(self, key: RequestKey) -> None:
        self.key = key
        self._events: collections.deque[E] = collections.deque()
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    async def __anext__(self) -> E:
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
        """Push the last events and end the stream. Called on the loop only."""
        for event in (*events, None):
            self.push(event)

    def push(self, event: E | None) -> None:
        """Add an event, or end the stream with None. Called on the loop only."""
        if event is None:
            self._ended = True
        else:
            self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


OutputEvent = tuple[EventStream[Any] | asyncio.Future[Any], Any]


class EventBuffer:
    """Events for streams and futures. Written by the engine thread, delivered on the loop.

    `flush` passes them to `send`. Without `send` they stay until `take`.
    """

    def __init__(self, send: Callable[[Iterator[OutputEvent]], None] | None = None) -> None:
        self._buffered: list[Iterable[OutputEvent]] = []
        self._send = send

    def emit(self, stream: EventStream[Any] | None, event: Any) -> None:
        """Add an event; if `stream` is None, drop it."""
        if stream is not None:
            self._buffered.append(((stream, event),))

    def emit_all(self, streams: Sequence[EventStream[Any] | None], events: Iterable[Any]) -> None:
        """Add one event per stream. The loop consumes an iterator of events during delivery."""
        pairs = zip(streams, events, strict=True)
        self._buffered.append((stream, event) for stream, event in pairs if stream is not None)

    def end(self, stream: EventStream[Any] | None) -> None:
        self.emit(stream, None)

    def fail(self, stream: EventStream[Any] | None, error: Exception) -> None:
        """End a stream with an error."""
        self.emit(stream, FailedEvent(error))
        self.end(stream)

    def answer(self, future: asyncio.Future[Any], result: Any) -> None:
        """Resolve a future; an exception as result is raised there."""
        self._buffered.append(((future, result),))

    def flush(self) -> None:
        """Send the buffered events: the model is about to compute, or the engine becomes idle."""
        if self._buffered and self._send is not None:
            self._send(self.take())

    def take(self) -> Iterator[OutputEvent]:
        """All events since the last call."""
        events, self._buffered = self._buffered, []
        return itertools.chain.from_iterable(events)


def deliver(events: Iterable[OutputEvent]) -> None:
    """Deliver events to their streams and futures. On the loop."""
    for target, content in events:
        if isinstance(target, EventStream):
            target.push(content)
        elif target.done():  # its awaiter was cancelled
            continue
        elif isinstance(content, Exception):
            target.set_exception(content)
        else:
            target.set_result(content)


class LoopNotifier:
    """Calls into the loop from any thread, in order, between `open` and `close`."""

    def __init__(self) -> None:
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fd = -1
        self._lock = threading.Lock()

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to make calls on `loop`. On the loop."""
        self._loop = loop
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(self._fd, self._make)

    def call(self, callback: Callable[[], None]) -> None:
        """Make the loop call `callback`; raises RuntimeError if loop or notifier are closed."""
        assert self._loop is not None
        if self._loop.is_closed():
            raise RuntimeError("the loop is closed")
        # without the lock, the loop could close the descriptor before the write, and reuse it
        with self._lock:
            if self._fd < 0:
                raise RuntimeError("no more calls are taken")
            self._calls.append(callback)
            _eventfd_write(self._fd, 1)

    def close(self) -> None:
        """Stop taking calls. On the loop."""
        assert self._loop is not None
        with self._lock:
            fd, self._fd = self._fd, -1
            self._loop.remove_reader(fd)
            os.close(fd)

    def _make(self) -> None:
        assert self._loop is not None
        if self._fd < 0:
            return
        os.eventfd_read(self._fd)
        while self._calls:
            self._loop.call_soon(self._calls.popleft())
