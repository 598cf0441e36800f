"""The workers from which this one fetches, and the leases that it holds there.

    async with peers.hold(source) as peer:      renewed from here on, released at the end
        peer.pull(...).units()                  over a data connection, or over gRPC

One renewal call per peer covers all leases held there. If a lease is gone, the producer ends the
stream of a fetch with GoneError.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Final

from vlm_worker.annotations import MAX_IDS
from vlm_worker.client import WorkerClient
from vlm_worker.core.sources import Sources
from vlm_worker.errors import CorruptTransferError, Refusal, WorkerError
from vlm_worker.settings.timers import Timers
from vlm_worker.supervision import AtEnd, Supervisor
from vlm_worker.telemetry import REQUEST_ID
from vlm_worker.transfer.consumer import Pull, checked_units
from vlm_worker.transfer.data_connections import DataConnectionPool, FetchThreads, UnreachableError
from vlm_worker.transfer.transport import Transport
from vlm_worker.types import RequestKey, Source
from vlm_worker.wire.buffers import DestinationBuffers
from vlm_worker.wire.data_protocol import Fetch
from vlm_worker.wire.frame_reader import FrameReader, View
from vlm_worker.wire.frames import TransferId, Units
from vlm_worker.wire.identity_store import IdentityStore
from vlm_worker.wire.messages import FetchCall

logger = logging.getLogger(__name__)

MAX_IDLE_PEERS: Final = 32


class Peer:
    """One producer: its connections, and the leases (boot id, transfer id) held there."""

    def __init__(
        self,
        address: str,
        threads: FetchThreads,
        timers: Timers,
        sources: Sources,
        identity: IdentityStore | None = None,
    ) -> None:
        self.client = WorkerClient(address, timers=timers, identity=identity)
        self.held: Counter[tuple[bytes, str]] = Counter()
        self.renewing: asyncio.Task[None] | None = None
        self._data = DataConnectionPool(address, threads, timers, identity=identity)
        self._sources = sources
        self._met: bytes | None = None
        self._meeting = asyncio.Lock()

    async def meet(self, boot_id: bytes) -> None:
        """Verify its identity before any other call; once for each incarnation.

        Raises:
            IncompatibleError: it is not a worker of this service.
            GoneError: it is in another incarnation.
            PeerLostError: it does not answer.
        """
        async with self._meeting:
            if self._met == boot_id:
                return
            hello = await self.client.hello()
            self._sources.check_hello(
                self.client.address,
                model=hello.model,
                compat=hello.compat,
                boot_id=hello.boot_id,
                wanted=boot_id,
            )
            self._met = boot_id

    def pull(
        self,
        fetch: Fetch,
        source: Source,
        key: RequestKey,
        *,
        transport: Transport,
        on_refused: Callable[[Refusal], None],
        fingerprint: bytes,
        content: bytes,
        unit_bytes: int,
        first_unit: int,
        end_unit: int,
        into: DestinationBuffers | None = None,
    ) -> Pull:
        """Start a transfer of units `first_unit` to `end_unit`. No size comes from the producer.

        `content` identifies the expected data (`TransferId`).
        """
        call = FetchCall(
            transfer_id=source.transfer_id,
            boot_id=source.boot_id,
            fingerprint=fingerprint,
            key=key,
            first_unit=first_unit,
            transport=transport.name,
            invitation=transport.invitation(),
        )
        reader = FrameReader(
            TransferId(key, source.transfer_id, source.boot_id, fingerprint, content=content),
            unit_bytes=unit_bytes,
            first_unit=first_unit,
            end_unit=end_unit,
            open_memory=functools.partial(_open, transport) if call.invitation else None,
            into=into,
        )
        units = self.units(fetch, call, reader)
        return Pull(units, reader, peer=source.address, on_refused=on_refused)

    async def close(self) -> None:
        self._data.close()
        await self.client.close()

    async def units(
        self, fetch: Fetch, call: FetchCall, reader: FrameReader
    ) -> AsyncGenerator[Units]:
        """A transfer's validated units, over a data connection or gRPC."""
        await self.meet(call.boot_id)
        if self._data.is_usable:
            try:
                async with aclosing(self._data.units(fetch, call, reader)) as received:
                    async for units in received:
                        yield units
                return
            except UnreachableError as error:
                logger.warning("no data connection: over gRPC", extra={"error": str(error)})
        timers, address = self.client.timers, self.client.address
        frames = self.client.fetch(fetch, call, timeout=timers.fetch)
        over_grpc = checked_units(
            frames, reader, peer=address, no_progress_seconds=timers.no_progress
        )
        async with aclosing(over_grpc) as received:
            async for units in received:
                yield units
        self._data.learn(self.client.data_port, self.client.peer)


