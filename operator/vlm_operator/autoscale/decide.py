"""One tick of a service's autoscaler: estimates each pool's need, then decides its replicas. Pure.

policy, view, memory ─▶ estimate ─▶ capacity ─▶ bounds of each pool (ownership, pace)
                     ─▶ allocate ─▶ Outcome: decisions and the next memory
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from vlm_operator.api import ScalingMode
from vlm_operator.api.enums import AutoscalingPolicy
from vlm_operator.autoscale.allocate import Allocation, allocate
from vlm_operator.autoscale.bounds import PoolContext, ReplicaBounds
from vlm_operator.autoscale.capacity import count_capacity
from vlm_operator.autoscale.estimate import Estimate, EstimateMemory, estimate
from vlm_operator.autoscale.history import (
    KEPT_DECISIONS,
    KEPT_SECONDS,
    Change,
    Exhausted,
    ScalingHistory,
    ScalingMemory,
)
from vlm_operator.autoscale.outcome import Bound, Decision, Reason
from vlm_operator.autoscale.ownership import external, last_write, manual, off
from vlm_operator.autoscale.pace import auto
from vlm_operator.autoscale.policy import PoolPolicy, ServicePolicy
from vlm_operator.autoscale.sleep import Sleep, Verdict, decide_sleep
from vlm_operator.autoscale.view import View
from vlm_operator.names import Role


@dataclasses.dataclass(frozen=True)
class Memory:
    """State that one tick passes to the next.

    After `Memory()`, no pool shrinks until its scale-down window has passed.
    """

    estimate: EstimateMemory = dataclasses.field(default_factory=EstimateMemory)
    pace: ScalingMemory = dataclasses.field(default_factory=ScalingMemory)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The decisions of one tick, the estimate behind them, and the memory for the next tick."""

    decisions: Mapping[Role, Decision]
    estimate: Estimate
    memory: Memory


def decide(policy: ServicePolicy, view: View, memory: Memory) -> Outcome:
    """Choose the replicas of all pools of one service.

    Args:
        policy: settings from the manifest and its node classes.
        view: pods, their samples, and the current replicas.
        memory: the memory that the last call returned, `Memory()`, or the result of `memory.load`.
    """
    found, estimated = estimate(policy, view, memory.estimate)
    decisions, paced = decide_replicas(policy, view, found, memory.pace)
    return Outcome(decisions, found, Memory(estimated, paced))


def decide_replicas(
    policy: ServicePolicy, view: View, estimate: Estimate, memory: ScalingMemory
) -> tuple[dict[Role, Decision], ScalingMemory]:
    """Choose the replicas of all pools from an estimate of their needs.

    Returns:
        A decision for every pool of the policy, and the memory for the next call.
    """
    if _close_to_target(policy, estimate):
        memory = dataclasses.replace(memory, strained_at=view.now)
    sleep = decide_sleep(policy, view, memory.sleep)
    contexts = {role: _context(policy, role, view, estimate, memory) for role in policy.pools}
    bounds = {role: _bounds(item, sleep) for role, item in _share_exhausted(contexts).items()}
    decisions = _decisions(policy, bounds)
    if policy.apply is AutoscalingPolicy.ADVISORY:
        held = {
            role: off(item.context) if item.context.policy.mode is ScalingMode.AUTO else item
            for role, item in bounds.items()
        }
        for role, actual in _decisions(policy, held).items():
            advised = held[role] is not bounds[role]
            decisions[role] = _advisory(actual, decisions[role]) if advised else actual
    pools = {
        role: _remember(item.context, decisions[role], memory.pools.get(role))
        for role, item in bounds.items()
    }
    return decisions, dataclasses.replace(memory, pools=pools, sleep=sleep.memory)


def _close_to_target(policy: ServicePolicy, estimate: Estimate) -> bool:
    """Whether TTFT or ITL exceeds the share of its target that forbids to shrink."""
    constants, itl = policy.constants, estimate.itl_p95_seconds
    target = policy.itl_seconds
    if itl is not None and target is not None and constants.itl_margin * target < itl < math.inf:
        return True
    return any(
        item.count > 0 and item.attainable and item.exceeds(constants.ttft_margin)
        for item in estimate.attributions
    )


