"""How fast a pool of mode Auto follows its need: up at once, down when every rule agrees.

                     need > supply ─▶ grow: bottleneck? lasting? pods a minute
supply ≥ need, and   need of a whole window < supply - one replica ─▶ shrink, one rule at a time
                     otherwise nothing moves
too little known     nothing moves; after long, the fallback, if that is more
"""

from __future__ import annotations

import dataclasses
import math

from vlm_operator.api.enums import MissingMetrics
from vlm_operator.autoscale.allocation.bounds import EPSILON, PoolContext, ReplicaBounds
from vlm_operator.autoscale.allocation.history import ScalingHistory
from vlm_operator.autoscale.allocation.ownership import clamp, foreign_write
from vlm_operator.autoscale.allocation.shrink import LONG_WINDOWS, shrink
from vlm_operator.autoscale.outcome import Bound, Need, Reason

MINUTE = 60.0
_SLOTS = 30  # into which a window's wants are thinned


def auto(context: PoolContext) -> tuple[ReplicaBounds, ScalingHistory]:
    """Choose what a pool of mode Auto may become, and what to remember of this tick."""
    foreign_goal, foreign = foreign_write(context)
    context = dataclasses.replace(context, pace=dataclasses.replace(context.pace, foreign=foreign))
    need = context.need
    fresh = need is not None and context.estimate.fresh
    context = dataclasses.replace(context, pace=_watched(context, need if fresh else None))
    count, bound = clamp(context, context.before)
    if foreign_goal is not None:
        return foreign_goal, context.pace
    if bound is not None:
        message = f"{bound.lower()}Replicas is {count}, the pool had {context.before}"
        return context.exactly(count, Reason.BOUNDS, message, limited_by=bound), context.pace
    if need is None or not fresh:
        return _unknown(context), context.pace
    if need.units > context.supply + EPSILON:
        bounds, pace = _more(context, need)
    else:
        pace = dataclasses.replace(context.pace, over_since=None)
        bounds = shrink(dataclasses.replace(context, pace=pace), need)
    if not need.credible:
        bounds = dataclasses.replace(bounds, paced_by=Bound.UNKNOWN_TIMES)
    return dataclasses.replace(bounds, spare=_room(context, _step_up(context))), pace


def _watched(context: PoolContext, need: Need | None) -> ScalingHistory:
    """Note what a tick says for the ticks to come; one that says nothing breaks idleness."""
    pace, now = context.pace, context.now
    if need is None:
        return dataclasses.replace(pace, over_since=None, idle_since=None)
    width = max(context.window, 1.0) / _SLOTS
    oldest = now - LONG_WINDOWS * context.window
    gone = next((i for i, want in enumerate(pace.wants) if want[0] > oldest), len(pace.wants))
    wants = list(pace.wants[gone:])
    most = max(need.units, need.least_units)
    if wants and math.floor(wants[-1][0] / width) == math.floor(now / width):
        most = max(most, wants.pop()[1])
    wants.append((now, most))
    idle = (pace.idle_since if pace.idle_since is not None else now) if need.idle else None
    return dataclasses.replace(pace, wants=tuple(wants), idle_since=idle)


def _unknown(context: PoolContext) -> ReplicaBounds:
    """Hold what stands; after long take the fallback, if that is more."""
    policy, estimate = context.service, context.estimate
    need = estimate.needs.get(context.role)
    message = (need.message if need else "") or "too few pods answer"
    fallback = policy.fallback.get(context.role)
    late = estimate.missing_seconds >= policy.constants.missing_seconds
    if policy.missing is MissingMetrics.FALLBACK and fallback is not None and late:
        count, bound = clamp(context, max(context.before, fallback))
        text = f"{message}, for {estimate.missing_seconds:.0f} s: fallback is {fallback}"
        return context.exactly(count, Reason.FALLBACK, text, limited_by=bound, held=True)
    return context.bounds(Reason.MISSING_METRICS, f"{message}: nothing changes", held=True)


def _more(context: PoolContext, need: Need) -> tuple[ReplicaBounds, ScalingHistory]:
    """More is needed than stands and starts."""
    now, pace, policy = context.now, context.pace, context.policy
    since = pace.over_since if pace.over_since is not None else now
    pace = dataclasses.replace(pace, over_since=since)
    units = f"{need.units:.2f} units needed, {context.supply:.2f} stand"
    text = f"{need.message or leading(need)}: {units}"
    if not need.bottleneck:
        beyond = any(not item.attainable for item in context.estimate.attributions)
        reason = Reason.UNATTAINABLE if beyond else Reason.NOT_BOTTLENECK
        why = "no number of replicas meets the target" if beyond else "time is lost elsewhere"
        return context.bounds(reason, f"{text}, but {why}"), pace
    if context.before == 0:
        step = max(1, policy.up_pods) if need.credible else 1
        return context.bounds(Reason.WAKE, text, grow=_room(context, step), need=need.units), pace
    if context.before >= policy.maximum:
        return context.bounds(Reason.STEADY, text, need=need.units, limited_by=Bound.MAX), pace
    if now - since < policy.up_seconds:
        return context.bounds(Reason.STEADY, text, limited_by=Bound.UP_WINDOW), pace
    step = _step_up(context) if need.credible else min(1, _step_up(context))
    if step <= 0:
        return context.bounds(Reason.STEADY, text, limited_by=Bound.MAX_PODS_PER_MINUTE), pace
    return context.bounds(Reason.SCALE_UP, text, grow=_room(context, step), need=need.units), pace


def _room(context: PoolContext, step: int) -> int:
    return max(0, min(step, context.policy.maximum - context.before))


def _step_up(context: PoolContext) -> int:
    """Pods that may still be added in this minute."""
    recent = [item for item in context.pace.changes if context.now - item.at < MINUTE]
    added = sum(item.to - item.before for item in recent if item.up)
    return context.policy.up_pods - added


def leading(need: Need) -> str:
    """The signal that asks for most, in words."""
    if not need.candidates:
        return "the estimate"
    first = max(need.candidates, key=lambda item: item.replicas)
    return f"{first.signal} asks for {first.replicas}"
