"""The loop of all VLMNodeClasses: what they are told of their nodes and of the pods there.

each service's Loop ─ uses ─▶ ClassBook ─▶ ClassLoop.turn ─▶ status of the classes
                                                        └──▶ `changed`, when a class says otherwise
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vlm_operator import names
from vlm_operator.cluster import NODE, VLM_NODE_CLASS, Cluster, Manifest
from vlm_operator.metrics import WRITES
from vlm_operator.status import ClassUse, Start, class_status, is_told, latest


class ClassBook:
    """Who uses which class. Its writers are the loops of services, each of its own page."""

    def __init__(self) -> None:
        self._uses: dict[tuple[str, str], Mapping[str, ClassUse]] = {}
        self._starts: dict[str, tuple[Start, ...]] = {}

    def note(self, service: tuple[str, str], uses: Mapping[str, ClassUse]) -> None:
        """Replace what a service (namespace, name) does with classes."""
        self._uses[service] = uses
        for name, use in uses.items():
            self._starts[name] = latest((*self._starts.get(name, ()), *use.starts))

    def forget(self, service: tuple[str, str]) -> None:
        """Drop a service that is gone; how its pods started stays."""
        self._uses.pop(service, None)

    def replicas(self, name: str) -> int:
        """Pods of all services that run on a class's nodes."""
        return sum(uses[name].replicas for uses in self._uses.values() if name in uses)

    def starts(self, name: str) -> tuple[Start, ...]:
        """The latest starts on a class's nodes."""
        return self._starts.get(name, ())


class ClassLoop:
    """Keeps the status of every VLMNodeClass.

    Args:
        cluster: where they are, fenced by the lease.
        book: what the services' loops noted.
        clock: seconds since the epoch.
        changed: called when a class came, went or says something else.
        operator: namespace and name of this operator's Lease: its entry, and its field manager.
    """

    def __init__(
        self,
        cluster: Cluster,
        book: ClassBook,
        *,
        clock: Callable[[], float],
        changed: Callable[[], None],
        operator: str = f"{names.OPERATOR_NAMESPACE}/{names.OPERATOR_LEASE}",
    ) -> None:
        self._cluster = cluster
        self._book = book
        self._clock = clock
        self._changed = changed
        self._operator = operator
        self._specs: dict[str, Manifest] | None = None

    async def turn(self) -> None:
        """Write each status that differs.

        Raises:
            ClusterError: the API server could not be reached.
            LeaseLostError: this process no longer leads.
        """
        classes = await self._cluster.list(VLM_NODE_CLASS)
        specs = {item["metadata"]["name"]: item.get("spec", {}) for item in classes}
        if self._specs is not None and specs != self._specs:
            self._changed()
        self._specs = specs
        nodes = await self._cluster.list(NODE) if classes else []
        for item in classes:
            name = item["metadata"]["name"]
            wanted = class_status(
                item,
                nodes,
                operator=self._operator,
                in_use=self._book.replicas(name),
                starts=self._book.starts(name),
                now=self._clock(),
            )
            if not is_told(item.get("status", {}), wanted, operator=self._operator):
                await self._write(item, wanted)

    async def _write(self, item: Manifest, status: Manifest) -> None:
        meta = item["metadata"]
        manifest = {
            "apiVersion": VLM_NODE_CLASS.api_version,
            "kind": VLM_NODE_CLASS.kind,
            "metadata": {"name": meta["name"], "uid": meta["uid"]},
            "status": status,
        }
        # one manager each: an apply takes out what its own manager no longer says, and no more
        manager = names.status_manager(self._operator)
        await self._cluster.apply(manifest, manager=manager, subresource="status")
        WRITES.labels(kind=VLM_NODE_CLASS.kind, verb="status").inc()
