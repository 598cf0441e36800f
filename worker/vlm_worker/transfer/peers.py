"""The workers that this one pulls from, and the leases that it holds there.

    async with peers.hold(source) as peer:      renewed from here on, released at the end
        peer.units(...)                         over a data connection, or over gRPC

One renewal a peer carries all leases held there. Whoever pulls learns from the producer itself that
a lease is gone: its stream ends with GoneError.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, Final

from vlm_worker.client import WorkerClient
from vlm_worker.core.sources import Sources
from vlm_worker.errors import WorkerError
from vlm_worker.settings.timers import Timers
from vlm_worker.transfer.data_link import DataLink, Threads, UnreachableError
from vlm_worker.transfer.incoming import checked
from vlm_worker.transfer.supervising import Supervisor
from vlm_worker.types import Source
from vlm_worker.wire.calls import FetchCall
from vlm_worker.wire.checks import MAX_IDS
from vlm_worker.wire.data import Fetch
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import Units

logger = logging.getLogger(__name__)

MAX_IDLE_PEERS: Final = 32


class Peer:
    """One producer: the ways to it, what is held there (boot id, transfer id), who renews it."""

    def __init__(self, address: str, threads: Threads, timers: Timers, sources: Sources) -> None:
        self.client = WorkerClient(address, timers=timers)
        self.held: Counter[tuple[bytes, str]] = Counter()
        self.renewing: asyncio.Task[None] | None = None
        self._data = DataLink(address, threads, timers)
        self._sources = sources
        self._met: bytes | None = None
        self._meeting = asyncio.Lock()

    async def meet(self, boot_id: bytes) -> None:
        """Have it say who it is before anything else is said to it; once for each of its lives.

        Raises:
            IncompatibleError: it is no worker of this service.
            GoneError: it is in another life.
            PeerLostError: nobody answers.
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

    async def close(self) -> None:
        """End all connections."""
        self._data.close()
        await self.client.close()

    async def units(
        self, fetch: Fetch, call: FetchCall, reader: FrameReader
    ) -> AsyncGenerator[Units]:
        """A transfer's units, whole and checked; the way to it is this peer's own business.

        Raises:
            PeerLostError: no frame in time, or the producer is gone.
            WorkerError: what the producer raised, or the reader.
        """
        await self.meet(call.boot_id)
        if self._data.is_usable:
            try:
                async with aclosing(self._data.units(fetch, call, reader)) as units:
                    async for some in units:
                        yield some
                return
            except UnreachableError as error:
                logger.warning("no data connection: over gRPC", extra={"error": str(error)})
        timers, address = self.client.timers, self.client.address
        frames = self.client.fetch(fetch, call, timeout=timers.fetch)
        seconds = timers.no_progress
        async with aclosing(
            checked(frames, reader, peer=address, no_progress_seconds=seconds)
        ) as units:
            async for some in units:
                yield some
        self._data.learn(self.client.data_port)


class Peers:
    """All producers that this worker knows. Owned by one event loop; `close` it.

    `sources` says which there may be.
    """

    def __init__(
        self, timers: Timers, sources: Sources, supervisor: Supervisor | None = None
    ) -> None:
        self._timers = timers
        self._sources = sources
        self._supervisor = supervisor or Supervisor()
        self._threads = Threads()
        self._peers: dict[str, Peer] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Stop renewing and close every connection."""
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
        """Leases held at all peers."""
        return sum(len(peer.held) for peer in self._peers.values())

    @property
    def num_tasks(self) -> int:
        """Renewals and releases that run."""
        return len(self._tasks) + sum(peer.renewing is not None for peer in self._peers.values())

    @contextlib.asynccontextmanager
    async def hold(self, source: Source) -> AsyncIterator[Peer]:
        """Keep the lease of a source while inside; release it at the end, whatever that is.

        Raises IncompatibleError where no worker of this service can be at its address.
        """
        self._sources.check_address(source.address)
        peer = self._peer(source.address)
        handle = (source.boot_id, source.transfer_id)
        peer.held[handle] += 1
        if peer.renewing is None:
            name = f"renew leases at {source.address}"
            peer.renewing = self._supervisor.start(self._renew(peer), name=name, may_end=True)
        try:
            yield peer
        finally:
            peer.held[handle] -= 1
            if not peer.held[handle]:
                del peer.held[handle]
                self._run(_release(peer, *handle))

    def _peer(self, address: str) -> Peer:
        peer = self._peers.pop(address, None)
        peer = peer or Peer(address, self._threads, self._timers, self._sources)
        self._peers[address] = peer  # the most recently used is last
        idle = [
            known
            for known, other in self._peers.items()
            if not other.held and other.renewing is None and other is not peer
        ]
        for known in idle[: max(0, len(idle) - MAX_IDLE_PEERS)]:
            self._run(self._peers.pop(known).close())
        return peer

    async def _renew(self, peer: Peer) -> None:
        """Renew all that is held at a peer, until nothing is."""
        try:
            while peer.held:
                await asyncio.sleep(self._timers.renew)
                for boot_id in {boot_id for boot_id, _ in peer.held}:
                    held = [transfer for boot, transfer in peer.held if boot == boot_id]
                    for start in range(0, len(held), MAX_IDS):
                        batch = held[start : start + MAX_IDS]
                        await self._renew_life(peer, boot_id, batch)
        finally:
            peer.renewing = None

    async def _renew_life(self, peer: Peer, boot_id: bytes, held: list[str]) -> None:
        client = peer.client
        try:
            await peer.meet(boot_id)
            gone = await client.renew(boot_id, held, timeout=self._timers.renew)
        except WorkerError as error:
            # the pull itself notices a dead producer; a lost renewal alone is no reason to give up
            logger.info("leases not renewed", extra={"peer": client.address, "error": str(error)})
            return
        if gone:
            logger.info("leases gone", extra={"peer": client.address, "transfers": sorted(gone)})

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _release(peer: Peer, boot_id: bytes, transfer_id: str) -> None:
    client = peer.client
    try:
        await peer.meet(boot_id)
        await client.release(boot_id, transfer_id)
    except WorkerError as error:
        # the lease ends by itself
        logger.info("lease not released", extra={"peer": client.address, "error": str(error)})
