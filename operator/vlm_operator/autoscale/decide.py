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
from vlm_operator.autoscale.allocate import Allocation, allocate, unreadable
from vlm_operator.autoscale.bounds import PoolContext, ReplicaBounds
from vlm_operator.autoscale.capacity import count_capacity, exhausted
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
from vlm_operator.autoscale.ownership import external, manual, off
from vlm_operator.autoscale.pace import auto
from vlm_operator.autoscale.policy import PoolPolicy, ServicePolicy
from vlm_operator.autoscale.view import PoolView, View
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


_NOTHING = PoolView(replicas=None, owner=None, live={}, pods=())


def decide_replicas(
    policy: ServicePolicy, view: View, estimate: Estimate, memory: ScalingMemory
) -> tuple[dict[Role, Decision], ScalingMemory]:
    """Choose every pool's replicas.

    Args:
        policy: what the manifest says.
        view: what was seen.
        estimate: what each pool needs.
        memory: what the last call returned.

    Returns:
        A decision for every pool of the policy, and the memory for the next call.
    """
    memory = dataclasses.replace(memory, strained_at=_strained(policy, view, estimate, memory))
    contexts = {
        role: _case(policy, pool, view, estimate, memory) for role, pool in policy.pools.items()
    }
    lacking, given = _nodes_lacking(contexts), _nodes_given(contexts)
    contexts = {role: _told(context, lacking, given) for role, context in contexts.items()}
    bounds_by_role: dict[Role, ReplicaBounds] = {}
    paces: dict[Role, ScalingHistory] = {}
    for role, context in contexts.items():
        bounds_by_role[role], paces[role] = _replica_bounds(context)
    allocations = allocate(contexts, bounds_by_role)
    real, advice = bounds_by_role, allocations
    if policy.apply is AutoscalingPolicy.ADVISORY:
        real = {
            role: _unadvised(context, bounds_by_role[role]) for role, context in contexts.items()
        }
        allocations = allocate(contexts, real)
    decisions = {}
    for role, context in contexts.items():
        now = dataclasses.replace(context, pace=paces[role])
        decisions[role] = decision_of(now, real[role], allocations[role], contexts)
        if real[role] is not bounds_by_role[role]:
            told = decision_of(now, bounds_by_role[role], advice[role], contexts)
            decisions[role] = advised(decisions[role], told)
        paces[role] = _remember(now, decisions[role], memory.pools.get(role))
    return decisions, dataclasses.replace(memory, pools=paces)


def _nodes_lacking(contexts: Mapping[Role, PoolContext]) -> dict[str, Exhausted]:
    """Node classes that a pool has found at this tick to give no node."""
    return {
        item.node_class: known
        for context in contexts.values()
        for item in context.policy.variants
        if item.node_class is not None
        and (known := context.pace.exhausted.get(item.name)) is not None
        and known.nodes
        and known.since == context.now
    }


def _nodes_given(contexts: Mapping[Role, PoolContext]) -> dict[str, float]:
    """When a pod of any pool last got a node, by node class."""
    found: dict[str, float] = {}
    for context in contexts.values():
        classes = {item.name: item.node_class for item in context.policy.variants}
        for pod in context.pool.pods:
            name = classes.get(pod.variant)
            if name is not None and pod.scheduled_since is not None:
                found[name] = max(found.get(name, pod.scheduled_since), pod.scheduled_since)
    return found


def _told(
    context: PoolContext, lacking: Mapping[str, Exhausted], given: Mapping[str, float]
) -> PoolContext:
    """The same pool, which need not wait in vain for nodes that another pool did not get.

    What a pool knows from others alone (no pod of its own was late) ends when others get nodes.
    """
    known = dict(context.pace.exhausted)
    for item in context.policy.variants:
        name, own = item.node_class or "", known.get(item.name)
        if own is None and name in lacking:
            known[item.name] = dataclasses.replace(lacking[name], late=())
        elif own is not None and not own.late and given.get(name, own.since) > own.since:
            del known[item.name]
    if known == context.pace.exhausted:
        return context
    return dataclasses.replace(context, pace=dataclasses.replace(context.pace, exhausted=known))


def _strained(
    policy: ServicePolicy, view: View, estimate: Estimate, memory: ScalingMemory
) -> float | None:
    """When a target was last closer than shrinking allows."""
    constants = policy.constants
    close = any(
        item.count > 0 and item.attainable and item.exceeds(constants.ttft_margin)
        for item in estimate.attributions
    )
    itl = estimate.itl_p95_seconds
    if itl is not None and policy.itl_seconds is not None and math.isfinite(itl):
        close = close or itl > constants.itl_margin * policy.itl_seconds
    return view.now if close else memory.strained_at