class Peers:
    """All producers that this worker knows. Belongs to one event loop; `close` it.

    `sources` limits their addresses.
    """

    def __init__(
        self,
        timers: Timers,
        sources: Sources,
        supervisor: Supervisor | None = None,
        *,
        identity: IdentityStore | None = None,
    ) -> None:
        self._identity = identity
        self._timers = timers
        self._sources = sources
        self._supervisor = supervisor or Supervisor()
        self._threads = FetchThreads()
        self._peers: dict[str, Peer] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        tasks = [*self._tasks, *(p.renewing for p in self._peers.values() if p.renewing)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in self._peers.values():
            await peer.close()
        self._peers.clear()
        self._threads.close()

    @property
    def num_held(self) -> int:
        return sum(len(peer.held) for peer in self._peers.values())

    @contextlib.asynccontextmanager
    async def hold(self, source: Source) -> AsyncIterator[Peer]:
        """Renew the lease of a source inside the context; release it at the end.

        Raises IncompatibleError if no worker of this service can have its address.
        """
        self._sources.check_address(source.address)
        peer = self._peer(source.address)
        handle = (source.boot_id, source.transfer_id)
        peer.held[handle] += 1
        if peer.renewing is None:
            name = f"renew leases at {source.address}"
            work = functools.partial(self._renew, peer)
            peer.renewing = self._supervisor.start(work, name=name, at_end=AtEnd.RETURN)
        try:
            yield peer
        finally:
            peer.held[handle] -= 1
            if not peer.held[handle]:
                del peer.held[handle]
                self._run(_release(peer, *handle))

    def _peer(self, address: str) -> Peer:
        peer = self._peers.pop(address, None)
        peer = peer or Peer(address, self._threads, self._timers, self._sources, self._identity)
        idle = [name for name, it in self._peers.items() if not it.held and it.renewing is None]
        self._peers[address] = peer  # the most recently used is last
        for name in idle[: max(0, len(idle) - MAX_IDLE_PEERS)]:
            self._run(self._peers.pop(name).close())
        return peer

    async def _renew(self, peer: Peer) -> None:
        """Renew all leases held at a peer, until none is left."""
        REQUEST_ID.set("")  # it outlives the request that started it
        try:
            while peer.held:
                await asyncio.sleep(self._timers.renew)
                for boot_id in {boot_id for boot_id, _ in peer.held}:
                    held = [transfer for boot, transfer in peer.held if boot == boot_id]
                    for start in range(0, len(held), MAX_IDS):
                        await self._renew_batch(peer, boot_id, held[start : start + MAX_IDS])
        finally:
            peer.renewing = None

    async def _renew_batch(self, peer: Peer, boot_id: bytes, held: list[str]) -> None:
        client = peer.client
        try:
            await peer.meet(boot_id)
            gone = await client.renew(boot_id, held, timeout=self._timers.renew)
        except WorkerError as error:
            # the fetch itself detects a dead producer; one lost renewal is no error
            logger.info("leases not renewed", extra={"peer": client.address, "error": str(error)})
            return
        if gone:
            logger.info("leases gone", extra={"peer": client.address, "transfers": sorted(gone)})

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _open(transport: Transport, name: str, opening: bytes, num_bytes: int) -> View:
    if name != transport.name:
        raise CorruptTransferError(
            f"{name!r} was opened, {transport.name} was asked for", refusal=Refusal.MEMORY
        )
    return transport.view(opening, num_bytes)


async def _release(peer: Peer, boot_id: bytes, transfer_id: str) -> None:
    client = peer.client
    try:
        await peer.meet(boot_id)
        await client.release(boot_id, transfer_id)
    except WorkerError as error:
        # the lease expires
        logger.info("lease not released", extra={"peer": client.address, "error": str(error)})
