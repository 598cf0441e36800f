"""The consumer's side: checked units out, and a commit before anything counts.

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
from vlm_worker.transfer.running import started
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import Commit, Units


class Pull:
    """One transfer being read. `on_refused` is told what was wrong with one that is void.

    `received` gives what `reader` has checked, and has let go of its memory in the end.
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
        """Of the units so far."""
        return self._reader.num_bytes

    @property
    def commit(self) -> Commit:
        """The producer's last word; only after the iteration."""
        assert self._reader.commit is not None
        return self._reader.commit

    async def units(self) -> AsyncGenerator[Units]:
        """Whole units as they come.

        Raises:
            PeerLostError: no frame in time, or the producer is gone.
            CorruptTransferError: a frame is not as it must be, or the commit is missing.
            IncompatibleError: a frame is of another layout.
            WorkerError: what the producer raised.
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
"""For frames whose bytes are fetched from a producer's memory, which may wait for a network."""


async def _read(reader: FrameReader, frame: bytes) -> Units | None:
    """Read a frame; the loop goes on meanwhile if that may wait."""
    if not reader.may_wait:
        return reader.read(frame)
    running = started(_READERS, reader.read, frame)
    await running.end()  # no earlier, even when cancelled: it writes into memory that we own
    return running.result()


async def checked(
    frames: AsyncGenerator[bytes], reader: FrameReader, *, peer: str, no_progress_seconds: float
) -> AsyncGenerator[Units]:
    """The units of frames that come one by one.

    Raises:
        PeerLostError: no frame for `no_progress_seconds`.
        WorkerError: what the producer raised, or the reader.
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
