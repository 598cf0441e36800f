"""Counts the replicas of a pool: current ones, those that are no capacity, and exhausted variants.

current ─┬─ pods that are ready, starting or pending            capacity
         └─ overdue: late, or tries an exhausted variant        no capacity
draining pods belong to earlier decisions: they are no capacity, but hold devices (`allocate`)
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from vlm_operator.api import ScalingMode
from vlm_operator.autoscale.estimate import Estimate
from vlm_operator.autoscale.history import Exhausted, ScalingHistory
from vlm_operator.autoscale.policy import PoolPolicy, ServicePolicy
from vlm_operator.autoscale.view import PodView, PoolView
from vlm_operator.names import MANAGER_AUTOSCALER, Role

LONGEST_BACKOFF = 5  # doublings of the time until the next try


@dataclasses.dataclass(frozen=True)
class PoolCapacity:
    """One pool's replicas and pods, by variant. Each variant of the policy has an entry.

    Attributes:
        current: replicas of the last decision.
        pending: pods without a node.
        unschedulable: pods that have been without a node for longer than their timeout.
        overdue: pods that are no capacity: unschedulable ones, those that start for longer than
            their timeout, and pending ones of an exhausted variant.
        exhausted: only variants that provided no ready pod in time.
    """

    current: Mapping[str, int]
    pending: Mapping[str, int]
    unschedulable: Mapping[str, int]
    overdue: Mapping[str, int]
    exhausted: Mapping[str, Exhausted]


def startup_seconds(service: ServicePolicy, role: Role, variant: str, estimate: Estimate) -> float:
    """Seconds until a new pod accepts work: as estimated; the constant if that is 0 or missing."""
    return estimate.startup.get((role, variant)) or service.constants.startup_seconds


def start_timeouts(
    service: ServicePolicy, role: Role, variant: str, estimate: Estimate
) -> tuple[float, float]:
    """Seconds after which a pod is late: without a node since its creation, and on its node.

    Without measured phases both are the timeout of a whole start-up.
    """
    constants = service.constants
    whole = constants.write_off * startup_seconds(service, role, variant, estimate)
    phases = estimate.phases.get((role, variant))
    if phases is None:
        return whole, whole
    unplaced = max(constants.pending_seconds, constants.write_off * phases.unplaced)
    return min(whole, unplaced), min(whole, constants.write_off * phases.loading)


def count_capacity(
    service: ServicePolicy,
    role: Role,
    pool: PoolView,
    estimate: Estimate,
    history: ScalingHistory,
    *,
    now: float,
) -> PoolCapacity:
    """Count a pool's replicas and pods, and update which of its variants are exhausted.

    A variant is exhausted if a pod of it is late and has never been ready. A pod that was ready
    before does not count: its process or its node failed, and the next pod may start. Each failure
    in a row doubles the wait. After it, one pod at a time tries the variant (`PoolContext.caps`).

    Only failures that a new pod would repeat count. A pod that does not become ready counts if new
    pods have its revision. A pod without a node counts if new pods have its placement.
    """
    current = _current(service.pools[role], pool, history)
    pending, unschedulable, overdue, exhausted = {}, {}, {}, {}
    for name, count in current.items():
        revision, placement = pool.revisions.get(name, ""), pool.placements.get(name, "")
        known = history.exhausted.get(name)
        if known is not None and not _same(known.scope, placement if known.nodes else revision):
            known = None
        without_node, on_node = start_timeouts(service, role, name, estimate)
        own = [pod for pod in pool.pods if pod.variant == name]
        waiting = [pod for pod in own if pod.phase == "pending"]
        lost = [pod for pod in waiting if now - pod.created >= without_node]
        starting = [pod for pod in own if pod.phase == "starting"]
        slow = [pod for pod in starting if now - _loading_since(pod) >= on_node]
        pending[name] = min(len(waiting), count)
        unschedulable[name] = min(len(lost), count)
        overdue[name] = min(len(lost if known is None else waiting) + len(slow), count)
        unplaced = [pod for pod in lost if not pod.served and _same(pod.placement, placement)]
        failing = [pod for pod in slow if not pod.served and _same(pod.revision, revision)]
        late = tuple(pod.uid for pod in (*unplaced, *failing) if count)
        if known is not None and any(_ends(pod, known) for pod in own):
            known = None
        if late and (known is None or known.until <= now):
            times = 1 if known is None else known.times + 1
            wait = service.constants.exhausted_seconds * 2 ** min(times - 1, LONGEST_BACKOFF)
            scope = placement if unplaced else revision
            known = Exhausted(now, now + wait, times, bool(unplaced), late, scope)
        if known is not None:
            exhausted[name] = known
    return PoolCapacity(current, pending, unschedulable, overdue, exhausted)


def _same(one: str, other: str) -> bool:
    """Whether two revisions or placements are equal; an unknown one ("") equals all."""
    return one == other or not (one and other)


def _ends(pod: PodView, known: Exhausted) -> bool:
    """Whether a pod shows that its variant provides pods or nodes again."""
    if pod.phase == "ready":
        became_ready = max(pod.ready_since or 0.0, pod.became_ready or 0.0)
        return pod.uid in known.late or became_ready > known.since
    return known.nodes and (pod.scheduled_since or 0.0) > known.since


def _loading_since(pod: PodView) -> float:
    """When a starting pod got its node, or stopped being ready."""
    if pod.served and pod.unready_since is not None:
        return pod.unready_since
    return pod.created if pod.scheduled_since is None else pod.scheduled_since


def _current(policy: PoolPolicy, pool: PoolView, history: ScalingHistory) -> dict[str, int]:
    """Split the pool's replicas over its variants: as last decided, else as Deployments have them.

    If neither has the right sum, the most expensive variants lose replicas and the cheapest get
    them. The total is VLMPool's number only in mode Auto without another writer. Another writer's
    number becomes current with the decision that follows it.
    """
    decided = {item.name: history.standing.get(item.name, 0) for item in policy.variants}
    own = policy.mode is ScalingMode.AUTO and pool.owner in (None, MANAGER_AUTOSCALER)
    if own and pool.replicas is not None:
        total = max(0, pool.replicas)
    else:
        total = sum(history.standing.values()) or sum(pool.live.values())
    if sum(decided.values()) == total == sum(history.standing.values()):
        return decided
    draining = Counter(pod.variant for pod in pool.of("draining"))
    live = {name: max(0, pool.live.get(name, 0) - draining[name]) for name in decided}
    found = live if any(live.values()) else decided
    by_cost = sorted(
        policy.variants,
        key=lambda item: (
            (item.cost_per_hour or 0.0) / max(item.speed, 1e-3),
            -item.preference,
            item.name,
        ),
    )
    missing = total - sum(found.values())
    for item in by_cost:
        most = total if item.max_replicas is None else item.max_replicas
        added = max(0, min(missing, most - found[item.name]))
        found[item.name] += added
        missing -= added
    for item in reversed(by_cost):
        removed = min(max(0, -missing), found[item.name])
        found[item.name] -= removed
        missing += removed
    if missing > 0 and by_cost:
        found[by_cost[0].name] += missing
    return found
