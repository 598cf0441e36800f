"""Reconciles all VLMNodeClasses: writes the status of each from its nodes and pods.

ServiceReconciler ─ uses ─▶ NodeClassUsage ─▶ NodeClassReconciler.turn ─▶ status of the classes
                                                        └──▶ `changed`, if a class differs
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vlm_operator import names
from vlm_operator.cluster import NODE, VLM_NODE_CLASS, Cluster, Manifest
from vlm_operator.metrics import WRITES
from vlm_operator.status.classes import ClassUse, Start, class_status, is_current, latest


class NodeClassUsage:
    """Which services use which node class. Each service's loop writes the entry of its service."""

    def __init__(self) -> None:
        self._uses: dict[tuple[str, str], Mapping[str, ClassUse]] = {}
        self._starts: dict[str, tuple[Start, ...]] = {}

    def note(self, service: tuple[str, str], uses: Mapping[str, ClassUse]) -> None:
        """Replace the entry of a service (namespace, name)."""
        self._uses[service] = uses
        for name, use in uses.items():
            self._starts[name] = latest((*self._starts.get(name, ()), *use.starts))

    def forget(self, service: tuple[str, str]) -> None:
        """Remove the entry of a deleted service; the start times of its pods stay."""
        self._uses.pop(service, None)

    def replicas(self, name: str) -> int:
        """Return the number of pods of all services on a class's nodes."""
        return sum(uses[name].replicas for uses in self._uses.values() if name in uses)

    def starts(self, name: str) -> tuple[Start, ...]:
        """Return the latest pod starts on a class's nodes."""
        return self._starts.get(name, ())


class NodeClassReconciler:
    """Writes the status of every VLMNodeClass.

    Args:
        cluster: cluster of the classes; the lease fences its writes.
        book: usage that the services' loops recorded.
        clock: seconds since the epoch.
        changed: called if a class was created, was deleted or has another spec.
        operator: namespace and name of this operator's Lease. It names the operator's entry in
            `status.usage` and its field manager.
    """

    def __init__(
        self,
        cluster: Cluster,
        book: NodeClassUsage,
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
            ClusterError: the API server is unreachable or refuses a call.
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
            if not is_current(item.get("status", {}), wanted, operator=self._operator):
                await self._write(item, wanted)

    async def _write(self, item: Manifest, status: Manifest) -> None:
        meta = item["metadata"]
        manifest = {
            "apiVersion": VLM_NODE_CLASS.api_version,
            "kind": VLM_NODE_CLASS.kind,
            "metadata": {"name": meta["name"], "uid": meta["uid"]},
            "status": status,
        }
        # one field manager per operator: an apply removes only fields that its manager dropped
        manager = names.status_manager(self._operator)
        await self._cluster.apply(manifest, manager=manager, subresource="status")
        WRITES.labels(kind=VLM_NODE_CLASS.kind, verb="status").inc()
