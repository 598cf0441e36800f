"""Which pods stop accepting work, and when they may end.

fewer replicas wanted ─▶ choose victims ─▶ accepting=False ─▶ /stats reports inflight 0, or timeout
                                            ─▶ set the deletion cost, lower replicas by these pods

The readiness gate of the pod and its last transition time hold the state of a drain, so that it
survives a restart of the operator. A pod whose containers are not ready has no work and ends
without a drain. Pods without a node are chosen first, so that a scale-down cancels pending pods.
The autoscaler chooses the variant that shrinks, by cost. Of equal pods of one variant, the oldest
is chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from vlm_operator.state import DeploymentState, PodState, Sample

# Time for gateways to see the closed gate in their watch. After it, /stats counts every request
# that a gateway sent to the pod before it saw the gate.
SETTLE_SECONDS = 2.0
VICTIM_COST = -1000


@dataclasses.dataclass(frozen=True)
class PodPatch:
    """A patch of one pod; None leaves a field unchanged.

    Attributes:
        accepting: value of the readiness gate.
        cost: value of the deletion cost annotation; 0 removes the annotation.
        reason: reason of the readiness gate's condition.
    """

    pod: str
    uid: str
    accepting: bool | None
    cost: int | None
    reason: str


@dataclasses.dataclass(frozen=True)
class DrainPlan:
    """The replicas of one Deployment in this turn, and the patches of its pods.

    Attributes:
        replicas: value to write to the Deployment.
        draining: names of the pods that still drain.
    """

    replicas: int
    pod_patches: tuple[PodPatch, ...]
    draining: tuple[str, ...]


def plan_drain(
    deployment: DeploymentState,
    pods: Iterable[PodState],
    samples: Mapping[str, Sample],
    *,
    want: int,
    timeout: float,
    at_once: int,
    now: float,
) -> DrainPlan:
    """Lower a Deployment's replicas by the number of its drained pods.

    `want` are the replicas after all drains. At most `at_once` pods drain at the same time. After
    `timeout` seconds, a pod counts as drained even if requests are in flight.
    """
    alive = _kept(pods, deployment.desired)
    excess = deployment.desired - want
    victims = _victims(alive, samples, max(0, excess), at_once=at_once)
    gone = [pod for pod in victims if _drained(pod, samples.get(pod.uid), timeout, now)]
    leaving = {pod.uid for pod in gone}
    pod_patches = [_pod_patch(pod, pod in victims, cost=pod.uid in leaving) for pod in alive]
    # pods that the controller has not created yet need no drain
    missing = max(0, deployment.desired - len(alive))
    lowered = deployment.desired - min(max(0, excess), len(gone) + missing)
    busy = tuple(pod.name for pod in victims if pod.uid not in leaving)
    return DrainPlan(
        replicas=max(want, lowered),
        pod_patches=tuple(patch for patch in pod_patches if patch is not None),
        draining=busy,
    )


def _kept(pods: Iterable[PodState], desired: int) -> list[PodState]:
    """Return the live pods without those that a lowered `desired` removes already.

    Until the ReplicaSet controller deletes such a pod, it looks like a drained one. If it counted
    again, the Deployment would shrink by a pod that has not drained. If it were patched again, it
    would accept work again.
    """
    alive = [pod for pod in pods if not pod.deleting and not pod.finished]
    marked = [pod for pod in alive if pod.deletion_cost == VICTIM_COST]
    given_up = {pod.uid for pod in marked[: max(0, len(alive) - desired)]}
    return [pod for pod in alive if pod.uid not in given_up]


def _victims(
    alive: Sequence[PodState], samples: Mapping[str, Sample], excess: int, *, at_once: int
) -> list[PodState]:
    """Choose the pods to end.

    The order is: pods without a node, pods without ready containers, pods that drain already, then
    least remaining work. At most `at_once` pods with ready containers are returned.
    """

    def order(pod: PodState) -> tuple[bool, bool, bool, float, int, float]:
        sample = samples.get(pod.uid)
        return (
            pod.scheduled,
            pod.containers_ready,
            pod.accepting is not False,
            float("inf") if sample is None else work_left(sample),
            0 if sample is None else sample.inflight,
            pod.created,
        )

    chosen = sorted(alive, key=order)[:excess]
    idle = [pod for pod in chosen if not pod.containers_ready]
    busy = [pod for pod in chosen if pod.containers_ready]
    return idle + busy[:at_once]


def work_left(sample: Sample) -> float:
    """Return a pod's remaining work, comparable only within one role.

    It is the sum of running, reserved and queued KV tokens plus the queued work in seconds.
    """
    kv = sample.kv
    tokens = 0 if kv is None else kv.running + kv.reserved + kv.queued
    return tokens + sample.queued_work_seconds


def _drained(pod: PodState, sample: Sample | None, timeout: float, now: float) -> bool:
    if not pod.containers_ready:
        return True
    if pod.accepting is not False or pod.gate_since is None:
        return False
    waited = now - pod.gate_since
    if waited >= timeout:
        return True
    return waited >= SETTLE_SECONDS and sample is not None and sample.inflight == 0


def _pod_patch(pod: PodState, victim: bool, *, cost: bool) -> PodPatch | None:
    """Return the patch that the pod needs, None if it needs none.

    A pod whose containers are not ready keeps its gate: it has no work to accept or to drain.
    """
    accepting = None
    if pod.containers_ready and pod.accepting is not (not victim):
        accepting = not victim
    price = VICTIM_COST if cost else 0
    changed = price if price != pod.deletion_cost else None
    if accepting is None and changed is None:
        return None
    reason = "Draining" if victim else "ContainersReady"
    return PodPatch(pod.name, pod.uid, accepting=accepting, cost=changed, reason=reason)
