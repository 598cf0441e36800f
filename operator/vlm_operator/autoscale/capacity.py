"""Counts a pool: decided replicas, pods that hold devices, pods that count as capacity.

decided 3   ready ■  starting ■  pending □   draining ■          (a drain of an earlier decision)
            └── capacity, unless it starts for too long ──┘       └── holds its devices, counts not
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from vlm_operator.api import ScalingMode
from vlm_operator.autoscale.constants import Constants
from vlm_operator.autoscale.estimate import Estimate
from vlm_operator.autoscale.history import Exhausted, ScalingHistory
from vlm_operator.autoscale.policy import PoolPolicy, VariantPolicy
from vlm_operator.autoscale.view import PodView, PoolView
from vlm_operator.names import MANAGER_AUTOSCALER, Role

LONGEST_BACKOFF = 5  # doublings of the time without another try


@dataclasses.dataclass(frozen=True)
class PoolCapacity:
    """One pool's replicas, by variant of its policy.

    Attributes:
        standing: decided replicas.
        pending: pods on no node.
        overdue: pods that are in their phase of a start for too long, or that try a node type which
            gave none lately: no capacity.
        never_ready: uids of those of them that have never been ready.
        stuck: those of them that are on no node.
        draining, active, live: draining pods, all others, and what Deployments ask for; these know
            variants that the policy has no longer, too.
    """

    standing: Mapping[str, int]
    pending: Mapping[str, int]
    overdue: Mapping[str, int]
    never_ready: Mapping[str, tuple[str, ...]]
    stuck: Mapping[str, int]
    draining: Mapping[str, int]
    active: Mapping[str, int]
    live: Mapping[str, int]

    @property
    def replicas(self) -> int:
        """All decided replicas."""
        return sum(self.standing.values())

    def held(self, target: Mapping[str, int]) -> dict[str, int]:
        """Replicas by variant that hold devices on the way to `target`, at the worst instant."""
        names = {*target, *self.draining, *self.active, *self.live}
        return {
            name: max(
                self.draining.get(name, 0) + max(target.get(name, 0), self.active.get(name, 0)),
                self.live.get(name, 0),
            )
            for name in sorted(names)
        }


def startup_seconds(
    role: Role, variant: VariantPolicy, estimate: Estimate, constants: Constants
) -> float:
    """Seconds until a new pod takes work: measured, else expected, else the general guess."""
    found = estimate.startup.get((role, variant.name), variant.startup_seconds)
    return found if found is not None and 0 < found < float("inf") else constants.startup_seconds


def unschedulable_timeout(
    role: Role, variant: VariantPolicy, estimate: Estimate, constants: Constants
) -> tuple[float, float]:
    """Seconds after which a pod is written off: since its creation without a node, then on it.

    Where no start has been timed by phase, either is given the time of a whole start.
    """
    whole = constants.write_off * startup_seconds(role, variant, estimate, constants)
    phases = estimate.phases.get((role, variant.name))
    if phases is None:
        return whole, whole
    unplaced = max(constants.pending_seconds, constants.write_off * phases.unplaced)
    return min(whole, unplaced), min(whole, constants.write_off * phases.loading)


def count_capacity(
    policy: PoolPolicy,
    pool: PoolView,
    pace: ScalingHistory,
    estimate: Estimate,
    constants: Constants,
    *,
    now: float,
) -> PoolCapacity:
    """Count a pool's replicas and pods."""
    waits = {
        item.name: unschedulable_timeout(policy.role, item, estimate, constants)
        for item in policy.variants
    }
    stuck = [
        pod
        for pod in pool.of("pending")
        if now - pod.created >= waits.get(pod.variant, (0.0, 0.0))[0]
    ]
    slow = [
        pod
        for pod in pool.of("starting")
        if now - _began(pod) >= waits.get(pod.variant, (0.0, 0.0))[1]
    ]
    # a type that gave no node is tried with one pod, which is no capacity until it has its node
    waiting = [pod for pod in pool.of("pending") if pod not in stuck]
    tried = [pod for pod in waiting if pod.variant in pace.exhausted]
    standing = _standing(policy, pool, pace)

    def within(pods: list[PodView]) -> dict[str, int]:
        counts = _count(pods)
        return {name: min(counts[name], standing[name]) for name in standing if counts[name]}

    return PoolCapacity(
        standing=standing,
        pending=within(list(pool.of("pending"))),
        overdue=within([*stuck, *slow, *tried]),
        never_ready={
            name: tuple(
                pod.uid for pod in (*stuck, *slow) if pod.variant == name and not pod.served
            )
            for name, count in standing.items()
            if count
        },
        stuck=within(stuck),
        draining=_count(list(pool.of("draining"))),
        active=_count([pod for pod in pool.pods if pod.phase != "draining"]),
        live={name: count for name, count in pool.live.items() if count > 0},
    )


