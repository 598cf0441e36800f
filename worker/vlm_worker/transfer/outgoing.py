"""What a producer offers: units that become readable one by one, then a commit, or an error.

    role ──advance(n) finish(commit) fail(error)──▶ Outgoing ──frames(first)──▶ a consumer's stream

Several streams may read at once; each gets every unit from its first on. Memory that a consumer
reads by itself stays exposed until that one closes its stream, or until `close`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from vlm_worker.errors import CorruptTransferError, GoneError, InvalidRequestError
from vlm_worker.settings.timers import PRODUCTION, Timers
from vlm_worker.transfer.ahead import Ahead, Export, room_of
from vlm_worker.transfer.transport import Exposure, Transport
from vlm_worker.types import RequestKey
from vlm_worker.wire.frames import Commit, FrameWriter, TransferId


class Outgoing:
    """One transfer at its producer. The role that makes its units is the only writer.

    It has at most `max_units`; what a consumer asks for is held to that.
    """

    def __init__(
        self,
        identity: TransferId,
        *,
        unit_bytes: int,
        max_units: int,
        export: Export,
        timers: Timers = PRODUCTION,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._identity = identity
        self._max_units = max_units
        self._timers = timers
        self._clock = clock
        self._exposures: list[Exposure] = []
        self._taken_at: dict[object, float] = {}
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

    @property
    def num_readers(self) -> int:
        """Streams that are open."""
        return len(self._taken_at)

    @property
    def has_live_reader(self) -> bool:
        """Whether a stream has taken a frame within the no-progress time."""
        since = self._clock() - self._timers.no_progress
        return any(taken > since for taken in self._taken_at.values())

    @property
    def exposed_bytes(self) -> int:
        """Bytes that consumers may be reading by themselves."""
        return sum(exposure.num_bytes for exposure in self._exposures)

    def close(self) -> None:
        """No consumer reads any more: what is exposed may be used again."""
        while self._exposures:
            self._exposures.pop().close()

    def abandon(self) -> None:
        """A consumer never said that it stopped: what is exposed is never used again."""
        while self._exposures:
            self._exposures.pop().abandon()

    def advance(self, num_units: int) -> None:
        """The first `num_units` units may be read."""
        assert num_units <= self._max_units
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
        return await self._export(0, num_units, room_of(num_units * self._unit_bytes))

    async def frames(
        self,
        key: RequestKey,
        *,
        first_unit: int,
        transport: Transport | None = None,
        invitation: bytes = b"",
    ) -> AsyncGenerator[bytes]:
        """The frames from a unit on, as they become readable, made out to the consumer's attempt.

        With `transport`, bytes go past the frames where the consumer's invitation allows it.

        Raises:
            InvalidRequestError: the transfer has no such unit.
            Exception: what `fail` was given.
        """
        if first_unit > self._max_units:
            raise InvalidRequestError(
                f"first_unit {first_unit} is beyond the {self._max_units} units", param="first_unit"
            )
        exposure = None
        if transport is not None:
            num_bytes = (self._max_units - first_unit) * self._unit_bytes
            exposure = transport.expose(invitation, num_bytes)
        reader = object()
        self._taken_at[reader] = self._clock()
        if exposure is not None:
            self._exposures.append(exposure)
        try:
            async with aclosing(self._cut(key, first_unit, exposure, transport)) as frames:
                async for frame in frames:
                    yield frame
                    self._taken_at[reader] = self._clock()
        except (GeneratorExit, asyncio.CancelledError):
            # the consumer itself has closed its stream: it reads no more
            if exposure is not None and exposure in self._exposures:
                self._exposures.remove(exposure)
                exposure.close()
            raise
        finally:
            del self._taken_at[reader]

    async def _cut(
        self,
        key: RequestKey,
        first_unit: int,
        exposure: Exposure | None,
        transport: Transport | None,
    ) -> AsyncGenerator[bytes]:
        identity = dataclasses.replace(self._identity, key=key)
        if exposure is None or transport is None:
            writer = FrameWriter(identity, unit_bytes=self._unit_bytes, first_unit=first_unit)
        else:
            writer = FrameWriter(
                identity,
                unit_bytes=self._unit_bytes,
                first_unit=first_unit,
                place=exposure.place,
            )
            yield writer.open(transport.name, exposure.opening)
        sent = first_unit
        async with aclosing(Ahead(self._exported, self._unit_bytes)) as exports:
            while True:
                # taken before we look: what changes meanwhile is not missed
                changed = self._changed
                if self._error is not None:
                    raise self._error
                while sent < self._num_units:
                    exports.begin(sent, self._num_units)
                    data = await exports.take()
                    if data is None:
                        break
                    sent += data.nbytes // self._unit_bytes
                    exports.begin(sent, self._num_units)
                    for frame in writer.write(data):
                        yield frame
                if self._commit is not None:
                    yield writer.commit(self._commit)
                    return
                if not await _is_set(changed, seconds=self._timers.wait_frame):
                    yield writer.wait()

    async def _exported(
        self, first_unit: int, num_units: int, room: memoryview
    ) -> memoryview | None:
        """Units; None where the answer ended with its first token and nothing is kept."""
        try:
            data = await self._export(first_unit, num_units, room)
        except GoneError:
            if (await self.settled()).finish_reason is None:
                raise
            return None
        if data.nbytes != room.nbytes:
            raise CorruptTransferError("the export has another size than the layout")
        return data

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
