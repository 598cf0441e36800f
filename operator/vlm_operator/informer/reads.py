"""The `Cluster` whose lists come from memory. Single objects and all writes go to the API server.

Whoever lists after a write sees that write: its answer is taken in before it is handed on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vlm_operator import names
from vlm_operator.cluster import Cluster, Kind, Manifest, kind_of
from vlm_operator.informer.follow import Informer


class Informed:
    """See `cluster.Cluster`.

    Args:
        cluster: where everything else goes.
        informers: by what they follow: a kind, and a namespace or None for all.
    """

    def __init__(
        self, cluster: Cluster, informers: Mapping[tuple[Kind, str | None], Informer]
    ) -> None:
        self._cluster = cluster
        self._informers = informers

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        """See `Cluster.get`; always as it is now."""
        return await self._cluster.get(kind, namespace, name)

    async def list(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> list[Manifest]:
        """See `Cluster.list`; from memory where the kind is followed there.

        A follower holds what carries a service's label: only such lists may be asked of it, or
        those of a kind that belongs to no service.
        """
        found = next(self._followers(kind, namespace), None)
        if found is None:
            return await self._cluster.list(kind, namespace, labels)
        labels = labels or {}
        assert names.LABEL_SERVICE in labels or not kind.namespaced
        return await found.list(namespace, labels)

    async def apply(
        self, manifest: Manifest, *, manager: str, subresource: str = "", dry_run: bool = False
    ) -> Manifest:
        """See `Cluster.apply`."""
        answer = await self._cluster.apply(
            manifest, manager=manager, subresource=subresource, dry_run=dry_run
        )
        return answer if dry_run else self._written(answer)

    async def merge(self, manifest: Manifest, *, manager: str) -> Manifest:
        """See `Cluster.merge`."""
        return self._written(await self._cluster.merge(manifest, manager=manager))

    async def create(self, manifest: Manifest) -> Manifest:
        """See `Cluster.create`."""
        return self._written(await self._cluster.create(manifest))

    async def replace(self, manifest: Manifest) -> Manifest:
        """See `Cluster.replace`."""
        return self._written(await self._cluster.replace(manifest))

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str | None) -> None:
        """See `Cluster.delete`."""
        await self._cluster.delete(kind, namespace, name, uid=uid)
        if uid is not None:
            for informer in self._followers(kind, namespace):
                informer.store.deleted(uid)

    def _written(self, answer: Manifest) -> Manifest:
        for informer in self._followers(kind_of(answer), answer["metadata"].get("namespace")):
            informer.store.written(answer)
        return answer

    def _followers(self, kind: Kind, namespace: str | None) -> Iterator[Informer]:
        places = {None, namespace if kind.namespaced else None}
        return (
            self._informers[kind, place] for place in places if (kind, place) in self._informers
        )
