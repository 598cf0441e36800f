"""Deletes a service: its gateways drain first, then garbage collection deletes the other objects.

The operator deletes the gateway's Deployment first. Gateway pods accept no new request and exit
after their streams end; workers run meanwhile. Then the operator removes its finalizer, and
garbage collection deletes the rest. Each pod drains on SIGTERM.

The operator creates nothing during a deletion. So it also ends if something else deletes the
children: the deletion of the namespace, or a foreground deletion.

gateway pods ─ ended, past their timeout, or on a node that is not ready ─▶ drained
drained ─ no finalizer of others, or drain timeout + 60 s ─▶ finished: our finalizer is removed
                                                         └─ the last reason is DrainTimeout
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from vlm_operator import names
from vlm_operator.api import parse
from vlm_operator.api.gateway import GatewayDrain
from vlm_operator.cluster import DEPLOYMENT, NODE, Cluster, Manifest, epoch_seconds
from vlm_operator.errors import ClusterError, ConflictError, SpecError
from vlm_operator.metrics import WRITES
from vlm_operator.names import Role
from vlm_operator.pods.parts import GRACE_SECONDS
from vlm_operator.state import DeploymentState, Observed
from vlm_operator.status.causes import sentence
from vlm_operator.status.refused import deleting_status

OVERDUE_SECONDS = 60.0  # after the drain timeout; then a user must act
_MARGIN_SECONDS = 5.0
_COLLECTORS = ("foregroundDeletion", "orphan")  # garbage collection removes these


class Deletion:
    """State of a service that is being deleted, from one observation.

    Args:
        observed: the service and its pods.
        nodes: all nodes of the cluster.
    """

    def __init__(self, observed: Observed, nodes: Iterable[Manifest]) -> None:
        assert observed.service is not None
        self._observed = observed
        self._meta: Manifest = observed.service["metadata"]
        self._silent = frozenset(node["metadata"]["name"] for node in nodes if _is_silent(node))
        self._refusal = ""

    @property
    def overdue(self) -> bool:
        """Whether the drain timeout passed more than `OVERDUE_SECONDS` ago."""
        return self._observed.now >= self._due + OVERDUE_SECONDS

    @property
    def finished(self) -> bool:
        return self._drained and (self.overdue or not self.foreign)

    @property
    def foreign(self) -> tuple[str, ...]:
        """Finalizers of other controllers, which keep the object after ours is removed."""
        return tuple(item for item in self.others if item not in _COLLECTORS)

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(item for item in self._meta["finalizers"] if item != names.FINALIZER)

    async def stop_gateway(self, cluster: Cluster, *, namespace: str) -> None:
        """Delete the gateway's Deployments; `status` reports a refusal by the API server."""
        for live in self._observed.of_kind(DEPLOYMENT.kind):
            meta, state = live["metadata"], DeploymentState.of(live)
            if state is None or state.role is not Role.GATEWAY or state.deleting:
                continue
            try:
                await cluster.delete(DEPLOYMENT, namespace, meta["name"], uid=meta["uid"])
            except ConflictError:
                continue  # another object has the name now
            except ClusterError as error:
                cause = f"Deployment {meta['name']} cannot be deleted: {error.message}"
                self._refusal = sentence(cause, "correct what refuses it")
                continue
            WRITES.labels(kind=DEPLOYMENT.kind, verb="delete").inc()

    def status(self, previous: Manifest) -> Manifest:
        return deleting_status(
            self._message,
            previous,
            generation=int(self._meta["generation"]),
            now=self._observed.now,
            overdue=self.overdue,
        )

    @property
    def _message(self) -> str:
        if self._drained and self.foreign:
            cause = f"finalizers of others keep the object: {', '.join(self.foreign)}"
            return sentence(cause, "make their owners take them off, or remove them")
        if self._refusal:
            return self._refusal
        pods = self._observed.of(Role.GATEWAY)
        return f"{len(pods)} gateway pods finish the requests that they have"

    @property
    def _drained(self) -> bool:
        """Whether no gateway pod can finish a request, or drain timeout and grace period passed."""
        active = [pod for pod in self._observed.of(Role.GATEWAY) if pod.node not in self._silent]
        return not active or self._observed.now >= self._due + GRACE_SECONDS + _MARGIN_SECONDS

    @property
    def _due(self) -> float:
        """End of the drain timeout, in seconds since the epoch."""
        began = epoch_seconds(self._meta["deletionTimestamp"])
        try:
            assert self._observed.service is not None
            drain = parse(self._observed.service).spec.gateway.drain.timeout_seconds
        except SpecError:
            drain = GatewayDrain().timeout_seconds
        return began + drain


def _is_silent(node: Manifest) -> bool:
    """Whether the node's kubelet no longer reports, so that the end of its pods stays unknown.

    If the node is only partitioned, its gateways and workers still finish their requests. Each
    drains on SIGTERM, even if the service no longer exists.
    """
    conditions = node.get("status", {}).get("conditions", [])
    return any(item["type"] == "Ready" and item["status"] == "Unknown" for item in conditions)


async def gateway_nodes(cluster: Cluster, observed: Observed) -> list[Manifest]:
    """Return all nodes if a gateway pod has a node; empty if the nodes cannot be listed."""
    if any(pod.node for pod in observed.of(Role.GATEWAY)):
        with contextlib.suppress(ClusterError):
            return await cluster.list(NODE)
    return []
