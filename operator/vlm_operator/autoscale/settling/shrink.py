"""When a pool of mode Auto may shrink: all rules must hold, and the first that does not is named.

Pods without a node go first, and soon. Everything else waits until a whole window has said that
fewer are enough, no target was close, nothing has just grown or rolls, and nearly all pods answer.
"""

from __future__ import annotations

from vlm_operator.autoscale.outcome import Need
from vlm_operator.autoscale.reasons import Bound, Reason
from vlm_operator.autoscale.settling.goal import EPSILON, Case, Goal

MINUTE = 60.0


def shrink(case: Case, need: Need) -> Goal:
    """Let a pool that has enough stand, or go down by what is not needed."""
    if case.before == 0:
        return case.goal(Reason.AT_ZERO, need.message or "nothing asks for the pool")
    cancelled = _cancel(case, need)
    if cancelled is not None:
        return cancelled
    room = case.before - case.policy.minimum
    surplus = _removable(case, least_units(need))
    text = need.message or f"{need.units:.2f} units needed, {case.supply:.2f} stand"
    if not surplus or room <= 0:
        bound = Bound.MIN if surplus else None
        return case.goal(Reason.STEADY, text, limited_by=bound)
    blocked = _blocked(case, need)
    if blocked is not None:
        bound, why = blocked
        return case.goal(Reason.STABILIZING, f"{text}; {why}", limited_by=bound)
    most = _most_wanted(case, need, case.window)
    removable = _removable(case, most)
    if not removable:
        why = f"the window of {case.window:.0f} s had {most:.2f} units"
        return case.goal(Reason.STABILIZING, f"{text}; {why}", limited_by=Bound.WINDOW)
    last = case.before == 1
    step = min(room, case.policy.down_pods - _taken(case))
    if not need.credible:
        step = min(step, 1)
    if step <= 0:
        return case.goal(Reason.STABILIZING, text, limited_by=Bound.MAX_PODS_PER_MINUTE)
    if case.policy.zero is not None and not last:
        step = min(step, case.before - 1)  # the last one has a rule of its own
    reason = Reason.IDLE if last else Reason.SCALE_DOWN
    why = f"a window of {case.window:.0f} s had {most:.2f} units at most"
    return case.goal(reason, f"{text}; {why}", shrink=step, need=most)


def least_units(need: Need) -> float:
    """What shrinking must leave."""
    return max(need.units, need.least_units)


def _cancel(case: Case, need: Need) -> Goal | None:
    """Give up pods on no node that are not needed; they serve nobody, so they wait for no window.

    What the last moments needed counts, too, so that noise does not cancel and ask again.
    """
    pending = case.stock.pending
    count = min(case.before - max(case.policy.minimum, 1), sum(pending.values()))
    if count <= 0:
        return None
    units = _most_wanted(case, need, case.service.tuning.after_growth_seconds)
    if not any(case.supply - _counted(case, name) >= units - EPSILON for name in pending):
        return None
    text = f"{need.units:.2f} units needed: pods that wait for a node are not"
    return case.goal(Reason.CANCEL_PENDING, text, shrink=count, need=units, shrinkable=pending)


def _counted(case: Case, name: str) -> float:
    """What one pending replica of a variant counts in the supply."""
    return 0.0 if case.stock.stuck.get(name, 0) else case.speeds[name]


def _removable(case: Case, units: float) -> bool:
    """Whether the smallest replica is beyond what shrinking must leave."""
    standing = [speed for name, speed in case.speeds.items() if case.stock.standing.get(name)]
    return bool(standing) and case.supply - min(standing) >= units - EPSILON


def _most_wanted(case: Case, need: Need, seconds: float) -> float:
    """The most units that any tick of the last `seconds` wanted."""
    recent = [units for at, units in case.pace.wants if case.now - at <= seconds]
    return max([*recent, least_units(need)])


def _taken(case: Case) -> int:
    """Pods taken within the last minute."""
    return sum(
        item.before - item.to
        for item in case.pace.changes
        if not item.up and case.now - item.at < MINUTE
    )


def _blocked(case: Case, need: Need) -> tuple[Bound, str] | None:
    """The first rule for shrinking that does not hold, in words."""
    now, window, tuning = case.now, case.window, case.service.tuning
    if now - case.pace.since < window:
        return Bound.WINDOW, f"one whole window of {window:.0f} s must say so"
    if any(pool.rolling for pool in case.view.pools.values()):
        return Bound.ROLLOUT, "not during a rollout"
    ready = case.pool.of("ready")
    heard = case.view.samples.keys() - set(case.estimate.absurd)
    answered = sum(pod.uid in heard for pod in ready)
    if answered < tuning.fresh_down_share * len(ready):
        return Bound.FRESHNESS, f"{answered} of {len(ready)} ready pods answered"
    if now < case.pace.panic_until:
        return Bound.PANIC_HOLD, "a panic has just ended"
    if now - case.memory.grown_at() < tuning.after_growth_seconds:
        return Bound.RECENT_GROWTH, "a pool of the service has just grown"
    strained = case.memory.strained_at
    if strained is not None and now - strained < window:
        return Bound.SLO_MARGIN, "a target has been close within the window"
    if case.policy.zero is not None and case.before == 1:
        idle = case.pace.idle_since
        seconds = case.policy.zero.idle_seconds
        if not need.idle or idle is None or now - idle < seconds:
            return Bound.IDLE_SECONDS, f"the last replica stays until {seconds:.0f} s were idle"
    return None
