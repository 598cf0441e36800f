"""The producer side of a transfer: units become readable one by one, then a commit, or an error.

    role ──advance(n) finish(commit) fail(error)──▶ Producer ──frame_batches(first)──▶ a consumer

Several consumers may read at once; each gets every unit from its first on. Memory that a consumer
reads directly stays exposed until it closes its stream, or until `close`.

The frames of all units may be built before a fetch (`prebuild_frames`), which then waits for no
copy and no digest. Every other fetch gets its own frames: a next attempt never gets frames that one
refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

from vlm_worker.errors import CorruptTransferError, GoneError, InvalidRequestError, WorkerError
from vlm_worker.settings.timers import PRODUCTION, Timers
from vlm_worker.transfer.thread_call import run_in_thread
from vlm_worker.transfer.transport import Exposure, ExposureSet, Transport
from vlm_worker.types import RequestKey
from vlm_worker.wire.buffers import PLAIN, Copier, MemoryKind, allocate_buffer, stage
from vlm_worker.wire.frames import (
    MAX_LARGE_BYTES,
    MAX_OUT_OF_BAND_BYTES,
    MAX_PAYLOAD_BYTES,
    ChunkFramer,
    Commit,
    Export,
    Frame,
    FrameBatches,
    FrameWriter,
    TransferId,
    chunk_bytes_of,
)

Lend = Callable[[int, int], Awaitable[Callable[[], None]]]


@dataclasses.dataclass(eq=False, slots=True)
class _Reader:
    """One consumer's stream; `exposure` of `transport` is its own.

    Any thread writes `taken_at`, the time of its last frame.
    """

    key: RequestKey
    first_unit: int
    transport: Transport | None
    exposure: Exposure | None
    taken_at: float


@dataclasses.dataclass(eq=False, slots=True)
class _Prebuilt:
    """The frames of all units for the first consumer with our key and this invitation.

    `exposure` holds out-of-band payloads; no consumer knows it yet. `frames` are None if building
    them failed or was abandoned.
    """

    invitation: bytes
    exposure: Exposure | None
    frames: asyncio.Future[tuple[Frame, ...] | None]

    def end(self, frames: tuple[Frame, ...] | None) -> None:
        """Set the frames; the first call counts."""
        if not self.frames.done():
            self.frames.set_result(frames)


class Producer:
    """One transfer at its producer. Only the role that computes its units writes it.

    It has at most `max_units`, which bounds requests. `prepare` is awaited before units are
    exported; `copier` copies units. If units are in device memory, `lend(first_unit, end_unit)`
    keeps them unchanged until the call that it returns; without it, they are staged in host memory.
    """

    def __init__(
        self,
        identity: TransferId,
        *,
        unit_bytes: int,
        max_units: int,
        export: Export,
        prepare: Callable[[], Awaitable[None]] | None = None,
        lend: Lend | None = None,
        timers: Timers = PRODUCTION,
        clock: Callable[[], float] = time.monotonic,
        copier: Copier = PLAIN,
    ) -> None:
        self._identity = identity
        self._copier = copier
        self._max_units = max_units
        self._timers = timers
        self._clock = clock
        self._exposures = ExposureSet()
        self._prebuilt: _Prebuilt | None = None
        self._readers: set[_Reader] = set()
        self._unit_bytes = unit_bytes
        self._export = export
        self._prepare = prepare
        self._lend = lend
        self._num_units = 0
        self._commit: Commit | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    @property
    def content(self) -> bytes:
        """The identity of its data; see `TransferId`."""
        return self._identity.content

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    @property
    def has_live_reader(self) -> bool:
        """Whether a stream took a frame within the no-progress time."""
        since = self._clock() - self._timers.no_progress
        return any(reader.taken_at > since for reader in self._readers)

    @property
    def exposed_bytes(self) -> int:
        return self._exposures.num_bytes

    def close(self) -> None:
        """Free exposed memory: no consumer reads it any longer."""
        self._drop_prebuilt()
        self._exposures.close()

    def abandon(self) -> None:
        """Never reuse exposed memory: a consumer may still read it."""
        self._drop_prebuilt()
        self._exposures.abandon()

    def advance(self, num_units: int) -> None:
        """The first `num_units` units may be read."""
        assert num_units <= self._max_units
        self._num_units = max(self._num_units, num_units)
        self._notify()

    def finish(self, commit: Commit) -> None:
        """All units may be read; with a finish reason, there may be fewer than requested."""
        self._commit = commit
        if commit.finish_reason is None:
            self._num_units = commit.num_units
        self._notify()

    def fail(self, error: Exception) -> None:
        """Present and future readers get this error instead of missing units."""
        self._error = self._error or error
        self._drop_prebuilt()
        self._notify()

    async def prebuild_frames(
        self, threads: ThreadPoolExecutor, transport: Transport | None = None
    ) -> None:
        """Build all frames for a first reader with this key and transport; call after `finish`.

        Does nothing if a consumer already reads: chunks serve it sooner. A later fetch gets errors.
        """
        commit, key = self._commit, self._identity.key
        assert commit is not None
        if self._readers or self._error is not None:
            return
        invitation = b"" if transport is None else transport.invitation()
        num_bytes = self._max_units * self._unit_bytes
        exposure = None if transport is None else transport.expose(invitation, num_bytes)
        if invitation and exposure is None:
            return  # no capacity: the bytes go into the frames of a later fetch
        result = asyncio.get_running_loop().create_future()
        prebuilt = self._prebuilt = _Prebuilt(invitation, exposure, result)
        frames = None
        try:
            await self._prepared()
            # No consumer waits for one frame while the next is built: one chunk, large frames.
            framer = self._framer(
                _Reader(key, 0, transport, exposure, self._clock()),
                max_bytes=MAX_PAYLOAD_BYTES if exposure is None else MAX_OUT_OF_BAND_BYTES,
                chunk_bytes=num_bytes,
                copier=PLAIN,
            )
            running = run_in_thread(threads, framer.run_all, commit)
            await running.end()
            with contextlib.suppress(WorkerError):
                frames = running.result()
        finally:
            prebuilt.end(frames)

    async def settled(self) -> Commit:
        """Wait for the commit; raises the error given to `fail`."""
        while self._commit is None:
            if self._error is not None:
                raise self._error
            await self._changed.wait()
        return self._commit

    async def whole(self, num_units: int) -> memoryview:
        """All units, for a consumer in this process; waits for the commit.

        Raises CorruptTransferError if their number differs, and the error given to `fail`.
        """
        await self.settled()
        if self._num_units != num_units:
            raise CorruptTransferError(f"{self._num_units} units where {num_units} are due")
        await self._prepared()
        buffer = allocate_buffer(num_units * self._unit_bytes)
        data = self._export(0, num_units, buffer)
        if isinstance(data, memoryview):
            return data
        stage(data.regions, buffer)
        data.check()
        return buffer

    async def frame_batches(
        self,
        key: RequestKey,
        *,
        first_unit: int,
        transport: Transport | None = None,
        invitation: bytes = b"",
        large: bool = False,
    ) -> FrameBatches:
        """The frames from a unit on, as units become readable, with the consumer's attempt.

        With `transport`, payloads are out of band if the consumer's invitation allows it. Any
        thread may iterate over a batch; it computes the digests. `large`: no gRPC limit.

        Raises InvalidRequestError if there is no such unit, and the error given to `fail`.
        """
        if first_unit > self._max_units:
            raise InvalidRequestError(
                f"first_unit {first_unit} is beyond the {self._max_units} units", param="first_unit"
            )
        if transport is None:
            invitation = b""
        num_bytes = (self._max_units - first_unit) * self._unit_bytes
        prebuilt, wants_all = self._prebuilt, first_unit == 0 and key == self._identity.key
        if (
            prebuilt is not None
            and wants_all
            and large
            and secrets.compare_digest(invitation, prebuilt.invitation)
        ):
            self._prebuilt, exposure = None, prebuilt.exposure
        else:
            self._drop_prebuilt()
            prebuilt = None
            exposure = None if transport is None else transport.expose(invitation, num_bytes)
        reader = _Reader(key, first_unit, transport, exposure, self._clock())
        self._readers.add(reader)
        if exposure is not None:
            self._exposures.add(exposure)
        try:
            frames = None if prebuilt is None else await prebuilt.frames
            if frames is not None:
                if self._error is not None:
                    raise self._error
                if exposure is None:
                    yield self._taken(iter(frames), reader)
                elif exposure in self._exposures:
                    yield frames
                else:
                    raise GoneError("the transfer was abandoned")
                return
            large = large or exposure is not None
            framer = self._framer(
                reader,
                max_bytes=MAX_LARGE_BYTES if large else MAX_PAYLOAD_BYTES,
                chunk_bytes=chunk_bytes_of(num_bytes, large=large),
                copier=self._copier,
                lends=self._lend is not None,
            )
            async with aclosing(self._batches(framer, exposure)) as batches:
                async for batch in batches:
                    yield self._taken(batch, reader)
        except (GeneratorExit, asyncio.CancelledError):
            # the consumer closed its stream: it reads no longer
            if exposure is not None and exposure in self._exposures:
                self._exposures.close_one(exposure)
            raise
        finally:
            self._readers.remove(reader)

    def _drop_prebuilt(self) -> None:
        """Drop prebuilt frames that no consumer fetched."""
        prebuilt, self._prebuilt = self._prebuilt, None
        if prebuilt is not None:
            prebuilt.end(None)
            if prebuilt.exposure is not None:
                self._exposures.close_one(prebuilt.exposure)

    def _taken(self, batch: Iterator[Frame], reader: _Reader) -> Iterator[Frame]:
        """A batch; records the time when each frame is requested, so the one before is sent."""
        for frame in batch:
            if self._error is not None:
                raise self._error
            yield frame
            reader.taken_at = self._clock()

    async def _batches(
        self, framer: ChunkFramer, exposure: Exposure | None
    ) -> AsyncGenerator[Iterator[Frame]]:
        if framer.next_unit >= self._num_units and self._commit is None:
            # the opening frame need not wait for units
            yield framer.run(framer.next_unit, None)
        while not framer.is_committed:
            # taken before the checks, so that no change is missed
            changed = self._changed
            if self._error is not None:
                raise self._error
            if framer.next_unit < self._num_units and framer.gone is None:
                await self._prepared()
                end_unit, commit = self._num_units, self._commit
                if framer.exposes_device and exposure is not None and self._lend is not None:
                    try:  # the units stay unchanged while a consumer may read them
                        loan = await self._lend(framer.next_unit, end_unit)
                        self._exposures.lend(exposure, loan)
                    except GoneError as error:
                        framer.gone = error
                if framer.gone is None:
                    yield framer.run(end_unit, commit)
                if framer.gone is not None and (await self.settled()).finish_reason is None:
                    raise framer.gone
            elif self._commit is not None:
                # with a finish reason no units follow: the answer ended with its first token
                yield framer.run(framer.next_unit, self._commit)
            else:
                try:
                    async with asyncio.timeout(self._timers.wait_frame):
                        await changed.wait()
                except TimeoutError:
                    yield iter((framer.writer.wait(),))

    def _framer(
        self,
        reader: _Reader,
        *,
        max_bytes: int,
        chunk_bytes: int,
        copier: Copier,
        lends: bool = False,
    ) -> ChunkFramer:
        """The frames of a reader. With `lends`, it may read device memory directly."""
        write_at = buffer = opening = None
        transport, exposure = reader.transport, reader.exposure
        if exposure is not None:
            write_at = functools.partial(self._exposures.write, exposure)
            buffer = functools.partial(self._exposures.buffer, exposure)
        writer = FrameWriter(
            dataclasses.replace(self._identity, key=reader.key),
            unit_bytes=self._unit_bytes,
            first_unit=reader.first_unit,
            write_at=write_at,
            max_bytes=max_bytes,
            copier=copier,
        )
        exposes_device = False
        if exposure is not None and transport is not None:
            opening = writer.open(transport.name, exposure.opening)
            exposes_device = lends and MemoryKind.DEVICE in transport.accepts
        return ChunkFramer(
            self._export,
            writer,
            unit_bytes=self._unit_bytes,
            first_unit=reader.first_unit,
            chunk_bytes=chunk_bytes,
            buffer=buffer,
            opening=opening,
            exposes_device=exposes_device,
        )

    async def _prepared(self) -> None:
        if self._prepare is not None:
            await self._prepare()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
