"""Both ends of data connections in one process, and what they may not leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

from worker.transfer.damages import Transfer

from vlm_worker.server.data_port import DataPort
from vlm_worker.settings.timers import PRODUCTION, Timers
from vlm_worker.transfer.data_connections import DataConnectionPool, FetchThreads
from vlm_worker.types import RequestKey
from vlm_worker.wire.data_protocol import Fetch
from vlm_worker.wire.frames import Commit, Frame, FrameBatches, FrameWriter, TransferId
from vlm_worker.wire.identity import ServiceIdentity
from vlm_worker.wire.identity_store import IdentityStore
from vlm_worker.wire.messages import FetchCall

SECONDS = 60.0
"""What a busy machine gets for what an idle one does in milliseconds."""

PATIENT = PRODUCTION.scaled(100)
"""No timer runs out in a test: what ends, ends by what the test does."""

SHORT = PRODUCTION.scaled(0.02)
"""For tests of the timers: without a byte for 0.16 s, a producer is lost."""


def transfer_of(name: str = "t-1", *, unit_bytes: int = 400, num_units: int = 30) -> Transfer:
    """Bytes that tell transfers from each other."""
    identity = TransferId(RequestKey("r-1", 1), name, b"b" * 16, b"f" * 16, "pod-1")
    start = name.encode()
    data = (start * (unit_bytes * num_units // len(start) + 1))[: unit_bytes * num_units]
    return Transfer(identity, unit_bytes, 0, num_units, data)


def call_of(transfer: Transfer) -> FetchCall:
    identity = transfer.identity
    return FetchCall(identity.name, identity.boot_id, identity.fingerprint, identity.key)


class ProducerSide:
    """Sends half of a transfer, waits for `go`, and sends the rest, or fails with `error`."""

    def __init__(self, *transfers: Transfer) -> None:
        self.transfers = {one.identity.name: one for one in transfers}
        self.error: Exception | None = None
        self.go = asyncio.Event()
        self.go.set()
        self.num_begun = 0
        self.num_open = 0
        self.fetches: list[Fetch] = []

    async def serve(self, fetch: Fetch, call: FetchCall) -> FrameBatches:
        self.num_begun += 1
        self.num_open += 1
        self.fetches.append(fetch)
        try:
            one = self.transfers[call.transfer_id]
            writer = FrameWriter(one.identity, unit_bytes=one.unit_bytes)
            half = one.unit_bytes * (one.end_unit // 2)
            yield writer.write(memoryview(one.data)[:half])
            while not await is_set(self.go, seconds=SHORT.wait_frame):
                yield iter([writer.wait()])
            if self.error is not None:
                raise self.error
            yield writer.write(memoryview(one.data)[half:])
            yield iter([writer.commit(Commit(one.end_unit, 4 * one.end_unit, 7))])
        finally:
            self.num_open -= 1


async def is_set(event: asyncio.Event, *, seconds: float) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


@contextlib.asynccontextmanager
async def listening(
    serve: Callable[[Fetch, FetchCall], FrameBatches],
    *,
    port: int = 0,
    timers: Timers = PATIENT,
    identity: IdentityStore | None = None,
) -> AsyncIterator[tuple[DataPort, int]]:
    """A data port, and where it is."""
    served = DataPort(serve, timers, identity=identity)
    try:
        yield served, served.open("127.0.0.1", port)
    finally:
        await served.close()


@contextlib.asynccontextmanager
async def linked(
    port: int,
    *,
    timers: Timers = PATIENT,
    identity: IdentityStore | None = None,
    peer: ServiceIdentity | None = None,
) -> AsyncIterator[DataConnectionPool]:
    """A link to a data port."""
    threads = FetchThreads()
    link = DataConnectionPool("127.0.0.1:1", threads, timers, identity=identity)
    link.learn(port, peer)
    try:
        yield link
    finally:
        link.close()
        threads.close()


async def fetched(
    link: DataConnectionPool, transfer: Transfer, *, fetch: Fetch = Fetch.KV
) -> bytes:
    """All units of a fetch, as they come."""
    reader = transfer.reader()
    data = b""
    async with aclosing(link.units(fetch, call_of(transfer), reader)) as units:
        async for some in units:
            data += some.data
    assert reader.commit is not None
    return data


async def until(holds: Callable[[], bool], *, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        await asyncio.sleep(0.002)


def running() -> set[threading.Thread]:
    """FetchThreads of this process, without those that its event loop ends itself."""
    return {one for one in threading.enumerate() if not one.name.startswith("asyncio_")}


def sockets() -> set[str]:
    """Of this process."""
    found = set()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(file.readlink()))
    return {name for name in found if name.startswith("socket:")}


@contextlib.asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """What runs and is open inside has ended at the end: tasks, threads, sockets."""
    tasks, threads, files = asyncio.all_tasks(), running(), sockets()
    yield
    await until(lambda: asyncio.all_tasks() - tasks <= {asyncio.current_task()})
    await until(lambda: running() <= threads)
    await until(lambda: sockets() <= files)  # gRPC closes its own in threads that it keeps


def frames_of(transfer: Transfer) -> Iterator[Frame]:
    """All of it, with its commit."""
    writer = FrameWriter(transfer.identity, unit_bytes=transfer.unit_bytes)
    yield from writer.write(memoryview(transfer.data))
    yield writer.commit(Commit(transfer.end_unit, 4 * transfer.end_unit, 7))
