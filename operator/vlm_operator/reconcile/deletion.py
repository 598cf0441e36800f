"""Letting a deleted service go: its gateways finish what they have, then everything else goes.

The gateway's Deployment is deleted first; its pods take no new request and end when their streams
have ended. Workers are still there meanwhile. Then the finalizer falls, and garbage collection
takes the rest, each pod draining itself on SIGTERM. Nothing is created on the way, so a namespace
that is being deleted and a foreground deletion, which delete the children themselves, end alike.
"""

from __future__ import annotations

from vlm_operator.api import parse
from vlm_operator.api.gateway import GatewayDrain
from vlm_operator.cluster import DEPLOYMENT, Cluster, Manifest
from vlm_operator.errors import SpecError
from vlm_operator.metrics import WRITES
from vlm_operator.names import Role
from vlm_operator.observe import seconds
from vlm_operator.pods.parts import GRACE_SECONDS
from vlm_operator.state import DeploymentState, Observed
from vlm_operator.status import deleting_status

_MARGIN_SECONDS = 5.0


class Deletion:
    """One look at a service that is being deleted."""

    def __init__(self, observed: Observed) -> None:
        assert observed.service is not None
        self._observed = observed
        self._meta: Manifest = observed.service["metadata"]
        self._name = str(self._meta["name"])

    @property
    def finished(self) -> bool:
        """No gateway pod is left, or they had their time."""
        left = [pod for pod in self._observed.of(Role.GATEWAY) if not pod.finished]
        return not left or self._observed.now >= self._deadline

    @property
    def _deadline(self) -> float:
        began = seconds(self._meta["deletionTimestamp"])
        try:
            assert self._observed.service is not None
            drain = parse(self._observed.service).spec.gateway.drain.timeout_seconds
        except SpecError:
            drain = GatewayDrain().timeout_seconds
        return began + drain + GRACE_SECONDS + _MARGIN_SECONDS

    async def stop_gateway(self, cluster: Cluster, *, namespace: str) -> None:
        """Delete the gateway's Deployments that are still wanted."""
        for live in self._observed.of_kind(DEPLOYMENT.kind):
            meta, state = live["metadata"], DeploymentState.of(live)
            if state is None or state.role is not Role.GATEWAY or state.deleting:
                continue
            await cluster.delete(DEPLOYMENT, namespace, meta["name"], uid=meta["uid"])
            WRITES.labels(kind=DEPLOYMENT.kind, verb="delete").inc()

    def status(self, previous: Manifest) -> Manifest:
        """The last status, saying what is waited for."""
        pods = self._observed.of(Role.GATEWAY)
        message = f"{len(pods)} gateway pods finish the requests that they have"
        generation = int(self._meta["generation"])
        return deleting_status(message, previous, generation=generation, now=self._observed.now)
