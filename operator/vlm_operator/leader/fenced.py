"""Starts writes only if the lease leaves time for them, and limits concurrent requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from vlm_operator.cluster import Cluster, Kind, Manifest
from vlm_operator.leader.lease import Lease

AT_ONCE = 16  # concurrent requests; more do not raise an API server's throughput


class Fenced:
    """A `Cluster` that limits concurrent requests, and writes only if the lease leaves time.

    A request's timeout and its check of the lease start after it passes the limit. So if hundreds
    of loops wake together, their requests wait here without timing out.

    Args:
        cluster: client for the requests. Renewals of the lease use another one and do not wait.
        lease: this process's lease.
        at_once: limit of concurrent requests.
    """

    def __init__(self, cluster: Cluster, lease: Lease, *, at_once: int = AT_ONCE) -> None:
        self._cluster = cluster
        self._lease = lease
        self._gate = asyncio.Semaphore(at_once)

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        """See `Cluster.get`."""
        async with self._gate:
            return await self._cluster.get(kind, namespace, name)

    async def list(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> list[Manifest]:
        """See `Cluster.list`."""
        async with self._gate:
            return await self._cluster.list(kind, namespace, labels)

    async def apply(
        self, manifest: Manifest, *, manager: str, subresource: str = "", dry_run: bool = False
    ) -> Manifest:
        """See `Cluster.apply`.

        Raises:
            LeaseLostError: the lease leaves too little time; nothing is written.
        """
        async with self._gate:
            self._lease.check()
            return await self._cluster.apply(
                manifest, manager=manager, subresource=subresource, dry_run=dry_run
            )

    async def merge(self, manifest: Manifest, *, manager: str) -> Manifest:
        """See `Cluster.merge`; fenced."""
        async with self._gate:
            self._lease.check()
            return await self._cluster.merge(manifest, manager=manager)

    async def create(self, manifest: Manifest) -> Manifest:
        """See `Cluster.create`; fenced."""
        async with self._gate:
            self._lease.check()
            return await self._cluster.create(manifest)

    async def replace(self, manifest: Manifest) -> Manifest:
        """See `Cluster.replace`; fenced."""
        async with self._gate:
            self._lease.check()
            return await self._cluster.replace(manifest)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None) -> None:
        """See `Cluster.delete`; fenced."""
        async with self._gate:
            self._lease.check()
            await self._cluster.delete(kind, namespace, name, uid=uid)
