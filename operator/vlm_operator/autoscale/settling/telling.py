"""A decision in the words that status, events and `vlm explain` show."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from vlm_operator.api import ScalingMode
from vlm_operator.autoscale.outcome import Decision
from vlm_operator.autoscale.reasons import Bound, Reason
from vlm_operator.autoscale.settling.couple import Share, unreadable
from vlm_operator.autoscale.settling.goal import Case, Goal
from vlm_operator.names import Role


def decision_of(case: Case, goal: Goal, share: Share, cases: Mapping[Role, Case]) -> Decision:
    """Put together what was decided and why."""
    variants, to = dict(share.variants), share.replicas
    reason, limit = _reason(case, goal, share), share.limited_by
    if share.wanted > share.replicas:
        limit = Bound.BUDGET
    message = _message(case, goal, share, reason, limit, cases)
    need = case.estimate.needs.get(case.role)
    return Decision(
        time=case.now,
        before=case.before,
        to=to,
        claim=_claim(case, goal, to),
        reason=reason.value,
        message=message,
        variants=variants,
        limited_by=None if limit is None else limit.value,
        candidates=() if need is None else need.candidates,
        recommendation=_recommendation(case),
        shares=_shares(case),
        cost_per_hour=_cost(case, variants),
        conflict=goal.conflict,
        held=goal.held,
        flapping=case.pace.damping > 1,
        capacity=capacity(case),
        warm_cost_per_hour=_warm_cost(case, variants),
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


def capacity(case: Case) -> str:
    """Which node types gave no node, "" where all did."""
    tried = {name: item for name, item in case.pace.exhausted.items() if case.now < item.until}
    return "; ".join(
        f"{case.role}: variant {name} {item.what}, not tried for "
        f"{math.ceil((item.until - case.now) / 60)} min"
        for name, item in sorted(tried.items())
    )


def _reason(case: Case, goal: Goal, share: Share) -> Reason:
    """The goal's reason, unless the other pools or the budget made something else of it."""
    to = share.replicas
    grows = goal.reason in (Reason.SCALE_UP, Reason.PANIC, Reason.WAKE)
    if share.wanted > to and to <= case.before:
        return Reason.WAITING_FOR_DEVICES
    if to < goal.least and to < case.before:
        return Reason.BOUNDS
    if to == case.before and share.variants != dict(case.stock.standing):
        return Reason.REPLACING
    if to > case.before and goal.most <= case.before:
        return Reason.SCALE_UP
    if grows and to <= case.before:
        return Reason.STEADY
    if goal.reason in (Reason.SCALE_DOWN, Reason.IDLE, Reason.CANCEL_PENDING) and to == case.before:
        return Reason.STABILIZING
    return goal.reason


def _message(
    case: Case,
    goal: Goal,
    share: Share,
    reason: Reason,
    limit: Bound | None,
    cases: Mapping[Role, Case],
) -> str:
    budget = case.service.budget
    parts = [goal.message]
    if limit is Bound.BUDGET_UNREADABLE:
        parts.append(f"no growth, the budget cannot be established: {unreadable(cases)}")
    elif limit is Bound.BUDGET and share.wanted > share.replicas:
        parts.append(f"{share.wanted} once pods that drain have given their devices back")
    elif limit is Bound.BUDGET:
        bounds = []
        if budget.accelerators is not None:
            bounds.append(f"{budget.accelerators} accelerators")
        if budget.cost_per_hour is not None:
            bounds.append(f"{budget.cost_per_hour:g} an hour")
        parts.append(f"the budget of {' and '.join(bounds)} allows {share.replicas}")
    elif limit is Bound.COUPLING:
        parts.append("the ratio to another pool decides")
    elif limit is Bound.CAPACITY:
        parts.append("no variant has room for more")
    if reason is Reason.REPLACING:
        parts.append("another node type takes the place of one that gave no node")
    return "; ".join(parts)


def _claim(case: Case, goal: Goal, to: int) -> int | None:
    """What VLMPool should say: the wish of the owner, not what a budget made of it."""
    if case.pool.replicas is None:
        return to
    if not goal.claim:
        return None
    return case.policy.replicas if case.policy.mode is ScalingMode.MANUAL else to


def _recommendation(case: Case) -> int | None:
    """What the need alone asks for, in replicas of the mix that stands."""
    need = case.need
    if need is None or case.policy.mode is not ScalingMode.AUTO:
        return None
    mean = sum(case.speeds.values()) / max(len(case.speeds), 1)
    if case.before:
        standing = case.stock.standing
        mean = sum(case.speeds[name] * count for name, count in standing.items()) / case.before
    wanted = math.ceil(min(need.units, 1e6) / max(mean, 1e-3) - 1e-6)
    return min(max(wanted, case.policy.minimum), case.policy.maximum)


def _shares(case: Case) -> dict[str, float]:
    """Of each stage in missed TTFT: of the modality that exceeds its target by most."""
    found = [item for item in case.estimate.attributions if item.shares]
    if not found:
        return {}
    worst = max(found, key=lambda item: (item.overrun_seconds, item.missed, item.count))
    return dict(worst.shares)


def _cost(case: Case, variants: Mapping[str, int]) -> float | None:
    costs = {item.name: item.cost_per_hour for item in case.policy.variants}
    if any(costs[name] is None for name, count in variants.items() if count):
        return None
    return sum((costs[name] or 0.0) * count for name, count in variants.items())


def _warm_cost(case: Case, variants: Mapping[str, int]) -> float | None:
    """Of the units that are held for growth, at what a unit of the mix costs."""
    need, cost = case.need, _cost(case, variants)
    units = sum(case.speeds[name] * count for name, count in variants.items())
    if need is None or cost is None or not units or need.warm_units <= 0:
        return None
    return cost * min(1.0, need.warm_units / units)