def _context(
    service: ServicePolicy, role: Role, view: View, estimate: Estimate, memory: ScalingMemory
) -> PoolContext:
    """Collect the inputs of one pool, with its history up to this tick."""
    policy, pool = service.pools[role], view.pools[role]
    history = memory.pools.get(role) or ScalingHistory(since=view.now, mode=policy.mode)
    if history.mode is not policy.mode:
        # the windows of the other mode do not count
        history = dataclasses.replace(
            history,
            since=view.now,
            mode=policy.mode,
            wants=(),
            over_since=None,
            idle_since=None,
            foreign=None,
        )
    capacity = count_capacity(service, role, pool, estimate, history, now=view.now)
    changes, before = history.changes, sum(capacity.current.values())
    if changes and changes[-1].before == before != changes[-1].to:
        changes = changes[:-1]  # the cluster does not have this change yet: it is decided again
    history = dataclasses.replace(history, changes=changes, exhausted=capacity.exhausted)
    return PoolContext(service, policy, view, pool, estimate, capacity, history, memory.strained_at)


def _share_exhausted(contexts: Mapping[Role, PoolContext]) -> dict[Role, PoolContext]:
    """Let pools with the same node class share what one of them found at this tick.

    If a pool did not get nodes, the variants of other pools with this class are exhausted, too.
    This state (`late` is empty) ends when a pod of any pool gets a node of the class.
    """
    lacking: dict[str, Exhausted] = {}
    provided: dict[str, float] = {}  # time at which a pod last got a node, by node class
    for context in contexts.values():
        for item in context.policy.variants:
            if item.node_class is None:
                continue
            known = context.history.exhausted.get(item.name)
            if known is not None and known.nodes and known.since == context.now:
                lacking[item.node_class] = known
            for pod in context.pool.pods:
                if pod.variant == item.name:
                    latest = provided.get(item.node_class, 0.0)
                    provided[item.node_class] = max(latest, pod.scheduled_since or 0.0)
    shared = {}
    for role, context in contexts.items():
        exhausted = dict(context.history.exhausted)
        for item in context.policy.variants:
            node_class, own = item.node_class or "", exhausted.get(item.name)
            if own is None and node_class in lacking:
                exhausted[item.name] = dataclasses.replace(lacking[node_class], late=(), scope="")
            elif own is not None and not own.late and provided.get(node_class, 0.0) > own.since:
                del exhausted[item.name]
        shared[role] = context.with_history(exhausted=exhausted)
    return shared


def _bounds(context: PoolContext, sleep: Sleep) -> ReplicaBounds:
    if sleep.verdict is not Verdict.AWAKE:
        return _of_whole_service(context, sleep)
    if context.policy.mode is ScalingMode.MANUAL:
        return manual(context)
    if context.policy.mode is ScalingMode.EXTERNAL:
        return external(context)
    if context.service.apply is AutoscalingPolicy.OFF:
        return off(context)
    return auto(context)


def _of_whole_service(context: PoolContext, sleep: Sleep) -> ReplicaBounds:
    """Bounds of a pool of a service that falls asleep, sleeps or wakes.

    Its windows start again when it is awake, and every variant may be tried again.
    """
    context = context.with_history(
        foreign=last_write(context), wants=(), over_since=None, idle_since=None, exhausted={}
    )
    if sleep.verdict is Verdict.SLEEP:
        return context.bounds(Reason.SCALED_TO_ZERO, sleep.message, replicas=0)
    count = max(1, context.policy.minimum)
    return context.bounds(Reason.WOKEN_BY_REQUEST, sleep.message, replicas=count)


def _decisions(policy: ServicePolicy, bounds: Mapping[Role, ReplicaBounds]) -> dict[Role, Decision]:
    allocations = allocate(policy, bounds)
    return {role: _decision(item, allocations[role]) for role, item in bounds.items()}


def _decision(bounds: ReplicaBounds, allocation: Allocation) -> Decision:
    context, to = bounds.context, allocation.replicas
    reason = _reason(bounds, allocation)
    limit = Bound.BUDGET if allocation.target > to else allocation.limited_by
    need = context.estimate.needs.get(context.policy.role)
    claim: int | None = to
    if context.pool.replicas is not None:
        # VLMPool gets the manifest's number, whatever the budget allows
        number = context.policy.replicas if context.policy.mode is ScalingMode.MANUAL else to
        claim = number if bounds.claim else None
    return Decision(
        time=context.now,
        before=context.before,
        to=to,
        claim=claim,
        reason=reason.value,
        message=_message(bounds, allocation, reason, limit),
        variants=dict(allocation.variants),
        limited_by=None if limit is None else limit.value,
        candidates=() if need is None else need.candidates,
        recommendation=_recommendation(context, reason),
        shares=_shares(context.estimate),
        cost_per_hour=_cost(context.policy, allocation.variants),
        conflict=bounds.conflict,
        held=bounds.held,
        capacity="; ".join(
            f"{context.policy.role}: variant {name} {item.what}, not tried for "
            f"{math.ceil((item.until - context.now) / 60)} min"
            for name, item in sorted(context.history.exhausted.items())
            if context.now < item.until
        ),
    )


