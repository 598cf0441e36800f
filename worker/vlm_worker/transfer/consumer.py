"""The consumer side of a transfer: validated units, then the commit that makes them usable.

async for units in Pull(...):   whole units, in order
pull.commit                     set when the iteration has ended without an error
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Final

from vlm_worker.errors import CorruptTransferError, IncompatibleError, PeerLostError, Refusal
from vlm_worker.transfer.thread_call import run_in_thread
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import Commit, Units


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
        """Bytes of the units so far."""
        return self._reader.num_bytes

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


async def _read(reader: FrameReader, frame: bytes) -> Units | None:
    """Read a frame; on a thread if it may block."""
    if not reader.may_block:
        return reader.read(frame)
    running = run_in_thread(_READERS, reader.read, frame)
    await running.end()  # even if cancelled: the thread writes to the caller's memory
    return running.result()


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
                units = await _read(reader, frame)
                if units is not None:
                    yield units
    finally:
        reader.close()