def exhausted(
    policy: PoolPolicy,
    pool: PoolView,
    capacity: PoolCapacity,
    pace: ScalingHistory,
    constants: Constants,
    *,
    now: float,
) -> dict[str, Exhausted]:
    """Which node types are not tried now, as remembered and as pods show it.

    Each time in a row doubles the wait, after which one pod at a time tries the type
    (`PoolContext.caps`); it is remembered until one comes. A pod that has become ready since then
    ends it, and where nodes were lacking one that has got a node does. A pod that was ready
    before says nothing about its node type: its process or its node
    failed, and the next pod may well start.
    """
    found: dict[str, Exhausted] = {}
    for item in policy.variants:
        known = pace.exhausted.get(item.name)
        own = [pod for pod in pool.pods if pod.variant == item.name]
        if known is not None and any(_came(pod, known) for pod in own):
            known = None
        late = capacity.never_ready.get(item.name)
        if late and (known is None or known.until <= now):
            times = 1 if known is None else known.times + 1
            wait = constants.exhausted_seconds * 2 ** min(times - 1, LONGEST_BACKOFF)
            lacking = bool(capacity.stuck.get(item.name))
            known = Exhausted(since=now, until=now + wait, times=times, nodes=lacking, late=late)
        if known is not None:
            found[item.name] = known
    return found


def _came(pod: PodView, known: Exhausted) -> bool:
    """Whether a pod shows that its node type gives again what it did not give."""
    if pod.phase == "ready":
        became = max(pod.ready_since or 0.0, pod.became_ready or 0.0)
        return pod.uid in known.late or became > known.since
    return known.nodes and (pod.scheduled_since or 0.0) > known.since


def _began(pod: PodView) -> float:
    """When the start of a pod on a node began: on the node, or after it was last ready."""
    if pod.served and pod.unready_since is not None:
        return pod.unready_since
    return pod.created if pod.scheduled_since is None else pod.scheduled_since


def _standing(policy: PoolPolicy, pool: PoolView, pace: ScalingHistory) -> dict[str, int]:
    """Spread the number that stands over node types: as last decided, else as Deployments have it.

    Where neither adds up to it, the difference is taken from the dearest and given to the cheapest.
    A number that somebody else wrote does not stand before it was decided to follow it.
    """
    names = [item.name for item in policy.variants]
    ours = policy.mode is ScalingMode.AUTO and pool.owner in (None, MANAGER_AUTOSCALER)
    if ours and pool.replicas is not None:
        total = max(0, pool.replicas)
    else:
        total = sum(pace.standing.values()) or sum(pool.live.values())
    decided = {name: pace.standing.get(name, 0) for name in names}
    if sum(decided.values()) == total and sum(pace.standing.values()) == total:
        return decided
    gone = _count(list(pool.of("draining")))
    live = {name: max(0, pool.live.get(name, 0) - gone[name]) for name in names}
    found = live if sum(live.values()) else decided
    by_cost = sorted(policy.variants, key=lambda item: (_rate(item), -item.preference, item.name))
    missing = total - sum(found.values())
    for item in by_cost:
        room = item.max_replicas if item.max_replicas is not None else max(total, 0)
        added = max(0, min(missing, room - found[item.name]))
        found[item.name] += added
        missing -= added
    for item in reversed(by_cost):
        taken = min(max(0, -missing), found[item.name])
        found[item.name] -= taken
        missing += taken
    if missing > 0 and by_cost:
        found[by_cost[0].name] += missing
    return found


def _rate(item: VariantPolicy) -> float:
    return (item.cost_per_hour or 0.0) / max(item.speed, 1e-3)


def _count(pods: list[PodView]) -> Counter[str]:
    return Counter(pod.variant for pod in pods)