def _reason(bounds: ReplicaBounds, allocation: Allocation) -> Reason:
    """The reason of the bounds, unless other pools, variants or the budget changed the result."""
    context, to = bounds.context, allocation.replicas
    before = context.before
    if allocation.target > to and to <= before:
        return Reason.WAITING_FOR_DEVICES
    if to < bounds.least and to < before:
        return Reason.BOUNDS
    if to == before and allocation.variants != context.current:
        return Reason.REPLACING
    if to > before and bounds.most <= before:
        return Reason.SCALE_UP  # for the sake of a ratio
    if to <= before and bounds.reason in (Reason.SCALE_UP, Reason.WAKE):
        return Reason.STEADY
    if to == before and bounds.reason in (Reason.SCALE_DOWN, Reason.IDLE):
        return Reason.STABILIZING
    return bounds.reason


def _message(
    bounds: ReplicaBounds, allocation: Allocation, reason: Reason, limit: Bound | None
) -> str:
    budget = bounds.context.service.budget
    parts = [bounds.message]
    if limit is Bound.BUDGET_UNREADABLE:
        parts.append(f"no growth, the budget cannot be computed: {budget.unreadable}")
    elif limit is Bound.BUDGET and allocation.target > allocation.replicas:
        parts.append(f"{allocation.target} when draining pods have released their devices")
    elif limit is Bound.BUDGET:
        limits = []
        if budget.accelerators is not None:
            limits.append(f"{budget.accelerators} accelerators")
        if budget.cost_per_hour is not None:
            limits.append(f"{budget.cost_per_hour:g} an hour")
        parts.append(f"the budget of {' and '.join(limits)} allows {allocation.replicas}")
    elif limit is Bound.POOL_RATIO:
        parts.append("spec.poolRatios decides")
    elif limit is Bound.CAPACITY:
        parts.append("every variant is exhausted or at its maxReplicas")
    if reason is Reason.REPLACING:
        parts.append("another variant replaces one that got no node")
    return "; ".join(parts)


def _recommendation(context: PoolContext, reason: Reason) -> int | None:
    """Replicas for the need alone, in the current mix, within minReplicas and maxReplicas."""
    need, speeds = context.need, context.speeds
    if need is None or context.policy.mode is not ScalingMode.AUTO:
        return None
    if reason is Reason.SCALED_TO_ZERO:
        return 0
    mean = sum(speeds.values()) / max(len(speeds), 1)
    if context.before:
        units = sum(speeds[name] * count for name, count in context.current.items())
        mean = units / context.before
    replicas = math.ceil(min(need.units, 1e6) / max(mean, 1e-3) - 1e-6)
    return min(max(replicas, context.policy.minimum), context.policy.maximum)


def _shares(estimate: Estimate) -> dict[str, float]:
    """Shares of the stages for the modality that exceeds its target by most."""
    found = [item for item in estimate.attributions if item.shares]
    worst = max(
        found, key=lambda item: (item.overrun_seconds, item.missed, item.count), default=None
    )
    return {} if worst is None else dict(worst.shares)


def _cost(policy: PoolPolicy, variants: Mapping[str, int]) -> float | None:
    """Cost per hour of these replicas; None if a cost is unknown."""
    costs = {item.name: item.cost_per_hour for item in policy.variants}
    if any(costs[name] is None for name, count in variants.items() if count):
        return None
    return sum((costs[name] or 0.0) * count for name, count in variants.items())


def _advisory(actual: Decision, advice: Decision) -> Decision:
    """The decision that is carried out, with the reasons of the one that is only shown."""
    return dataclasses.replace(
        advice,
        to=actual.to,
        claim=actual.claim,
        variants=actual.variants,
        cost_per_hour=actual.cost_per_hour,
        recommendation=advice.to,
        message=f"Advisory, would be {advice.to}: {advice.message}",
    )


def _remember(
    context: PoolContext, decision: Decision, earlier: ScalingHistory | None
) -> ScalingHistory:
    """Add a decision to the history. If it repeats the last change, the time of that is kept."""
    history = dataclasses.replace(context.history, standing=dict(decision.variants))
    if decision.before == decision.to:
        return history
    known = earlier.changes if earlier is not None else ()
    if known and (known[-1].before, known[-1].to) == (decision.before, decision.to):
        return dataclasses.replace(history, changes=known)
    oldest = context.now - KEPT_SECONDS
    recent = [item for item in history.changes if item.at > oldest]
    return dataclasses.replace(
        history,
        changes=(*recent, Change(context.now, decision.before, decision.to)),
        decisions=(*history.decisions, decision)[-KEPT_DECISIONS:],
    )
