"""A cluster that dies before or after write k: what a killed operator leaves behind."""

from __future__ import annotations

from collections.abc import Mapping

from vlm_operator.cluster import Cluster, Kind, Manifest


class Died(BaseException):
    """The process is gone. No `except Exception` may go on from here."""


class DyingCluster:
    """Counts writes and dies at one of them.

    Args:
        cluster: where writes go.
        at: the write at which it dies, from 0; None never.
        committed: whether that write still reaches the cluster.
    """

    def __init__(self, cluster: Cluster, *, at: int | None, committed: bool = False) -> None:
        self._cluster = cluster
        self._at = at
        self._committed = committed
        self.writes = 0

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        """See `Cluster.get`."""
        return await self._cluster.get(kind, namespace, name)

    async def list(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> list[Manifest]:
        """See `Cluster.list`."""
        return await self._cluster.list(kind, namespace, labels)

    async def apply(
        self, manifest: Manifest, *, manager: str, subresource: str = "", dry_run: bool = False
    ) -> Manifest:
        """See `Cluster.apply`."""
        if not dry_run:
            self._before()
        answer = await self._cluster.apply(
            manifest, manager=manager, subresource=subresource, dry_run=dry_run
        )
        if not dry_run:
            self._after()
        return answer

    async def merge(self, manifest: Manifest, *, manager: str) -> Manifest:
        """See `Cluster.merge`."""
        self._before()
        answer = await self._cluster.merge(manifest, manager=manager)
        self._after()
        return answer

    async def create(self, manifest: Manifest) -> Manifest:
        """See `Cluster.create`."""
        self._before()
        answer = await self._cluster.create(manifest)
        self._after()
        return answer

    async def replace(self, manifest: Manifest) -> Manifest:
        """See `Cluster.replace`."""
        self._before()
        answer = await self._cluster.replace(manifest)
        self._after()
        return answer

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None) -> None:
        """See `Cluster.delete`."""
        self._before()
        await self._cluster.delete(kind, namespace, name, uid=uid)
        self._after()

    def _before(self) -> None:
        if self.writes == self._at and not self._committed:
            raise Died(f"before write {self.writes}")

    def _after(self) -> None:
        self.writes += 1
        if self.writes - 1 == self._at:
            raise Died(f"after write {self.writes - 1}")
