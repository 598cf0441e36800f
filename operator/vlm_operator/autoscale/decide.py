"""Who owns a pool's number, and what follows.

Manual    this manifest: VLMPool is put back to it
External  whoever writes VLMPool: the Deployments follow, within min and max
Auto      the rule of `auto`: VLMPool follows it, unless somebody else has just written there
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vlm_operator import names
from vlm_operator.api import ScalingMode
from vlm_operator.autoscale.auto import wanted
from vlm_operator.autoscale.types import Decision, Foreign, History, Policy, PoolNow
from vlm_operator.state import Sample

_KEPT_DECISIONS = 8


def decide(
    policy: Policy,
    pool: PoolNow,
    samples: Mapping[str, Sample],
    *,
    now: float,
    history: History,
) -> tuple[Decision, History]:
    """Choose the replicas of one pool.

    Args:
        policy: what the manifest says.
        pool: the pool as it is.
        samples: reports of its ready pods by uid; what is missing did not answer.
        now: seconds since the epoch.
        history: what the last call returned.

    Returns:
        The decision, and the history for the next call.
    """
    if policy.mode is ScalingMode.MANUAL:
        decision = _manual(policy, pool, now)
    elif policy.mode is ScalingMode.EXTERNAL:
        decision = _external(policy, pool, now)
    else:
        decision, history = _auto(policy, pool, samples, now=now, history=history)
    cost = pool.cost_per_hour
    if cost is not None:
        decision = dataclasses.replace(decision, cost_per_hour=cost * decision.to)
    return decision, _remember(decision, history)


def _manual(policy: Policy, pool: PoolNow, now: float) -> Decision:
    before = _first(pool, policy.replicas)
    if before == policy.replicas:
        message = f"spec asks for {policy.replicas}"
    elif pool.owner not in (None, names.MANAGER_AUTOSCALER):
        message = (
            f"{pool.owner} set VLMPool to {before}, put back to {policy.replicas}: "
            "mode Manual takes scaling.replicas; use mode External to scale VLMPool"
        )
        return Decision(now, before, policy.replicas, policy.replicas, "PutBack", message)
    else:
        message = f"spec asks for {policy.replicas} instead of {before}"
    return Decision(now, before, policy.replicas, policy.replicas, "Manual", message)


def _external(policy: Policy, pool: PoolNow, now: float) -> Decision:
    asked = pool.replicas
    if asked is None:
        start = _clamp(policy, max(pool.live, policy.minimum))
        return Decision(now, start, start, start, "External", f"VLMPool starts with {start}")
    to = _clamp(policy, asked)
    if to == asked:
        return Decision(now, asked, to, None, "External", f"VLMPool asks for {asked}")
    bound = "Max" if asked > policy.maximum else "Min"
    limit = policy.maximum if bound == "Max" else policy.minimum
    message = f"VLMPool asks for {asked}, {bound.lower()}Replicas is {limit}"
    return Decision(now, asked, to, None, "External", message, limited_by=bound)


def _auto(
    policy: Policy,
    pool: PoolNow,
    samples: Mapping[str, Sample],
    *,
    now: float,
    history: History,
) -> tuple[Decision, History]:
    before = _first(pool, max(pool.live, policy.minimum))
    foreign = _foreign(policy, pool, now, history)
    history = dataclasses.replace(history, foreign=foreign)
    if foreign is not None:
        message = f"{foreign.manager} set VLMPool to {foreign.replicas}, kept for one window"
        if foreign.conflict:
            message = f"{foreign.manager} keeps writing VLMPool, so it is held: use mode External"
        to = _clamp(policy, foreign.replicas)
        decision = Decision(
            now, before, to, None, "ForeignWrite", message, conflict=foreign.conflict
        )
        return decision, history
    want = wanted(policy, pool, samples, current=before, now=now, history=history)
    to = _clamp(policy, want.replicas)
    limited = want.limited_by
    if to != want.replicas:
        limited = "Max" if want.replicas > to else "Min"
    decision = Decision(
        now, before, to, to, want.reason, want.message, limited, want.candidates, held=want.held
    )
    return decision, want.history


def _foreign(policy: Policy, pool: PoolNow, now: float, history: History) -> Foreign | None:
    """Tell whether somebody else's number stands: once it is the baseline, twice a conflict."""
    known = history.foreign
    if pool.replicas is None or pool.owner in (None, names.MANAGER_AUTOSCALER):
        return None
    assert pool.owner is not None
    if known is None or known.manager != pool.owner:
        return Foreign(pool.owner, pool.replicas, now)
    if known.replicas != pool.replicas:
        return Foreign(pool.owner, pool.replicas, now, conflict=True)
    expired = now - known.since >= max(policy.down_seconds, 60.0)
    return None if expired and not known.conflict else known


def _first(pool: PoolNow, otherwise: int) -> int:
    """The number that stands; a VLMPool that was deleted comes back with the live count."""
    if pool.replicas is not None:
        return pool.replicas
    return pool.live or otherwise


def _clamp(policy: Policy, replicas: int) -> int:
    return min(max(replicas, policy.minimum), policy.maximum)


def _remember(decision: Decision, history: History) -> History:
    if decision.before == decision.to:
        return history
    last = history.decisions[-1] if history.decisions else None
    if last is not None and (last.before, last.to, last.reason) == (
        decision.before,
        decision.to,
        decision.reason,
    ):
        return history  # still the same decision, not carried out yet
    change = (decision.time, decision.before, decision.to)
    return dataclasses.replace(
        history,
        changes=(*history.changes, change)[-_KEPT_DECISIONS:],
        decisions=(*history.decisions, decision)[-_KEPT_DECISIONS:],
    )
