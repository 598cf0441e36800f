"""How fast a pool of mode Auto follows its need: up at once, down when every rule agrees.

                     need > supply ─▶ grow: bottleneck? lasting? pods a minute
supply ≥ need, and   need of a whole window < supply - one replica ─▶ shrink, one rule at a time
                     otherwise nothing moves
too little known     nothing moves; after long, the fallback, if that is more

A pool shrinks if all rules hold; the first that does not is named: a whole window was observed,
nothing rolls out, nearly all pods answer, no target was close, and a whole window needed fewer.

dead zone   one replica too many stays for LONG_WINDOWS; two or more go after one window, at once
falling     while the need still falls nothing goes, so that a pool shrinks once and not in steps
"""

from __future__ import annotations

import dataclasses
import math

from vlm_operator.api.enums import MissingMetrics
from vlm_operator.autoscale.bounds import EPSILON, PoolContext, ReplicaBounds
from vlm_operator.autoscale.history import ScalingHistory
from vlm_operator.autoscale.outcome import Bound, Need, Reason
from vlm_operator.autoscale.ownership import clamp, foreign_write

MINUTE = 60.0
_SLOTS = 30  # into which a window's wants are thinned
DEAD_ZONE = 1.0  # of the smallest replica
LONG_WINDOWS = 6.0  # windows for which a surplus within the dead zone must last
CALM_SHARE = 1 / 3  # of a window, its end, which must need about as much as all of it


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


def shrink(context: PoolContext, need: Need) -> ReplicaBounds:
    """Let a pool that has enough stand, or go down by what is not needed."""
    if context.before == 0:
        return context.bounds(Reason.AT_ZERO, need.message or "nothing asks for the pool")
    room = context.before - context.policy.minimum
    surplus = _removable(context, least_units(need))
    text = need.message or f"{need.units:.2f} units needed, {context.supply:.2f} stand"
    if not surplus or room <= 0:
        bound = Bound.MIN if surplus else None
        return context.bounds(Reason.STEADY, text, limited_by=bound)
    blocked = _blocked(context, need)
    if blocked is not None:
        bound, why = blocked
        return context.bounds(Reason.STABILIZING, f"{text}; {why}", limited_by=bound)
    most, why = _left(context, need)
    if why:
        return context.bounds(Reason.STABILIZING, f"{text}; {why}", limited_by=Bound.WINDOW)
    last = context.before == 1
    step = min(room, context.policy.down_pods - _taken(context))
    if not need.credible:
        step = min(step, 1)
    if step <= 0:
        return context.bounds(Reason.STABILIZING, text, limited_by=Bound.MAX_PODS_PER_MINUTE)
    if context.policy.zero is not None and not last:
        step = min(step, context.before - 1)  # the last one has a rule of its own
    reason = Reason.IDLE if last else Reason.SCALE_DOWN
    why = f"a window of {context.window:.0f} s had {most:.2f} units at most"
    return context.bounds(reason, f"{text}; {why}", shrink=step, need=most)


def _left(context: PoolContext, need: Need) -> tuple[float, str]:
    """The units that shrinking leaves, and why nothing may go yet; "" where something may."""
    window = context.window
    most = _most_wanted(context, need, window)
    if not _removable(context, most):
        return most, f"the window of {window:.0f} s had {most:.2f} units"
    if context.before == 1:
        return most, ""  # the last one has a rule of its own
    smallest = _smallest(context)
    if most - _most_wanted(context, need, CALM_SHARE * window) >= smallest - EPSILON:
        return most, f"the need still falls, from {most:.2f} units in the window"
    if _removable(context, most + DEAD_ZONE * smallest) or _shrinks(context):
        return most, ""
    long = LONG_WINDOWS * window
    most = _most_wanted(context, need, long)
    if context.now - context.pace.since < long or not _removable(context, most):
        return most, f"one replica too many stays until {long:.0f} s did not need it"
    return most, ""


def _shrinks(context: PoolContext) -> bool:
    """Whether it is on its way down, held back by its pods a minute: it goes on to the end."""
    last = context.pace.changes[-1] if context.pace.changes else None
    return last is not None and not last.up and context.now - last.at < 2 * MINUTE


def least_units(need: Need) -> float:
    """What shrinking must leave."""
    return max(need.units, need.least_units)


def _removable(context: PoolContext, units: float) -> bool:
    """Whether the smallest replica is beyond what shrinking must leave."""
    smallest = _smallest(context)
    return smallest > 0 and context.supply - smallest >= units - EPSILON


def _smallest(context: PoolContext) -> float:
    """Units of the smallest replica that stands, 0 of none."""
    standing = [
        speed for name, speed in context.speeds.items() if context.capacity.standing.get(name)
    ]
    return min(standing, default=0.0)


def _most_wanted(context: PoolContext, need: Need, seconds: float) -> float:
    """The most units that any tick of the last `seconds` wanted."""
    recent = [units for at, units in context.pace.wants if context.now - at <= seconds]
    return max([*recent, least_units(need)])


def _taken(context: PoolContext) -> int:
    """Pods taken within the last minute."""
    return sum(
        item.before - item.to
        for item in context.pace.changes
        if not item.up and context.now - item.at < MINUTE
    )


def _blocked(context: PoolContext, need: Need) -> tuple[Bound, str] | None:
    """The first rule for shrinking that does not hold, in words."""
    now, window = context.now, context.window
    if now - context.pace.since < window:
        return Bound.WINDOW, f"one whole window of {window:.0f} s must say so"
    if any(pool.rolling for pool in context.view.pools.values()):
        return Bound.ROLLOUT, "not during a rollout"
    ready = context.pool.of("ready")
    heard = context.view.samples.keys() - set(context.estimate.absurd)
    answered = sum(pod.uid in heard for pod in ready)
    if answered < context.service.constants.fresh_down_share * len(ready):
        return Bound.FRESHNESS, f"{answered} of {len(ready)} ready pods answered"
    strained = context.memory.strained_at
    if strained is not None and now - strained < window:
        return Bound.SLO_MARGIN, "a target has been close within the window"
    if context.policy.zero is not None and context.before == 1:
        idle = context.pace.idle_since
        seconds = context.policy.zero.idle_seconds
        if not need.idle or idle is None or now - idle < seconds:
            return Bound.IDLE_SECONDS, f"the last replica stays until {seconds:.0f} s were idle"
    return None
