"""Clients of the workers that this one pulls from, and the leases that it holds there.

    async with peers.hold(source) as client:    renewed from here on, released at the end

One renewal a peer carries all leases held there. Whoever pulls learns from the producer itself that
a lease is gone: its stream ends with GoneError.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final

from vlm_worker.client import WorkerClient
from vlm_worker.errors import WorkerError
from vlm_worker.settings.timers import Timers
from vlm_worker.types import Source
from vlm_worker.wire.checks import MAX_IDS

logger = logging.getLogger(__name__)

MAX_IDLE_PEERS: Final = 32


class _Peer:
    """One producer: the client, what is held there (boot id, transfer id), and who renews it."""

    def __init__(self, address: str, timers: Timers) -> None:
        self.client = WorkerClient(address, timers=timers)
        self.held: Counter[tuple[bytes, str]] = Counter()
        self.renewing: asyncio.Task[None] | None = None


class Peers:
    """All producers that this worker knows. Owned by one event loop; `close` it."""

    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self._peers: dict[str, _Peer] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    async def close(self) -> None:
        """Stop renewing and close every connection."""
        tasks = [*self._tasks, *(p.renewing for p in self._peers.values() if p.renewing)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for peer in self._peers.values():
            await peer.client.close()
        self._peers.clear()

    @property
    def num_held(self) -> int:
        """Leases held at all peers."""
        return sum(len(peer.held) for peer in self._peers.values())

    @property
    def num_tasks(self) -> int:
        """Renewals and releases that run."""
        return len(self._tasks) + sum(peer.renewing is not None for peer in self._peers.values())

    @contextlib.asynccontextmanager
    async def hold(self, source: Source) -> AsyncIterator[WorkerClient]:
        """Keep the lease of a source while inside; release it at the end, whatever that is."""
        peer = self._peer(source.address)
        handle = (source.boot_id, source.transfer_id)
        peer.held[handle] += 1
        if peer.renewing is None:
            peer.renewing = asyncio.create_task(self._renew(peer))
        try:
            yield peer.client
        finally:
            peer.held[handle] -= 1
            if not peer.held[handle]:
                del peer.held[handle]
                self._run(_release(peer.client, *handle))

    def _peer(self, address: str) -> _Peer:
        peer = self._peers.pop(address, None) or _Peer(address, self._timers)
        self._peers[address] = peer  # the most recently used is last
        idle = [
            known
            for known, other in self._peers.items()
            if not other.held and other.renewing is None and other is not peer
        ]
        for known in idle[: max(0, len(idle) - MAX_IDLE_PEERS)]:
            self._run(self._peers.pop(known).client.close())
        return peer

    async def _renew(self, peer: _Peer) -> None:
        """Renew all that is held at a peer, until nothing is."""
        try:
            while peer.held:
                await asyncio.sleep(self._timers.renew)
                for boot_id in {boot_id for boot_id, _ in peer.held}:
                    held = [transfer for boot, transfer in peer.held if boot == boot_id]
                    for start in range(0, len(held), MAX_IDS):
                        batch = held[start : start + MAX_IDS]
                        await self._renew_life(peer.client, boot_id, batch)
        finally:
            peer.renewing = None

    async def _renew_life(self, client: WorkerClient, boot_id: bytes, held: list[str]) -> None:
        try:
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


async def _release(client: WorkerClient, boot_id: bytes, transfer_id: str) -> None:
    try:
        await client.release(boot_id, transfer_id)
    except WorkerError as error:
        # the lease ends by itself
        logger.info("lease not released", extra={"peer": client.address, "error": str(error)})
