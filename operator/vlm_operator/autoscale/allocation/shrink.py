"""When a pool of mode Auto may shrink: all rules must hold, and the first that does not is named.

A pool waits until a whole window has said that fewer are enough, no target was close, nothing rolls
out, and nearly all pods answer.

dead zone   one replica too many stays for LONG_WINDOWS; two or more go after one window, at once
falling     while the need still falls nothing goes, so that a pool shrinks once and not in steps
"""

from __future__ import annotations

from vlm_operator.autoscale.allocation.bounds import EPSILON, PoolContext, ReplicaBounds
from vlm_operator.autoscale.outcome import Bound, Need, Reason

MINUTE = 60.0
DEAD_ZONE = 1.0  # of the smallest replica
LONG_WINDOWS = 6.0  # windows for which a surplus within the dead zone must last
CALM_SHARE = 1 / 3  # of a window, its end, which must need about as much as all of it


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
