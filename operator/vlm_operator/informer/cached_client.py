"""A `Cluster` whose lists come from memory; single objects and all writes use the API server.

A list after a write contains that write: the client puts the answer into the store before it
returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vlm_operator.cluster import Cluster, Kind, Manifest, kind_of
from vlm_operator.informer.reflector import Informer, label_of


class CachedClient:
    """See `cluster.Cluster`.

    Args:
        cluster: client of the API server, for all other calls.
        informers: informers by kind and namespace; None means all namespaces.
    """

    def __init__(
        self, cluster: Cluster, informers: Mapping[tuple[Kind, str | None], Informer]
    ) -> None:
        self._cluster = cluster
        self._informers = informers

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        """See `Cluster.get`; never from memory."""
        return await self._cluster.get(kind, namespace, name)

    async def list(
        self, kind: Kind, namespace: str | None = None, labels: Mapping[str, str] | None = None
    ) -> list[Manifest]:
        """See `Cluster.list`; from memory if an informer watches the kind there.

        An informer holds only objects with the label of its kind, so `labels` must contain it.
        """
        found = next(self._reflectors(kind, namespace), None)
        if found is None:
            return await self._cluster.list(kind, namespace, labels)
        labels = labels or {}
        assert label_of(kind) in ("", *labels)
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
            for informer in self._reflectors(kind, namespace):
                informer.store.deleted(uid)

    def _written(self, answer: Manifest) -> Manifest:
        for informer in self._reflectors(kind_of(answer), answer["metadata"].get("namespace")):
            informer.store.written(answer)
        return answer

    def _reflectors(self, kind: Kind, namespace: str | None) -> Iterator[Informer]:
        places = {None, namespace if kind.namespaced else None}
        return (
            self._informers[kind, place] for place in places if (kind, place) in self._informers
        )
