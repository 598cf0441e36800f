"""Which pods stop taking work, and when they may go.

fewer replicas wanted ─▶ choose victims ─▶ accepting=False ─▶ /stats says inflight 0, or deadline
                                                       ─▶ deletion cost, replicas lowered by these

The state of a drain is on the pod itself (its readiness gate and when that changed), so that it
survives the operator. A pod that is not ready has nothing to finish and goes at once: one without
a node first, so that scaling in cancels what is still pending. Which of a pool's variants shrinks
is decided before, by cost; of equal pods of one variant the oldest goes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from vlm_operator.state import DeploymentState, PodState, Sample

# Gateways see a closed gate through their watch; what they had already sent shows in /stats then.
SETTLE_SECONDS = 2.0
VICTIM_COST = -1000


@dataclasses.dataclass(frozen=True)
class Gate:
    """What to write onto one pod; None leaves as it is.

    Attributes:
        accepting: its readiness gate.
        cost: its deletion cost; 0 removes it.
    """

    pod: str
    uid: str
    accepting: bool | None
    cost: int | None
    reason: str


@dataclasses.dataclass(frozen=True)
class Settled:
    """What one Deployment may be scaled to in this turn, and what its pods are told."""

    replicas: int
    gates: tuple[Gate, ...]
    draining: tuple[str, ...]


def settle(
    deployment: DeploymentState,
    pods: Iterable[PodState],
    samples: Mapping[str, Sample],
    *,
    want: int,
    timeout: float,
    at_once: int,
    now: float,
) -> Settled:
    """Lower a Deployment no further than its drained pods allow.

    Args:
        deployment: as it is.
        pods: its pods.
        samples: their reports, by uid.
        want: replicas in the end.
        timeout: seconds that a pod may take to finish.
        at_once: how many may drain at the same time.
        now: seconds since the epoch.
    """
    alive = _kept(pods, deployment.desired)
    excess = deployment.desired - want
    victims = _victims(alive, samples, max(0, excess), at_once=at_once)
    gone = [pod for pod in victims if _drained(pod, samples.get(pod.uid), timeout, now)]
    leaving = {pod.uid for pod in gone}
    gates = [_gate(pod, pod in victims, cost=pod.uid in leaving) for pod in alive]
    # pods that the controller has not made yet are the cheapest to lose
    missing = max(0, deployment.desired - len(alive))
    lowered = deployment.desired - min(max(0, excess), len(gone) + missing)
    busy = tuple(pod.name for pod in victims if pod.uid not in leaving)
    return Settled(
        replicas=max(want, lowered),
        gates=tuple(gate for gate in gates if gate is not None),
        draining=busy,
    )


def _kept(pods: Iterable[PodState], desired: int) -> list[PodState]:
    """The pods that are there and stay: not those that a lower `desired` has given up already.

    Until the controllers end these they look like drained pods. Counted again, they would let the
    Deployment shrink by pods that have not drained; told anything, they would take work again.
    """
    alive = [pod for pod in pods if not pod.deleting and not pod.finished]
    marked = [pod for pod in alive if pod.deletion_cost == VICTIM_COST]
    given_up = {pod.uid for pod in marked[: max(0, len(alive) - desired)]}
    return [pod for pod in alive if pod.uid not in given_up]


def _victims(
    alive: Sequence[PodState], samples: Mapping[str, Sample], excess: int, *, at_once: int
) -> list[PodState]:
    """Choose who goes: first who has no node, then who never served, then the least work left."""

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
    """What a pod has yet to do, comparable within its role.

    KV tokens held, promised and awaited, plus the seconds of work in its queue.
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


def _gate(pod: PodState, victim: bool, *, cost: bool) -> Gate | None:
    """What the pod has to be told, None where it knows.

    A pod whose containers are not ready keeps the gate it has: there is nothing to open or drain.
    """
    accepting = None
    if pod.containers_ready and pod.accepting is not (not victim):
        accepting = not victim
    price = VICTIM_COST if cost else 0
    changed = price if price != pod.deletion_cost else None
    if accepting is None and changed is None:
        return None
    reason = "Draining" if victim else "ContainersReady"
    return Gate(pod.name, pod.uid, accepting=accepting, cost=changed, reason=reason)
