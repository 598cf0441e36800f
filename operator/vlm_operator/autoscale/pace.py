"""How fast a pool of mode Auto follows its need: it grows at once and shrinks by rules.

need > supply    grows if it is a bottleneck, the need lasts, and maxPodsPerMinute allows it
need ≤ supply    shrinks if the need of a whole window was lower and every rule of `_blocked` holds
need unknown     keeps its size; after `missing_seconds` it grows to fallbackReplicas

One surplus replica stays for LONG_WINDOWS windows; two or more are removed together after one.
While the need still falls, nothing is removed, so that a pool shrinks once and not in steps.
"""

from __future__ import annotations

import dataclasses
import math

from vlm_operator.api.enums import MissingMetrics
from vlm_operator.autoscale.bounds import EPSILON, PoolContext, ReplicaBounds
from vlm_operator.autoscale.outcome import Bound, Need, Reason
from vlm_operator.autoscale.ownership import baseline, clamp, last_write

MINUTE = 60.0
_SLOTS = 30  # values of `wants` per window
DEAD_ZONE = 1.0  # surplus that stays for LONG_WINDOWS, as a multiple of the smallest replica
LONG_WINDOWS = 6.0  # windows
CALM_SHARE = 1 / 3  # last part of the window, whose largest need shows whether the need still falls


def auto(context: PoolContext) -> ReplicaBounds:
    """Return the bounds of a pool in mode Auto. Their context has the history after this tick."""
    need = context.need if context.estimate.fresh else None
    context = _observe(context.with_history(foreign=last_write(context)), need)
    kept = baseline(context)
    if kept is not None:
        return kept
    count, bound = clamp(context, context.before)
    if bound is not None:
        message = f"{bound.lower()}Replicas is {count}, the pool had {context.before}"
        return context.bounds(Reason.BOUNDS, message, replicas=count, limited_by=bound)
    if need is None:
        return _without_need(context)
    over = need.units > context.supply + EPSILON
    since = context.now if context.history.over_since is None else context.history.over_since
    context = context.with_history(over_since=since if over else None)
    bounds = _grow(context, need, since) if over else _shrink(context, need)
    return dataclasses.replace(
        bounds,
        paced_by=Bound.MAX_PODS_PER_MINUTE if need.credible else Bound.UNKNOWN_TIMES,
        spare=max(0, min(_addable(context), context.policy.maximum - context.before)),
    )


def _observe(context: PoolContext, need: Need | None) -> PoolContext:
    """Add this tick to the history; a tick without a need ends `over_since` and `idle_since`."""
    history, now = context.history, context.now
    if need is None:
        return context.with_history(over_since=None, idle_since=None)
    slot_seconds = max(context.window, 1.0) / _SLOTS
    oldest = now - LONG_WINDOWS * context.window
    first = next((i for i, (at, _) in enumerate(history.wants) if at > oldest), len(history.wants))
    wants, largest = list(history.wants[first:]), _least_units(need)
    if wants and math.floor(wants[-1][0] / slot_seconds) == math.floor(now / slot_seconds):
        largest = max(largest, wants.pop()[1])
    idle_since = now if history.idle_since is None else history.idle_since
    return context.with_history(
        wants=(*wants, (now, largest)), idle_since=idle_since if need.idle else None
    )


def _without_need(context: PoolContext) -> ReplicaBounds:
    """Keep the size; after `missing_seconds`, grow to the fallback if the manifest asks for it."""
    policy, missing = context.service, context.estimate.missing_seconds
    need = context.estimate.needs.get(context.policy.role)
    message = (need.message if need else "") or "too few pods answer"
    fallback = policy.fallback.get(context.policy.role)
    if (
        policy.missing is MissingMetrics.FALLBACK
        and fallback is not None
        and missing >= policy.constants.missing_seconds
    ):
        count, bound = clamp(context, max(context.before, fallback))
        message = f"{message}, for {missing:.0f} s: fallbackReplicas is {fallback}"
        return context.bounds(Reason.FALLBACK, message, replicas=count, limited_by=bound, held=True)
    message = f"{message}: the pool keeps its size"
    return context.bounds(Reason.MISSING_METRICS, message, held=True)


def _grow(context: PoolContext, need: Need, since: float) -> ReplicaBounds:
    """Bounds if the need exceeds the supply, which it has done since `since`."""
    policy, units = context.policy, need.units
    message = need.message or _largest_candidate(need)
    message = f"{message}: {units:.2f} units needed, {context.supply:.2f} ready or starting"
    if not need.bottleneck:
        if any(not item.attainable for item in context.estimate.attributions):
            message = f"{message}, but no number of replicas meets the target"
            return context.bounds(Reason.UNATTAINABLE, message)
        message = f"{message}, but other stages cause the delay"
        return context.bounds(Reason.NOT_BOTTLENECK, message)
    wakes = context.before == 0
    if not wakes and context.before >= policy.maximum:
        return context.bounds(Reason.STEADY, message, need=units, limited_by=Bound.MAX)
    if not wakes and context.now - since < policy.up_seconds:
        return context.bounds(Reason.STEADY, message, limited_by=Bound.UP_WINDOW)
    step = max(1, policy.up_pods) if wakes else _addable(context)
    if step <= 0:
        return context.bounds(Reason.STEADY, message, limited_by=Bound.MAX_PODS_PER_MINUTE)
    if not need.credible:
        step = 1
    reason = Reason.WAKE if wakes else Reason.SCALE_UP
    return context.bounds(reason, message, grow=step, need=units)


