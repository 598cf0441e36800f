"""What a producer offers: units that become readable one by one, then a commit, or an error.

    role ──advance(n) finish(commit) fail(error)──▶ Outgoing ──frames(first)──▶ a consumer's stream

Several streams may read at once; each gets every unit from its first on.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final

from vlm_worker.errors import CorruptTransferError, GoneError, InvalidRequestError
from vlm_worker.settings.timers import PRODUCTION, Timers
from vlm_worker.types import RequestKey
from vlm_worker.wire.frames import Commit, FrameWriter, TransferId

EXPORT_BYTES: Final = 4 << 20

Export = Callable[[int, int], Awaitable[memoryview]]
"""`await export(first_unit, num_units)` is a copy, `[num_units, unit_bytes]`."""


class Outgoing:
    """One transfer at its producer. The role that makes its units is the only writer."""

    def __init__(
        self,
        identity: TransferId,
        *,
        unit_bytes: int,
        export: Export,
        timers: Timers = PRODUCTION,
    ) -> None:
        self._identity = identity
        self._timers = timers
        self.num_readers = 0
        self._unit_bytes = unit_bytes
        self._export = export
        self._num_units = 0
        self._commit: Commit | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    @property
    def request_id(self) -> str:
        """Whose it is."""
        return self._identity.key.request_id

    def advance(self, num_units: int) -> None:
        """The first `num_units` units may be read."""
        self._num_units = max(self._num_units, num_units)
        self._notify()

    def finish(self, commit: Commit) -> None:
        """All units may be read; with a finish reason there may be fewer than a reader expects."""
        self._commit = commit
        if commit.finish_reason is None:
            self._num_units = commit.num_units
        self._notify()

    def fail(self, error: Exception) -> None:
        """Readers, present and future, get this error instead of what is missing."""
        self._error = self._error or error
        self._notify()

    async def settled(self) -> Commit:
        """The commit, when it is there; raises what `fail` was given."""
        while self._commit is None:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
        return self._commit

    async def whole(self, num_units: int) -> memoryview:
        """All units, for a consumer in this process; waits for the commit.

        Raises:
            CorruptTransferError: there are not so many units.
            Exception: what `fail` was given.
        """
        await self.settled()
        if self._num_units != num_units:
            raise CorruptTransferError(f"{self._num_units} units where {num_units} are due")
        return await self._export(0, num_units)

    async def frames(self, key: RequestKey, *, first_unit: int) -> AsyncGenerator[bytes]:
        """The frames from a unit on, as they become readable, made out to the consumer's attempt.

        Raises:
            InvalidRequestError: the transfer has no such unit.
            Exception: what `fail` was given.
        """
        identity = dataclasses.replace(self._identity, key=key)
        writer = FrameWriter(identity, unit_bytes=self._unit_bytes, first_unit=first_unit)
        batch = max(1, EXPORT_BYTES // self._unit_bytes)
        sent = first_unit
        self.num_readers += 1
        try:
            while True:
                changed = (
                    self._changed
                )  # taken before we look: what changes meanwhile is not missed
                if self._error is not None:
                    raise self._error
                while sent < self._num_units:
                    count = min(batch, self._num_units - sent)
                    try:
                        data = await self._export(sent, count)
                    except GoneError:
                        if (await self.settled()).finish_reason is None:
                            raise
                        break  # the first token was the last: the engine keeps nothing to read
                    if data.nbytes != count * self._unit_bytes:
                        raise CorruptTransferError("the export has another size than the layout")
                    for frame in writer.write(data):
                        yield frame
                    sent += count
                if self._commit is not None:
                    if sent > self._num_units and self._commit.finish_reason is None:
                        raise InvalidRequestError(
                            f"first_unit {first_unit} is beyond the {self._num_units} units"
                        )
                    yield writer.commit(self._commit)
                    return
                if not await _is_set(changed, seconds=self._timers.wait_frame):
                    yield writer.wait()
        finally:
            self.num_readers -= 1

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def _is_set(changed: asyncio.Event, *, seconds: float) -> bool:
    """False where nothing changed for so long that the consumer wants to know we live."""
    try:
        async with asyncio.timeout(seconds):
            await changed.wait()
    except TimeoutError:
        return False
    return True
