"""Frames of a transfer built before a fetch, which then waits for no copy and no digest.

    finish ─▶ a thread builds them ─▶ the first fetch of all units with the expected key
                                   ─▶ no such fetch: memory is freed with the transfer

Every other fetch gets its own frames: a next attempt never gets frames that one refused.
"""

from __future__ import annotations

import asyncio
import secrets

from vlm_worker.transfer.chunk_framer import ChunkFramer
from vlm_worker.transfer.transport import Exposure
from vlm_worker.types import RequestKey
from vlm_worker.wire.frames import Commit, Frame


class PrebuiltFrames:
    """The frames of all units, for a consumer with this key and invitation.

    `exposure` holds out-of-band payloads; no consumer knows it yet. Used on one event loop.
    """

    def __init__(self, key: RequestKey, invitation: bytes, exposure: Exposure | None) -> None:
        self.exposure = exposure
        self._key = key
        self._invitation = invitation
        self._frames: tuple[Frame, ...] | None = None
        self._ended = asyncio.Event()

    def is_for(self, key: RequestKey, invitation: bytes) -> bool:
        """Whether this consumer can read them."""
        return key == self._key and secrets.compare_digest(invitation, self._invitation)

    def end(self, frames: tuple[Frame, ...] | None) -> None:
        """Set the frames, or None if there are none; the first call counts."""
        if not self._ended.is_set():
            self._frames = frames
            self._ended.set()

    async def frames(self) -> tuple[Frame, ...] | None:
        """Wait for the frames; None if building them failed or was abandoned."""
        await self._ended.wait()
        return self._frames


def build_frames(framer: ChunkFramer, commit: Commit) -> tuple[Frame, ...]:
    """Build all frames as one chunk, so that its buffer is not reused. Thread-safe.

    Raises:
        GoneError: the exposed memory was freed.
        Exception: an error of the export.
    """
    frames = tuple(framer.run(commit.num_units, commit))
    if framer.gone is not None:
        raise framer.gone
    return frames
