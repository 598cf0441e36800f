"""How fast a pool of mode Auto follows its need: up at once, down when every rule agrees.

                     need > supply ─▶ grow: guilty? lasting? pods a minute; panic knows no limit
supply ≥ need, and   need of a whole window < supply - one replica ─▶ shrink, one rule at a time
                     otherwise nothing moves
too little known     nothing moves; after long, the fallback, if that is more
"""

from __future__ import annotations

import dataclasses
import math

from vlm_operator.api.enums import MissingMetrics
from vlm_operator.autoscale.outcome import Need
from vlm_operator.autoscale.reasons import Bound, Reason
from vlm_operator.autoscale.settling.goal import EPSILON, Case, Goal
from vlm_operator.autoscale.settling.ownership import clamp, foreign_write
from vlm_operator.autoscale.settling.paced import PoolPace
from vlm_operator.autoscale.settling.shrink import shrink

MINUTE = 60.0
_SLOTS = 30  # into which a window's wants are thinned


def auto(case: Case) -> tuple[Goal, PoolPace]:
    """Choose what a pool of mode Auto may become, and what to remember of this tick."""
    foreign_goal, foreign = foreign_write(case)
    case = dataclasses.replace(case, pace=dataclasses.replace(case.pace, foreign=foreign))
    need = case.need
    fresh = need is not None and case.estimate.fresh
    case = dataclasses.replace(case, pace=_watched(case, need if fresh else None))
    count, bound = clamp(case, case.before)
    if foreign_goal is not None:
        return foreign_goal, case.pace
    if bound is not None:
        message = f"{bound.lower()}Replicas is {count}, the pool had {case.before}"
        return case.exactly(count, Reason.BOUNDS, message, limited_by=bound), case.pace
    if need is None or not fresh:
        return _unknown(case), case.pace
    if need.units > case.supply + EPSILON:
        goal, pace = _more(case, need)
    else:
        pace = dataclasses.replace(case.pace, over_since=None)
        goal = shrink(dataclasses.replace(case, pace=pace), need)
    if not need.credible:
        goal = dataclasses.replace(goal, paced_by=Bound.UNKNOWN_TIMES)
    return dataclasses.replace(goal, spare=_room(case, _step_up(case))), pace


def _watched(case: Case, need: Need | None) -> PoolPace:
    """Note what a tick says for the ticks to come; one that says nothing breaks idleness."""
    pace, now = case.pace, case.now
    if need is None:
        return dataclasses.replace(pace, over_since=None, idle_since=None)
    width = max(case.window, 1.0) / _SLOTS
    oldest = now - max(case.window, case.service.tuning.max_down_seconds)
    gone = next((i for i, want in enumerate(pace.wants) if want[0] > oldest), len(pace.wants))
    wants = list(pace.wants[gone:])
    most = max(need.units, need.least_units)
    if wants and math.floor(wants[-1][0] / width) == math.floor(now / width):
        most = max(most, wants.pop()[1])
    wants.append((now, most))
    idle = (pace.idle_since if pace.idle_since is not None else now) if need.idle else None
    return dataclasses.replace(pace, wants=tuple(wants), idle_since=idle)


def _unknown(case: Case) -> Goal:
    """Hold what stands; after long take the fallback, if that is more."""
    policy, estimate = case.service, case.estimate
    need = estimate.needs.get(case.role)
    message = (need.message if need else "") or "too few pods answer"
    fallback = policy.fallback.get(case.role)
    late = estimate.missing_seconds >= policy.tuning.missing_seconds
    if policy.missing is MissingMetrics.FALLBACK and fallback is not None and late:
        count, bound = clamp(case, max(case.before, fallback))
        text = f"{message}, for {estimate.missing_seconds:.0f} s: fallback is {fallback}"
        return case.exactly(count, Reason.FALLBACK, text, limited_by=bound, held=True)
    return case.goal(Reason.MISSING_METRICS, f"{message}: nothing changes", held=True)


def _more(case: Case, need: Need) -> tuple[Goal, PoolPace]:
    """More is needed than stands and starts."""
    now, pace, policy = case.now, case.pace, case.policy
    since = pace.over_since if pace.over_since is not None else now
    pace = dataclasses.replace(pace, over_since=since)
    text = (
        f"{need.message or leading(need)}: {need.units:.2f} units needed, {case.supply:.2f} stand"
    )
    if not need.guilty:
        beyond = any(not item.attainable for item in case.estimate.attributions)
        reason = Reason.UNATTAINABLE if beyond else Reason.NOT_GUILTY
        why = "no number of replicas meets the target" if beyond else "time is lost elsewhere"
        return case.goal(reason, f"{text}, but {why}"), pace
    if case.before == 0:
        step = max(1, policy.up_pods) if need.credible else 1
        return case.goal(Reason.WAKE, text, grow=_room(case, step), need=need.units), pace
    if case.before >= policy.maximum:
        return case.goal(Reason.STEADY, text, need=need.units, limited_by=Bound.MAX), pace
    if now - since < policy.up_seconds:
        return case.goal(Reason.STEADY, text, limited_by=Bound.UP_WINDOW), pace
    if panics(case, need):
        pace = dataclasses.replace(pace, panic_until=now + policy.panic_hold_seconds)
        step = policy.maximum if need.credible else 1
        return case.goal(Reason.PANIC, text, grow=_room(case, step), need=need.units), pace
    step = _step_up(case) if need.credible else min(1, _step_up(case))
    if step <= 0:
        return case.goal(Reason.STEADY, text, limited_by=Bound.MAX_PODS_PER_MINUTE), pace
    return case.goal(Reason.SCALE_UP, text, grow=_room(case, step), need=need.units), pace


def panics(case: Case, need: Need) -> bool:
    """Whether the need is a multiple of the pool, or what waits cannot be done in time."""
    return need.urgent or need.units >= case.policy.panic * case.supply


def _room(case: Case, step: int) -> int:
    return max(0, min(step, case.policy.maximum - case.before))


def _step_up(case: Case) -> int:
    """Pods that may still be added in this minute."""
    recent = [item for item in case.pace.changes if case.now - item.at < MINUTE]
    added = sum(item.to - item.before for item in recent if item.up)
    start = recent[0].before if recent else case.before
    return max(case.policy.up_pods, math.floor(start * case.policy.up_share)) - added


def leading(need: Need) -> str:
    """The signal that asks for most, in words."""
    if not need.candidates:
        return "the estimate"
    first = max(need.candidates, key=lambda item: item.replicas)
    return f"{first.signal} asks for {first.replicas}"
