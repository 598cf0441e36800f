"""Writes the status of all VLMNodeClasses, and of VLMPools that no service controls.

ServiceReconciler ─ uses ─▶ NodeClassUsage ─▶ NodeClassReconciler.turn ─▶ status of the classes
                                                        └──▶ `changed`, if a class differs
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from vlm_operator import names
from vlm_operator.apply.pod_and_status_writes import write_status
from vlm_operator.cluster import NODE, VLM_NODE_CLASS, VLM_POOL, Cluster, Manifest
from vlm_operator.errors import ClusterError, UnavailableError
from vlm_operator.status.classes import ClassUse, Start, class_status, is_current, latest
from vlm_operator.status.refused import unowned_status

logger = logging.getLogger(__name__)


class NodeClassUsage:
    """Which services use which node class. Each service's loop writes the entry of its service."""

    def __init__(self) -> None:
        self._uses: dict[tuple[str, str], Mapping[str, ClassUse]] = {}
        self._starts: dict[str, tuple[Start, ...]] = {}

    def note(self, service: tuple[str, str], uses: Mapping[str, ClassUse]) -> None:
        self._uses[service] = uses
        for name, use in uses.items():
            self._starts[name] = latest((*self._starts.get(name, ()), *use.starts))

    def forget(self, service: tuple[str, str]) -> None:
        """Remove the entry of a deleted service; the start times of its pods stay."""
        self._uses.pop(service, None)

    def replicas(self, name: str) -> int:
        return sum(uses[name].replicas for uses in self._uses.values() if name in uses)

    def starts(self, name: str) -> tuple[Start, ...]:
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
                # one manager per operator: an apply removes only fields that its manager dropped
                manager = names.status_manager(self._operator)
                await write_status(self._cluster, item, wanted, manager=manager)


class PoolLoop:
    """Writes the condition of every VLMPool that no VLMService controls: it has no effect.

    The watch cache has all VLMPools regardless of labels, so a turn sends no read request.

    Args:
        cluster: cluster of the pools; the lease fences its writes.
        namespaces: watched namespaces; empty for all.
        clock: seconds since the epoch.
    """

    def __init__(
        self, cluster: Cluster, *, namespaces: Sequence[str], clock: Callable[[], float]
    ) -> None:
        self._cluster = cluster
        self._namespaces: Sequence[str | None] = tuple(namespaces) or (None,)
        self._clock = clock

    async def turn(self) -> None:
        """Write each status that differs; if one is refused, the others are still written.

        Raises:
            UnavailableError: the API server is unreachable.
            LeaseLostError: this process no longer leads.
        """
        for namespace in self._namespaces:
            for item in await self._cluster.list(VLM_POOL, namespace):
                wanted = unowned_status(item, now=self._clock())
                if wanted is None or wanted["conditions"] == item.get("status", {}).get(
                    "conditions"
                ):
                    continue
                try:
                    await write_status(self._cluster, item, wanted)
                except UnavailableError:
                    raise
                except ClusterError as error:
                    meta = item["metadata"]
                    pool = f"{meta['namespace']}/{meta['name']}"
                    logger.warning(
                        "status of VLMPool not written", extra={"pool": pool, "error": str(error)}
                    )
