"""A producer of rows, consumers of it, and memory in which a bit changes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path

import numpy as np
from worker.transfer.fetching import linked, listening, until

from vlm_worker.settings.timers import PRODUCTION
from vlm_worker.transfer.producer import Producer
from vlm_worker.transfer.shared_memory import SharedMemory
from vlm_worker.transfer.transport import Transport
from vlm_worker.types import RequestKey
from vlm_worker.wire.buffers import DestinationBuffers, HostRegions, Regions, host_views
from vlm_worker.wire.data_protocol import Fetch
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import Commit, FrameBatches, TransferId
from vlm_worker.wire.messages import FetchCall

KEY = RequestKey("r-1", 1)
IDENTITY = TransferId(KEY, "t-1", b"b" * 16, b"f" * 16, "pod")
UNIT, NUM_UNITS = 8192, 576
DATA = secrets.token_bytes(UNIT * NUM_UNITS)
CAPACITY = 3 * len(DATA)

Make = Callable[[], Transport]
"""One instance of a transport: a worker's."""


def shared(directory: Path, *, native_library: str | None = None) -> SharedMemory:
    return SharedMemory(
        directory, capacity_bytes=CAPACITY, leftover_seconds=60.0, native_library=native_library
    )


class ProducerSide:
    """Units of `data`, all of which may be read; `num_exports` counts how often they are made."""

    def __init__(self, transport: Transport, data: bytes = DATA) -> None:
        self.transport = transport
        self.data = data
        self.num_exports = 0
        self.may_export = threading.Event()
        self.may_export.set()
        self.error: Exception | None = None
        self.producer = Producer(
            IDENTITY, unit_bytes=UNIT, max_units=len(data) // UNIT, export=self._export
        )
        self.producer.finish(Commit(len(data) // UNIT, len(data) // UNIT))

    def _export(self, first: int, count: int, _: memoryview) -> memoryview:
        self.num_exports += 1
        self.may_export.wait()
        if self.error is not None:
            raise self.error
        return memoryview(self.data)[first * UNIT : (first + count) * UNIT]

    def runs(self, _: Fetch, call: FetchCall) -> FrameBatches:
        ours = self.transport
        return self.producer.frame_batches(
            call.key,
            first_unit=call.first_unit,
            transport=ours if call.transport == ours.name else None,
            invitation=call.invitation,
            large=True,
        )

    async def held(self, threads: ThreadPoolExecutor) -> asyncio.Task[None]:
        """Frames are being made ahead, and are not made before `may_export` is set."""
        self.may_export.clear()
        making = asyncio.create_task(self.producer.prebuild_frames(threads, self.transport))
        await until(lambda: self.num_exports == 1)
        return making

    def comes_back(self) -> bool:
        """Whether nothing of it is exposed, and all memory may be used again."""
        account = self.transport.account
        return (self.producer.exposed_bytes, account.used, account.abandoned) == (0, 0, 0)


@dataclasses.dataclass
class Consumer:
    """Fetches by its own transport, over a link of its own."""

    port: int
    transport: Transport

    async def fetch(
        self,
        *,
        key: RequestKey = KEY,
        first_unit: int = 0,
        num_units: int = NUM_UNITS,
    ) -> bytes:
        """All units, in memory of our own."""
        buffer = np.empty((num_units - first_unit) * UNIT, np.uint8)
        transport = self.transport
        reader = FrameReader(
            dataclasses.replace(IDENTITY, key=key, pod_uid=None),
            unit_bytes=UNIT,
            first_unit=first_unit,
            end_unit=num_units,
            open_memory=lambda _, opening, size: transport.view(opening, size),
            into=DestinationBuffers([buffer.data]),
        )
        call = FetchCall(
            IDENTITY.name,
            IDENTITY.boot_id,
            IDENTITY.fingerprint,
            key,
            first_unit,
            transport.name,
            transport.invitation(),
        )
        async with (
            linked(self.port, timers=PRODUCTION) as link,
            aclosing(link.units(Fetch.EMBEDDING, call, reader)) as units,
        ):
            async for _ in units:
                pass
        assert reader.commit is not None
        return buffer.tobytes()


@contextlib.asynccontextmanager
async def meeting(producer: ProducerSide, theirs: Transport) -> AsyncIterator[Consumer]:
    """A producer, and somebody who may ask; in the end the lease is released."""
    async with listening(producer.runs, timers=PRODUCTION) as (_, port):
        yield Consumer(port, theirs)
    producer.producer.close()
    assert producer.comes_back()
    for transport in (producer.transport, theirs):
        transport.close()


class Damaging:
    """A transport that changes a bit of what its first exposure is given."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.num_exposed = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def expose(self, invitation: bytes, num_bytes: int) -> object:
        self.num_exposed += 1
        exposure = self.inner.expose(invitation, num_bytes)
        return exposure if self.num_exposed > 1 else _Damaged(exposure)


class _Damaged:
    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def buffer(self, position: int, num_bytes: int) -> None:
        return None

    def write(self, position: int, source: Regions) -> memoryview:
        changed = bytearray(b"".join(host_views(source)))
        changed[len(changed) // 2] ^= 1
        return self.inner.write(position, HostRegions([memoryview(changed)]))  # type: ignore[attr-defined, no-any-return]