def _case(
    service: ServicePolicy,
    policy: PoolPolicy,
    view: View,
    estimate: Estimate,
    memory: ScalingMemory,
) -> PoolContext:
    pool = view.pools.get(policy.role, _NOTHING)
    pace = memory.pools.get(policy.role)
    if pace is None:
        pace = ScalingHistory(since=view.now, mode=policy.mode)
    elif pace.mode is not policy.mode:
        # another owner knew nothing of windows: what stands is where a new one begins
        pace = dataclasses.replace(
            ScalingHistory(since=view.now, mode=policy.mode),
            standing=pace.standing,
            exhausted=pace.exhausted,
            decisions=pace.decisions,
            changes=pace.changes,
        )
    capacity = count_capacity(policy, pool, pace, estimate, service.constants, now=view.now)
    pace = dataclasses.replace(
        pace,
        changes=_carried_out(pace, capacity.replicas),
        exhausted=exhausted(policy, pool, capacity, pace, service.constants, now=view.now),
    )
    others = {**memory.pools, policy.role: pace}
    return PoolContext(
        service=service,
        policy=policy,
        view=view,
        pool=pool,
        estimate=estimate,
        capacity=capacity,
        pace=pace,
        memory=dataclasses.replace(memory, pools=others),
    )


def _replica_bounds(context: PoolContext) -> tuple[ReplicaBounds, ScalingHistory]:
    if context.policy.mode is ScalingMode.MANUAL:
        return manual(context), context.pace
    if context.policy.mode is ScalingMode.EXTERNAL:
        return external(context), context.pace
    if context.service.apply is AutoscalingPolicy.OFF:
        return off(context), context.pace
    return auto(context)


def _unadvised(context: PoolContext, bounds: ReplicaBounds) -> ReplicaBounds:
    """What a pool may become where advice is not followed."""
    return off(context) if context.policy.mode is ScalingMode.AUTO else bounds


def _carried_out(pace: ScalingHistory, before: int) -> tuple[Change, ...]:
    """The changes that the cluster has seen: one that it has not is decided anew."""
    if pace.changes and pace.changes[-1].before == before != pace.changes[-1].to:
        return pace.changes[:-1]
    return pace.changes


def _remember(
    context: PoolContext, decision: Decision, earlier: ScalingHistory | None
) -> ScalingHistory:
    """Note what was decided; the same decision again keeps the time of the first."""
    pace = dataclasses.replace(context.pace, standing=dict(decision.variants))
    if decision.before == decision.to:
        return pace
    known = earlier.changes if earlier is not None else ()
    change = Change(context.now, decision.before, decision.to)
    again = len(known) > len(context.pace.changes) and (known[-1].before, known[-1].to)
    if again == (change.before, change.to):
        return dataclasses.replace(pace, changes=known)
    oldest = context.now - KEPT_SECONDS
    recent = tuple(item for item in context.pace.changes if item.at > oldest)
    return dataclasses.replace(
        pace,
        changes=(*recent, change),
        decisions=(*pace.decisions, decision)[-KEPT_DECISIONS:],
    )


def decision_of(
    context: PoolContext,
    bounds: ReplicaBounds,
    allocation: Allocation,
    contexts: Mapping[Role, PoolContext],
) -> Decision:
    """Put together what was decided and why."""
    variants, to = dict(allocation.variants), allocation.replicas
    reason, limit = _reason(context, bounds, allocation), allocation.limited_by
    if allocation.wanted > allocation.replicas:
        limit = Bound.BUDGET
    message = _message(context, bounds, allocation, reason, limit, contexts)
    need = context.estimate.needs.get(context.role)
    return Decision(
        time=context.now,
        before=context.before,
        to=to,
        claim=_claim(context, bounds, to),
        reason=reason.value,
        message=message,
        variants=variants,
        limited_by=None if limit is None else limit.value,
        candidates=() if need is None else need.candidates,
        recommendation=_recommendation(context),
        shares=_shares(context),
        cost_per_hour=_cost(context, variants),
        conflict=bounds.conflict,
        held=bounds.held,
        capacity=capacity(context),
    )


