"""The consumer side of a transfer: validated units, then the commit that makes them usable.

async for units in Pull(...):   whole units, in order
pull.commit                     set when the iteration has ended without an error

    thread ─▶ ReceiveChannel ─▶ loop ─▶ WriteWindow ─▶ the engine, between two steps

Both bound the bytes that were received but not yet written.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, Final, Self

from vlm_worker.errors import CorruptTransferError, IncompatibleError, PeerLostError, Refusal
from vlm_worker.transfer.thread_call import run_in_thread
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import Commit, Units

MAX_PENDING_BATCHES: Final = 2
"""Pending batches of units, of at most 4 MiB each, while the next one is received."""
BATCHES_PER_WAKEUP: Final = 16
"""Small enough that an engine has few blocks to record between two steps."""
MAX_UNWRITTEN_BYTES: Final = 32 << 20


class Pull:
    """One transfer being read. `on_refused` gets the reason if the transfer is void.

    `received` yields the units that `reader` validated, and closes the reader at its end.
    """

    def __init__(
        self,
        received: AsyncGenerator[Units],
        reader: FrameReader,
        *,
        peer: str,
        on_refused: Callable[[Refusal], None] = lambda _: None,
    ) -> None:
        self._received = received
        self._reader = reader
        self._peer = peer
        self._on_refused = on_refused

    @property
    def num_bytes(self) -> int:
        return self._reader.assembler.num_bytes

    @property
    def commit(self) -> Commit:
        """The producer's commit; call only after the iteration."""
        assert self._reader.commit is not None
        return self._reader.commit

    async def units(self) -> AsyncGenerator[Units]:
        """Whole units as they arrive.

        Raises:
            PeerLostError: no frame in time, or the producer is gone.
            CorruptTransferError: a frame is invalid, or the commit is missing.
            IncompatibleError: a frame has another layout.
            WorkerError: an error of the producer.
        """
        try:
            async with aclosing(self._received) as received:
                async for units in received:
                    yield units
            if self._reader.commit is None:
                raise CorruptTransferError(
                    f"{self._peer}: the transfer ended without its commit", refusal=Refusal.COMMIT
                )
        except CorruptTransferError as error:
            self._on_refused(error.refusal)
            raise
        except IncompatibleError:
            self._on_refused(Refusal.LAYOUT)
            raise


_READERS: Final = ThreadPoolExecutor(4, thread_name_prefix="frame-read")
"""For frames with out-of-band payloads, whose fetch may block on a network."""


async def checked_units(
    frames: AsyncGenerator[bytes], reader: FrameReader, *, peer: str, no_progress_seconds: float
) -> AsyncGenerator[Units]:
    """The units of a stream of frames.

    Raises:
        PeerLostError: no frame for `no_progress_seconds`.
        WorkerError: an error of the producer or of the reader.
    """
    try:
        async with aclosing(frames):
            while True:
                try:
                    async with asyncio.timeout(no_progress_seconds):
                        frame = await anext(frames, None)
                except TimeoutError:
                    raise PeerLostError(f"{peer}: no frame for {no_progress_seconds:g} s") from None
                if frame is None:
                    return
                if reader.may_block:
                    running = run_in_thread(_READERS, reader.read, frame)
                    await running.end()  # if cancelled, too: the thread writes to `into`
                    units = running.result()
                else:
                    units = reader.read(frame)
                if units is not None:
                    yield units
    finally:
        reader.close()


class ReceiveChannel:
    """Units from a receiving thread to the event loop, with backpressure and few wakeups.

    The thread calls `put` and `end`; the loop creates it and calls the rest. `max_pending` bounds
    the pending batches, if they have memory of their own. If it is None, units are already in their
    destination: then the thread wakes the loop for the first batch, for every
    `BATCHES_PER_WAKEUP`-th, and at the end, because each wakeup competes with the next copy for a
    core.
    """

    def __init__(self, *, max_pending: int | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._units: collections.deque[Units] = collections.deque()
        self._changed = asyncio.Event()
        self._is_woken = False
        self._num_unannounced = 0
        self._has_ended = False
        self._is_given_up = False
        self._capacity = None if max_pending is None else threading.Semaphore(max_pending)

    def put(self, units: Units) -> None:
        """Send the next units; blocks while too many are pending."""
        if self._capacity is not None and not self._is_given_up:
            self._capacity.acquire()
        self._units.append(units)
        if self._num_unannounced == 0 and not self._is_woken:
            self._is_woken = True
            self._wake()
        if self._capacity is None:
            self._num_unannounced = (self._num_unannounced + 1) % BATCHES_PER_WAKEUP

    def end(self) -> None:
        """End the channel: the thread sends no more."""
        self._has_ended = True
        self._wake()

    def give_up(self) -> None:
        """Stop reading: the thread no longer blocks and runs to its end."""
        self._is_given_up = True
        if self._capacity is not None:
            self._capacity.release()  # to a thread that may already wait

    async def units(self) -> AsyncGenerator[Units]:
        """All units, until the thread ends."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._is_woken = False  # before reading: a later put wakes again
            has_ended = self._has_ended
            while self._units:
                units = self._units.popleft()
                if self._capacity is not None:
                    self._capacity.release()
                else:
                    units = self._with_next(units)
                yield units
            if has_ended:
                return

    def _with_next(self, units: Units) -> Units:
        """One batch of all pending units that are adjacent in their destination."""
        num_units = units.num_units
        while self._units and self._units[0].first_unit == units.first_unit + num_units:
            num_units += self._units.popleft().num_units
        return dataclasses.replace(units, num_units=num_units)

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._changed.set)


class WriteWindow:
    """Writes units while the next ones are received. The end of the context cancels writes.

    At most `max_bytes` are in flight, or one larger batch.
    """

    def __init__(
        self,
        write: Callable[[Units], Coroutine[Any, Any, None]],
        *,
        max_bytes: int = MAX_UNWRITTEN_BYTES,
    ) -> None:
        self._write = write
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._writing: collections.deque[tuple[asyncio.Task[None], int]] = collections.deque()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        tasks = [task for task, _ in self._writing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def put(self, units: Units) -> None:
        """Start a write; waits while too many bytes are in flight. Raises the error of a write."""
        num_bytes = units.data.nbytes
        self._writing.append((asyncio.create_task(self._write(units)), num_bytes))
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes:
            await self._oldest()

    async def flush(self) -> None:
        """Wait until all is written; raises the error of a write."""
        while self._writing:
            await self._oldest()

    async def _oldest(self) -> None:
        task, num_bytes = self._writing[0]
        await task
        self._writing.popleft()
        self._num_bytes -= num_bytes
