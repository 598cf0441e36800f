"""From what pools need to how many replicas they get: goals one by one, then all together.

view ─▶ stock ─▶ goal of each pool (ownership, pace) ─▶ couple ─▶ decisions
"""

from __future__ import annotations

import dataclasses
import math

from vlm_operator.api import ScalingMode
from vlm_operator.api.enums import AutoscalingPolicy
from vlm_operator.autoscale.estimating.estimate import Estimate
from vlm_operator.autoscale.outcome import Decision
from vlm_operator.autoscale.policy import PoolPolicy, ServicePolicy
from vlm_operator.autoscale.settling import flaps
from vlm_operator.autoscale.settling.couple import couple
from vlm_operator.autoscale.settling.goal import Case, Goal
from vlm_operator.autoscale.settling.ownership import external, manual, off
from vlm_operator.autoscale.settling.pace import auto
from vlm_operator.autoscale.settling.paced import KEPT_DECISIONS, Change, PaceMemory, PoolPace
from vlm_operator.autoscale.settling.stock import exhausted, take_stock
from vlm_operator.autoscale.settling.telling import advised, decision_of
from vlm_operator.autoscale.view import PoolView, View
from vlm_operator.names import Role

_NOTHING = PoolView(replicas=None, owner=None, live={}, pods=())


def settle(
    policy: ServicePolicy, view: View, estimate: Estimate, memory: PaceMemory
) -> tuple[dict[Role, Decision], PaceMemory]:
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
    cases = {
        role: _case(policy, pool, view, estimate, memory) for role, pool in policy.pools.items()
    }
    goals: dict[Role, Goal] = {}
    paces: dict[Role, PoolPace] = {}
    for role, case in cases.items():
        goals[role], paces[role] = _goal(case)
    shares = couple(cases, goals)
    real, advice = goals, shares
    if policy.apply is AutoscalingPolicy.ADVISORY:
        real = {role: _unadvised(case, goals[role]) for role, case in cases.items()}
        shares = couple(cases, real)
    decisions = {}
    for role, case in cases.items():
        now = dataclasses.replace(case, pace=paces[role])
        decisions[role] = decision_of(now, real[role], shares[role], cases)
        if real[role] is not goals[role]:
            told = decision_of(now, goals[role], advice[role], cases)
            decisions[role] = advised(decisions[role], told)
        paces[role] = _remember(now, decisions[role], memory.pools.get(role))
    return decisions, dataclasses.replace(memory, pools=paces)


def _strained(
    policy: ServicePolicy, view: View, estimate: Estimate, memory: PaceMemory
) -> float | None:
    """When a target was last closer than shrinking allows."""
    tuning = policy.tuning
    close = any(
        item.count > 0 and item.attainable and item.exceeds(tuning.ttft_margin)
        for item in estimate.attributions
    )
    itl = estimate.itl_p95_seconds
    if itl is not None and policy.itl_seconds is not None and math.isfinite(itl):
        close = close or itl > tuning.itl_margin * policy.itl_seconds
    return view.now if close else memory.strained_at


def _case(
    service: ServicePolicy, policy: PoolPolicy, view: View, estimate: Estimate, memory: PaceMemory
) -> Case:
    pool = view.pools.get(policy.role, _NOTHING)
    pace = memory.pools.get(policy.role)
    if pace is None:
        pace = PoolPace(since=view.now, mode=policy.mode)
    elif pace.mode is not policy.mode:
        # another owner knew nothing of windows: what stands is where a new one begins
        pace = dataclasses.replace(
            PoolPace(since=view.now, mode=policy.mode),
            standing=pace.standing,
            exhausted=pace.exhausted,
            decisions=pace.decisions,
            changes=pace.changes,
        )
    stock = take_stock(policy, pool, pace, estimate, service.tuning, now=view.now)
    pace = dataclasses.replace(
        pace,
        changes=_carried_out(pace, stock.replicas),
        exhausted=exhausted(policy, pool, stock, pace, service.tuning, now=view.now),
    )
    pace = flaps.damp(pace, service.tuning, window=policy.down_seconds, now=view.now)
    others = {**memory.pools, policy.role: pace}
    return Case(
        service=service,
        policy=policy,
        view=view,
        pool=pool,
        estimate=estimate,
        stock=stock,
        pace=pace,
        memory=dataclasses.replace(memory, pools=others),
    )


def _goal(case: Case) -> tuple[Goal, PoolPace]:
    if case.policy.mode is ScalingMode.MANUAL:
        return manual(case), case.pace
    if case.policy.mode is ScalingMode.EXTERNAL:
        return external(case), case.pace
    if case.service.apply is AutoscalingPolicy.OFF:
        return off(case), case.pace
    return auto(case)


def _unadvised(case: Case, goal: Goal) -> Goal:
    """What a pool may become where advice is not followed."""
    return off(case) if case.policy.mode is ScalingMode.AUTO else goal


def _carried_out(pace: PoolPace, before: int) -> tuple[Change, ...]:
    """The changes that the cluster has seen: one that it has not is decided anew."""
    if pace.changes and pace.changes[-1].before == before != pace.changes[-1].to:
        return pace.changes[:-1]
    return pace.changes


def _remember(case: Case, decision: Decision, earlier: PoolPace | None) -> PoolPace:
    """Note what was decided; the same decision again keeps the time of the first."""
    pace = dataclasses.replace(case.pace, standing=dict(decision.variants))
    if decision.before == decision.to:
        return pace
    known = earlier.changes if earlier is not None else ()
    change = Change(case.now, decision.before, decision.to)
    again = len(known) > len(case.pace.changes) and (known[-1].before, known[-1].to)
    if again == (change.before, change.to):
        return dataclasses.replace(pace, changes=known)
    oldest = case.now - max(case.service.tuning.flap_seconds, 60.0)
    recent = tuple(item for item in case.pace.changes if item.at > oldest)
    return dataclasses.replace(
        pace,
        changes=(*recent, change),
        decisions=(*pace.decisions, decision)[-KEPT_DECISIONS:],
    )
