"""A transfer's frames, made before anybody asks for them: a fetch waits for no copy and no digest.

    finish ─▶ a thread makes them ─▶ the first who asks for all of it, as it was made out
                                  ─▶ nobody does: its memory comes back with the offer

Whoever else asks has frames made for himself: the next attempt is not given what was refused.
"""

from __future__ import annotations

import asyncio
import secrets

from vlm_worker.transfer.pieces import Pieces
from vlm_worker.transfer.transport import Exposure
from vlm_worker.types import RequestKey
from vlm_worker.wire.frames import Commit, Frame


class Ahead:
    """The frames of all units, for a consumer with this key and invitation.

    `exposure` is where units lie, if not in the frames; nobody knows of it until it is given away.
    On one event loop.
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
        """They are made, or never will be; the first word counts."""
        if not self._ended.is_set():
            self._frames = frames
            self._ended.set()

    async def frames(self) -> tuple[Frame, ...] | None:
        """All of them, when they are made; None where they could not be, or were given up."""
        await self._ended.wait()
        return self._frames


def make(pieces: Pieces, commit: Commit) -> tuple[Frame, ...]:
    """All frames of what is one piece, so that its memory is not used again; in any thread.

    Raises:
        GoneError: what they were to be made in was taken back.
        Exception: what exporting units failed with.
    """
    frames = tuple(pieces.run(commit.num_units, commit))
    if pieces.gone is not None:
        raise pieces.gone
    return frames
