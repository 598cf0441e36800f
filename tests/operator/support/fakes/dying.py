"""A cluster whose operator is killed at write k, for each k in turn.

DyingCluster   dies before or after one write, over any cluster, a real one too
Deaths         one run over a fake one that keeps every state in which a kill could have left it
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

from support.fakes.cluster import FakeCluster
from vlm_operator.cluster import Cluster, Kind, Manifest


class Died(BaseException):
    """The process is gone. No `except Exception` may go on from here."""


class WatchedWrites:
    """A `Cluster` that calls `before` and `after` with the number of each write, from 0 on.

    A dry run is no write.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.writes = 0

    def before(self, number: int) -> None:
        """A write is about to be sent."""

    def after(self, number: int) -> None:
        """A write was carried out, and its answer is about to be read."""

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
            self.before(self.writes)
        answer = await self._cluster.apply(
            manifest, manager=manager, subresource=subresource, dry_run=dry_run
        )
        if not dry_run:
            self._count()
        return answer

    async def merge(self, manifest: Manifest, *, manager: str) -> Manifest:
        """See `Cluster.merge`."""
        self.before(self.writes)
        answer = await self._cluster.merge(manifest, manager=manager)
        self._count()
        return answer

    async def metadata_if(
        self, kind: Kind, namespace: str, name: str, expected: Mapping[str, str]
    ) -> Manifest | None:
        """See `Cluster.metadata_if`."""
        return await self._cluster.metadata_if(kind, namespace, name, expected)

    async def create(self, manifest: Manifest) -> Manifest:
        """See `Cluster.create`."""
        self.before(self.writes)
        answer = await self._cluster.create(manifest)
        self._count()
        return answer

    async def replace(self, manifest: Manifest) -> Manifest:
        """See `Cluster.replace`."""
        self.before(self.writes)
        answer = await self._cluster.replace(manifest)
        self._count()
        return answer

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None) -> None:
        """See `Cluster.delete`."""
        self.before(self.writes)
        await self._cluster.delete(kind, namespace, name, uid=uid)
        self._count()

    def _count(self) -> None:
        self.writes += 1
        self.after(self.writes - 1)


class DyingCluster(WatchedWrites):
    """Counts writes and ends the operator at one of them.

    Args:
        cluster: where writes go.
        at: the write at which it dies, from 0; None never.
        committed: whether that write still reaches the cluster.
    """

    def __init__(self, cluster: Cluster, *, at: int | None, committed: bool = False) -> None:
        super().__init__(cluster)
        self._at = at
        self._committed = committed

    def before(self, number: int) -> None:
        """Die here, or let the write through."""
        if number == self._at and not self._committed:
            raise Died(f"before write {number}")

    def after(self, number: int) -> None:
        """Die here, or let the answer through."""
        if number == self._at:
            raise Died(f"after write {number}")


class Deaths(WatchedWrites):
    """Keeps what a kill before or after each write of one run would have left, and kills nobody.

    Attributes:
        left: copies of the cluster by what the death is called. Two deaths between which nothing
            happened are one.
    """

    def __init__(self, cluster: FakeCluster) -> None:
        super().__init__(cluster)
        self._fake = cluster
        self._kept = -1  # the version of the last copy
        self.left: dict[str, FakeCluster] = {}

    def before(self, number: int) -> None:
        """Keep what is there."""
        self._keep(f"before write {number}")

    def after(self, number: int) -> None:
        """Keep what is there now."""
        self._keep(f"after write {number}")

    def _keep(self, name: str) -> None:
        if self._fake.version != self._kept:
            self._kept = self._fake.version
            self.left[name] = copy.deepcopy(self._fake)
