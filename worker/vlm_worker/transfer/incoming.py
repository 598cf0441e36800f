"""The consumer's side: frames in, checked units out, and a commit before anything counts.

async for units in Pull(...):   whole units, in order
pull.commit                     set when the iteration has ended without an error
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from vlm_worker.errors import CorruptTransferError, IncompatibleError, PeerLostError, Refusal
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import Commit, Units


class Pull:
    """One transfer being read. `on_refused` is told what was wrong with one that is void."""

    def __init__(
        self,
        frames: AsyncGenerator[bytes],
        reader: FrameReader,
        *,
        peer: str,
        no_progress_seconds: float,
        on_refused: Callable[[Refusal], None] = lambda _: None,
    ) -> None:
        self._frames = frames
        self._reader = reader
        self._peer = peer
        self._no_progress_seconds = no_progress_seconds
        self._on_refused = on_refused
        self.num_bytes = 0

    @property
    def commit(self) -> Commit:
        """The producer's last word; only after the iteration."""
        assert self._reader.commit is not None
        return self._reader.commit

    async def units(self) -> AsyncGenerator[Units]:
        """Whole units as they come.

        Raises:
            PeerLostError: no frame for `no_progress_seconds`, or the producer is gone.
            CorruptTransferError: a frame is not as it must be, or the commit is missing.
            IncompatibleError: a frame is of another layout.
            WorkerError: what the producer raised.
        """
        try:
            async with aclosing(self._checked()) as checked:
                async for units in checked:
                    yield units
        except CorruptTransferError as error:
            self._on_refused(error.refusal)
            raise
        except IncompatibleError:
            self._on_refused(Refusal.LAYOUT)
            raise
        finally:
            self._reader.close()

    async def _checked(self) -> AsyncGenerator[Units]:
        async with aclosing(self._frames) as frames:
            while True:
                try:
                    async with asyncio.timeout(self._no_progress_seconds):
                        frame = await anext(frames, None)
                except TimeoutError:
                    raise PeerLostError(
                        f"{self._peer}: no frame for {self._no_progress_seconds:g} s"
                    ) from None
                if frame is None:
                    break
                units = self._reader.read(frame)
                if units is not None:
                    self.num_bytes += units.data.nbytes
                    yield units
        if self._reader.commit is None:
            raise CorruptTransferError(
                f"{self._peer}: the transfer ended without its commit", refusal=Refusal.COMMIT
            )
