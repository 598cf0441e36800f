"""What a producer offers: units that become readable one by one, then a commit, or an error.

    role ──advance(n) finish(commit) fail(error)──▶ Outgoing ──runs(first)──▶ a consumer's stream

Several streams may read at once; each gets every unit from its first on. Memory that a consumer
reads by itself stays exposed until that one closes its stream, or until `close`. Frames may be made
before anybody asks (`make_ahead`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

from vlm_worker.errors import CorruptTransferError, GoneError, InvalidRequestError, WorkerError
from vlm_worker.settings.timers import PRODUCTION, Timers
from vlm_worker.transfer.ahead import Ahead, make
from vlm_worker.transfer.exposures import Exposures
from vlm_worker.transfer.making import Making
from vlm_worker.transfer.pieces import Export, Pieces, room_of
from vlm_worker.transfer.running import is_set, nothing, started
from vlm_worker.transfer.transport import Transport
from vlm_worker.types import RequestKey
from vlm_worker.wire.copying import PLAIN, Copier
from vlm_worker.wire.frames import Commit, Frame, FrameWriter, Runs, TransferId


@dataclasses.dataclass(eq=False, slots=True)
class _Reader:
    """One consumer's stream, and when it has last taken a frame; any thread may write that."""

    taken_at: float


class Outgoing:
    """One transfer at its producer. The role that makes its units is the only writer.

    It has at most `max_units`; what a consumer asks for is held to that. `prepare` is awaited
    before units are exported; `copier` is for those that are copied on their way.
    """

    def __init__(
        self,
        identity: TransferId,
        *,
        unit_bytes: int,
        max_units: int,
        export: Export,
        prepare: Callable[[], Awaitable[None]] = nothing,
        timers: Timers = PRODUCTION,
        clock: Callable[[], float] = time.monotonic,
        copier: Copier = PLAIN,
    ) -> None:
        self._identity = identity
        self._copier = copier
        self._max_units = max_units
        self._timers = timers
        self._clock = clock
        self._exposures = Exposures()
        self._making = Making(identity, unit_bytes, max_units, export, copier, self._exposures)
        self._ahead: Ahead | None = None
        self._readers: set[_Reader] = set()
        self._unit_bytes = unit_bytes
        self._export = export
        self._prepare = prepare
        self._num_units = 0
        self._commit: Commit | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    @property
    def request_id(self) -> str:
        """Whose it is."""
        return self._identity.key.request_id

    @property
    def content(self) -> bytes:
        """What it is made from; see `TransferId`."""
        return self._identity.content

    @property
    def num_readers(self) -> int:
        """Streams that are open."""
        return len(self._readers)

    @property
    def has_live_reader(self) -> bool:
        """Whether a stream has taken a frame within the no-progress time."""
        since = self._clock() - self._timers.no_progress
        return any(reader.taken_at > since for reader in self._readers)

    @property
    def exposed_bytes(self) -> int:
        """Bytes that consumers may be reading by themselves."""
        return self._exposures.num_bytes

    def close(self) -> None:
        """No consumer reads any more: what is exposed may be used again."""
        self._drop_ahead()
        self._exposures.close()

    def abandon(self) -> None:
        """A consumer never said that it stopped: what is exposed is never used again."""
        self._drop_ahead()
        self._exposures.abandon()

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
        self._drop_ahead()
        self._notify()

    async def make_ahead(
        self, threads: ThreadPoolExecutor, transport: Transport | None = None
    ) -> None:
        """Make all frames for a first reader whose key and transport are ours; after `finish`.

        Where somebody reads already, he is served sooner a piece at a time. Whoever asks hears of
        what fails.
        """
        commit, making = self._commit, self._making
        assert commit is not None
        if self._readers or self._error is not None:
            return
        invitation = b"" if transport is None else transport.invitation()
        exposure = transport.expose(invitation, making.num_bytes) if transport is not None else None
        if invitation and exposure is None:
            return  # without room its bytes travel, to whoever asks
        ahead = self._ahead = Ahead(self._identity.key, invitation, exposure)
        frames = None
        try:
            await self._prepare()
            running = started(threads, make, making.ahead(transport, exposure), commit)
            await running.end()
            with contextlib.suppress(WorkerError):
                frames = running.result()
        finally:
            ahead.end(frames)

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
        await self._prepare()
        room = room_of(num_units * self._unit_bytes)
        found = self._export(0, num_units, room)
        if isinstance(found, memoryview):
            return found
        self._copier.copy(found.parts, [room], head=b"")
        found.check()
        return room

    async def runs(
        self,
        key: RequestKey,
        *,
        first_unit: int,
        transport: Transport | None = None,
        invitation: bytes = b"",
        large: bool = False,
    ) -> Runs:
        """The frames from a unit on, as they become readable, made out to the consumer's attempt.

        With `transport`, bytes go past the frames where the consumer's invitation allows it. Any
        thread may go through a run, and digests are made there. `large` frames fit no gRPC message.

        Raises:
            InvalidRequestError: the transfer has no such unit.
            Exception: what `fail` was given.
        """
        if first_unit > self._max_units:
            raise InvalidRequestError(
                f"first_unit {first_unit} is beyond the {self._max_units} units", param="first_unit"
            )
        if transport is None:
            invitation = b""
        ahead = self._ahead
        if ahead is not None and first_unit == 0 and large and ahead.is_for(key, invitation):
            self._ahead, exposure = None, ahead.exposure
        else:
            self._drop_ahead()
            ahead = None
            num_bytes = (self._max_units - first_unit) * self._unit_bytes
            exposure = None if transport is None else transport.expose(invitation, num_bytes)
        reader = _Reader(self._clock())
        self._readers.add(reader)
        if exposure is not None:
            self._exposures.add(exposure)
        try:
            frames = None if ahead is None else await ahead.frames()
            if frames is not None:
                if self._error is not None:
                    raise self._error
                if exposure is None:
                    yield self._taken(iter(frames), reader)
                elif exposure in self._exposures:
                    yield frames
                else:
                    raise GoneError("the transfer was given up")
                return
            pieces, writer = self._making.for_reader(
                key, first_unit, transport, exposure, large=large
            )
            async with aclosing(self._cut(pieces, writer)) as runs:
                async for run in runs:
                    yield self._taken(run, reader)
        except (GeneratorExit, asyncio.CancelledError):
            # the consumer itself has closed its stream: it reads no more
            if exposure is not None and exposure in self._exposures:
                self._exposures.close_one(exposure)
            raise
        finally:
            self._readers.remove(reader)

    def _drop_ahead(self) -> None:
        """Take back what was made for somebody who never came."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.end(None)
            if ahead.exposure is not None:
                self._exposures.close_one(ahead.exposure)

    def _taken(self, run: Iterator[Frame], reader: _Reader) -> Iterator[Frame]:
        """A run, noting when its frames are asked for: the one before has then been taken."""
        for frame in run:
            if self._error is not None:
                raise self._error
            yield frame
            reader.taken_at = self._clock()

    async def _cut(self, pieces: Pieces, writer: FrameWriter) -> AsyncGenerator[Iterator[Frame]]:
        if pieces.next_unit >= self._num_units and self._commit is None:
            # what goes before all units need not wait for them
            yield pieces.run(pieces.next_unit, None)
        while not pieces.is_committed:
            # taken before we look: what changes meanwhile is not missed
            changed = self._changed
            if self._error is not None:
                raise self._error
            if pieces.next_unit < self._num_units and pieces.gone is None:
                await self._prepare()
                yield pieces.run(self._num_units, self._commit)
                if pieces.gone is not None and (await self.settled()).finish_reason is None:
                    raise pieces.gone
            elif self._commit is not None:
                # with a finish reason nothing may be kept: the answer ended with its first token
                yield pieces.run(pieces.next_unit, self._commit)
            elif not await is_set(changed, seconds=self._timers.wait_frame):
                yield iter([writer.wait()])

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
