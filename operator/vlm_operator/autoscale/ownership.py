"""Who owns a pool's number, and what follows.

Manual    this manifest: VLMPool is put back to it
External  whoever writes VLMPool: the Deployments follow, within min, max and budget
Auto      the rule of `pace`: VLMPool follows it, unless somebody else has just written there
"""

from __future__ import annotations

import dataclasses

from vlm_operator import names
from vlm_operator.autoscale.bounds import PoolContext, ReplicaBounds
from vlm_operator.autoscale.history import ExternalWrite
from vlm_operator.autoscale.outcome import Bound, Reason

# Somebody else's number stands at least this long, however short the window is.
LEAST_BASELINE_SECONDS = 60.0


def manual(context: PoolContext) -> ReplicaBounds:
    """The manifest's number."""
    count, before, owner = context.policy.replicas, context.pool.replicas, context.pool.owner
    if before in (None, count):
        return context.exactly(count, Reason.MANUAL, f"spec asks for {count}")
    if owner not in (None, names.MANAGER_AUTOSCALER):
        message = (
            f"{owner} set VLMPool to {before}, put back to {count}: "
            "mode Manual takes scaling.replicas; use mode External to scale VLMPool"
        )
        return context.exactly(count, Reason.PUT_BACK, message)
    return context.exactly(count, Reason.MANUAL, f"spec asks for {count} instead of {before}")


def external(context: PoolContext) -> ReplicaBounds:
    """The number of whoever writes VLMPool; one that is missing starts with what is live."""
    asked = context.pool.replicas
    if asked is None:
        start, _ = clamp(context, context.before)
        return context.exactly(start, Reason.EXTERNAL, f"VLMPool starts with {start}")
    count, bound = clamp(context, asked)
    message = f"VLMPool asks for {asked}"
    if bound is not None:
        message += f", {bound.lower()}Replicas is {count}"
    return context.exactly(count, Reason.EXTERNAL, message, limited_by=bound, claim=False)


def foreign_write(context: PoolContext) -> tuple[ReplicaBounds | None, ExternalWrite | None]:
    """What somebody else's number in mode Auto means: once it is the baseline, twice a conflict.

    Returns:
        The goal, None where the number is ours to decide; and what to remember.
    """
    known, asked, owner = context.pace.foreign, context.pool.replicas, context.pool.owner
    if asked is None or owner is None or owner == names.MANAGER_AUTOSCALER:
        return None, None
    window = max(context.window, LEAST_BASELINE_SECONDS)
    if known is None or known.manager != owner:
        known = ExternalWrite(owner, asked, context.now)
    elif known.replicas != asked:
        again = known.conflict or context.now - known.since < window
        known = ExternalWrite(owner, asked, context.now, conflict=again)
    if not known.conflict and context.now - known.since >= window:
        return None, known
    count, bound = clamp(context, asked)
    reason, message = Reason.FOREIGN_WRITE, f"{owner} set VLMPool to {asked}: kept for one window"
    if known.conflict:
        reason = Reason.SCALING_CONFLICT
        message = (
            f"{owner} keeps writing VLMPool, so it is held: use mode External, or delete "
            f"the VLMPool once {owner} has stopped"
        )
    bounds = context.exactly(
        count, reason, message, limited_by=bound, claim=False, conflict=known.conflict
    )
    return bounds, known


def clamp(context: PoolContext, count: int) -> tuple[int, Bound | None]:
    """Bring a number within minReplicas and maxReplicas; tells which one moved it."""
    if count > context.policy.maximum:
        return context.policy.maximum, Bound.MAX
    if count < context.policy.minimum:
        return context.policy.minimum, Bound.MIN
    return count, None


def off(context: PoolContext) -> ReplicaBounds:
    """Nothing decides: the number that stands, within its bounds."""
    asked = context.before if context.pool.replicas is None else context.pool.replicas
    count, bound = clamp(context, asked)
    message = "autoscaling.policy is Off: the number stays"
    bounds = context.exactly(count, Reason.OFF, message, limited_by=bound)
    ours = context.pool.owner in (None, names.MANAGER_AUTOSCALER)
    return dataclasses.replace(
        bounds, claim=ours and (bound is not None or context.pool.replicas is None)
    )