def _largest_candidate(need: Need) -> str:
    if not need.candidates:
        return "the estimate"
    largest = max(need.candidates, key=lambda item: item.replicas)
    return f"{largest.signal} needs {largest.replicas} replicas"


def _addable(context: PoolContext) -> int:
    """Replicas that maxPodsPerMinute still allows to add."""
    return context.policy.up_pods - sum(step for step in _last_steps(context) if step > 0)


def _last_steps(context: PoolContext) -> list[int]:
    """Changes of the replicas within the last minute; negative ones removed replicas."""
    changes = context.history.changes
    return [item.to - item.before for item in changes if context.now - item.at < MINUTE]


def _shrink(context: PoolContext, need: Need) -> ReplicaBounds:
    """Bounds if the supply meets the need: remove surplus replicas, or keep the size."""
    before, policy = context.before, context.policy
    if before == 0:
        return context.bounds(Reason.AT_ZERO, need.message or "no work needs the pool")
    message = (
        need.message or f"{need.units:.2f} units needed, {context.supply:.2f} ready or starting"
    )
    if not _has_surplus(context, _least_units(need)):
        return context.bounds(Reason.STEADY, message)
    if before <= policy.minimum:
        return context.bounds(Reason.STEADY, message, limited_by=Bound.MIN)
    blocked = _blocked(context, need)
    if blocked is not None:
        bound, why = blocked
        return context.bounds(Reason.STABILIZING, f"{message}; {why}", limited_by=bound)
    largest, why, waits = _past_need(context, need)
    if waits:
        return context.bounds(Reason.STABILIZING, f"{message}; {why}", limited_by=Bound.WINDOW)
    removed = -sum(step for step in _last_steps(context) if step < 0)
    step = min(before - policy.minimum, policy.down_pods - removed)
    if not need.credible:
        step = min(step, 1)
    if step <= 0:
        return context.bounds(Reason.STABILIZING, message, limited_by=Bound.MAX_PODS_PER_MINUTE)
    if policy.zero is not None and before > 1:
        step = min(step, before - 1)  # the last replica goes only after scaleToZero.idleSeconds
    reason = Reason.IDLE if before == 1 else Reason.SCALE_DOWN
    return context.bounds(reason, f"{message}; {why}", shrink=step, need=largest)


def _blocked(context: PoolContext, need: Need) -> tuple[Bound, str] | None:
    """The first rule that forbids to shrink, whatever the need was: its bound and a message."""
    now, window = context.now, context.window
    if now - context.history.since < window:
        return Bound.WINDOW, f"the pool was observed for less than a window of {window:.0f} s"
    if any(pool.rolling for pool in context.view.pools.values()):
        return Bound.ROLLOUT, "a rollout is running"
    ready = context.pool.of("ready")
    valid = context.view.samples.keys() - set(context.estimate.absurd)
    answered = sum(pod.uid in valid for pod in ready)
    if answered < context.service.constants.fresh_down_share * len(ready):
        return Bound.FRESHNESS, f"{answered} of {len(ready)} ready pods answered"
    if context.strained_at is not None and now - context.strained_at < window:
        return Bound.SLO_MARGIN, "TTFT or ITL was close to its target within the window"
    if context.policy.zero is not None and context.before == 1:
        idle_since, seconds = context.history.idle_since, context.policy.zero.idle_seconds
        if not need.idle or idle_since is None or now - idle_since < seconds:
            return Bound.IDLE_SECONDS, f"the last replica stays until {seconds:.0f} s were idle"
    return None


def _past_need(context: PoolContext, need: Need) -> tuple[float, str, bool]:
    """The past need that a scale-down must leave: units, a message, and whether it must wait."""
    seconds, smallest = context.window, _smallest_replica(context)
    units = _largest_need(context, need, seconds)
    message = f"the largest need within {seconds:.0f} s was {units:.2f} units"
    if not _has_surplus(context, units):
        return units, message, True
    if context.before == 1:
        return units, message, False  # `_blocked` has the rule of the last replica
    if units - _largest_need(context, need, CALM_SHARE * seconds) >= smallest - EPSILON:
        return units, f"the need still falls, from {units:.2f} units within the window", True
    if _has_surplus(context, units + DEAD_ZONE * smallest) or _is_shrinking(context):
        return units, message, False
    seconds *= LONG_WINDOWS
    units = _largest_need(context, need, seconds)
    if context.now - context.history.since < seconds or not _has_surplus(context, units):
        return units, f"one surplus replica stays until {seconds:.0f} s did not need it", True
    return units, f"the largest need within {seconds:.0f} s was {units:.2f} units", False


def _is_shrinking(context: PoolContext) -> bool:
    """Whether maxPodsPerMinute interrupted a scale-down, which then continues to its end."""
    last = context.history.changes[-1] if context.history.changes else None
    return last is not None and last.to <= last.before and context.now - last.at < 2 * MINUTE


def _least_units(need: Need) -> float:
    """Units that a scale-down must leave."""
    return max(need.units, need.least_units)


def _largest_need(context: PoolContext, need: Need, seconds: float) -> float:
    """Largest `_least_units` of the last `seconds`."""
    recent = [units for at, units in context.history.wants if context.now - at <= seconds]
    return max([*recent, _least_units(need)])


def _has_surplus(context: PoolContext, units: float) -> bool:
    """Whether the supply without the smallest replica still has these units."""
    smallest = _smallest_replica(context)
    return smallest > 0 and context.supply - smallest >= units - EPSILON


def _smallest_replica(context: PoolContext) -> float:
    """Units of the smallest current replica; 0 if there is none."""
    return min((context.speeds[name] for name, n in context.current.items() if n), default=0.0)