def advised(real: Decision, advice: Decision) -> Decision:
    """What is done where advice is only given: the reasons are the advice's."""
    return dataclasses.replace(
        advice,
        to=real.to,
        claim=real.claim,
        variants=real.variants,
        cost_per_hour=real.cost_per_hour,
        recommendation=advice.to,
        message=f"Advisory, would be {advice.to}: {advice.message}",
    )


def capacity(context: PoolContext) -> str:
    """Which node types gave no node, "" where all did."""
    tried = {
        name: item for name, item in context.pace.exhausted.items() if context.now < item.until
    }
    return "; ".join(
        f"{context.role}: variant {name} {item.what}, not tried for "
        f"{math.ceil((item.until - context.now) / 60)} min"
        for name, item in sorted(tried.items())
    )


def _reason(context: PoolContext, bounds: ReplicaBounds, allocation: Allocation) -> Reason:
    """The goal's reason, unless the other pools or the budget made something else of it."""
    to = allocation.replicas
    grows = bounds.reason in (Reason.SCALE_UP, Reason.WAKE)
    if allocation.wanted > to and to <= context.before:
        return Reason.WAITING_FOR_DEVICES
    if to < bounds.least and to < context.before:
        return Reason.BOUNDS
    if to == context.before and allocation.variants != dict(context.capacity.standing):
        return Reason.REPLACING
    if to > context.before and bounds.most <= context.before:
        return Reason.SCALE_UP
    if grows and to <= context.before:
        return Reason.STEADY
    if bounds.reason in (Reason.SCALE_DOWN, Reason.IDLE) and to == context.before:
        return Reason.STABILIZING
    return bounds.reason


def _message(
    context: PoolContext,
    bounds: ReplicaBounds,
    allocation: Allocation,
    reason: Reason,
    limit: Bound | None,
    contexts: Mapping[Role, PoolContext],
) -> str:
    budget = context.service.budget
    parts = [bounds.message]
    if limit is Bound.BUDGET_UNREADABLE:
        parts.append(f"no growth, the budget cannot be established: {unreadable(contexts)}")
    elif limit is Bound.BUDGET and allocation.wanted > allocation.replicas:
        parts.append(f"{allocation.wanted} once pods that drain have given their devices back")
    elif limit is Bound.BUDGET:
        limits = []
        if budget.accelerators is not None:
            limits.append(f"{budget.accelerators} accelerators")
        if budget.cost_per_hour is not None:
            limits.append(f"{budget.cost_per_hour:g} an hour")
        parts.append(f"the budget of {' and '.join(limits)} allows {allocation.replicas}")
    elif limit is Bound.POOL_RATIO:
        parts.append("the ratio to another pool decides")
    elif limit is Bound.CAPACITY:
        parts.append("no variant has room for more")
    if reason is Reason.REPLACING:
        parts.append("another node type takes the place of one that gave no node")
    return "; ".join(parts)


def _claim(context: PoolContext, bounds: ReplicaBounds, to: int) -> int | None:
    """What VLMPool should say: the wish of the owner, not what a budget made of it."""
    if context.pool.replicas is None:
        return to
    if not bounds.claim:
        return None
    return context.policy.replicas if context.policy.mode is ScalingMode.MANUAL else to


def _recommendation(context: PoolContext) -> int | None:
    """What the need alone asks for, in replicas of the mix that stands."""
    need = context.need
    if need is None or context.policy.mode is not ScalingMode.AUTO:
        return None
    mean = sum(context.speeds.values()) / max(len(context.speeds), 1)
    if context.before:
        standing = context.capacity.standing
        mean = (
            sum(context.speeds[name] * count for name, count in standing.items()) / context.before
        )
    wanted = math.ceil(min(need.units, 1e6) / max(mean, 1e-3) - 1e-6)
    return min(max(wanted, context.policy.minimum), context.policy.maximum)


def _shares(context: PoolContext) -> dict[str, float]:
    """Of each stage in missed TTFT: of the modality that exceeds its target by most."""
    found = [item for item in context.estimate.attributions if item.shares]
    if not found:
        return {}
    worst = max(found, key=lambda item: (item.overrun_seconds, item.missed, item.count))
    return dict(worst.shares)


def _cost(context: PoolContext, variants: Mapping[str, int]) -> float | None:
    costs = {item.name: item.cost_per_hour for item in context.policy.variants}
    if any(costs[name] is None for name, count in variants.items() if count):
        return None
    return sum((costs[name] or 0.0) * count for name, count in variants.items())
