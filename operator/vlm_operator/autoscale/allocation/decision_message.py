"""A decision in the words that status, events and `vlm why` show."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from vlm_operator.api import ScalingMode
from vlm_operator.autoscale.allocation.allocate import Allocation, unreadable
from vlm_operator.autoscale.allocation.bounds import PoolContext, ReplicaBounds
from vlm_operator.autoscale.outcome import Bound, Decision, Reason
from vlm_operator.names import Role


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
