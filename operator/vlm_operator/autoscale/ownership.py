"""The modes in which the autoscaler does not choose a pool's replicas, and writes of others.

mode Manual     the manifest's number; the operator overwrites another number in VLMPool
mode External   VLMPool's number, within minReplicas, maxReplicas and the budget
policy Off      the current number, within minReplicas and maxReplicas
mode Auto       VLMPool's number for one window after another manager wrote it, else `pace.auto`
"""

from __future__ import annotations

from vlm_operator.autoscale.bounds import PoolContext, ReplicaBounds
from vlm_operator.autoscale.history import ExternalWrite
from vlm_operator.autoscale.outcome import Bound, Reason
from vlm_operator.names import MANAGER_AUTOSCALER

LEAST_BASELINE_SECONDS = 60.0  # for which another manager's number is kept at least


def manual(context: PoolContext) -> ReplicaBounds:
    """Bounds in mode Manual."""
    count, before, owner = context.policy.replicas, context.pool.replicas, context.pool.owner
    reason, message = Reason.MANUAL, f"the manifest sets {count} replicas"
    if before not in (None, count):
        message += f", VLMPool had {before}"
        if owner not in (None, MANAGER_AUTOSCALER):
            reason = Reason.PUT_BACK
            message = (
                f"{owner} set VLMPool to {before}, the operator restores {count}: "
                "mode Manual uses scaling.replicas; use mode External to scale VLMPool"
            )
    return context.bounds(reason, message, replicas=count)


def external(context: PoolContext) -> ReplicaBounds:
    """Bounds in mode External; a new VLMPool gets the current number."""
    asked = context.pool.replicas
    count, bound = clamp(context, context.before if asked is None else asked)
    if asked is None:
        message = f"VLMPool is created with {count} replicas"
        return context.bounds(Reason.EXTERNAL, message, replicas=count)
    message = f"VLMPool has {asked} replicas"
    if bound is not None:
        message += f", {bound.lower()}Replicas is {count}"
    return context.bounds(Reason.EXTERNAL, message, replicas=count, limited_by=bound, claim=False)


def off(context: PoolContext) -> ReplicaBounds:
    """Bounds if `autoscaling.policy` is Off."""
    asked, owner = context.pool.replicas, context.pool.owner
    count, bound = clamp(context, context.before if asked is None else asked)
    return context.bounds(
        Reason.OFF,
        "autoscaling.policy is Off: the replicas do not change",
        replicas=count,
        limited_by=bound,
        claim=owner in (None, MANAGER_AUTOSCALER) and (bound is not None or asked is None),
    )


def last_write(context: PoolContext) -> ExternalWrite | None:
    """The last write of another manager in mode Auto; None if the autoscaler owns the number.

    A second number of the same manager within one window is a conflict. It ends when the autoscaler
    owns the number again, or another manager writes it.
    """
    known, asked, owner = context.history.foreign, context.pool.replicas, context.pool.owner
    if asked is None or owner is None or owner == MANAGER_AUTOSCALER:
        return None
    if known is None or known.manager != owner:
        return ExternalWrite(owner, asked, context.now)
    if known.replicas == asked:
        return known
    conflict = known.conflict or context.now - known.since < _baseline_seconds(context)
    return ExternalWrite(owner, asked, context.now, conflict=conflict)


def baseline(context: PoolContext) -> ReplicaBounds | None:
    """Bounds while another manager's number is kept; None if the autoscaler decides."""
    write = context.history.foreign
    if write is None:
        return None
    if not write.conflict and context.now - write.since >= _baseline_seconds(context):
        return None
    owner, asked = write.manager, write.replicas
    reason, message = Reason.FOREIGN_WRITE, f"{owner} set VLMPool to {asked}: kept for one window"
    if write.conflict:
        reason = Reason.SCALING_CONFLICT
        message = (
            f"{owner} keeps writing VLMPool, so the pool is held: use mode External, or delete the "
            f"VLMPool after {owner} has stopped"
        )
    count, bound = clamp(context, asked)
    return context.bounds(
        reason, message, replicas=count, limited_by=bound, claim=False, conflict=write.conflict
    )


def clamp(context: PoolContext, count: int) -> tuple[int, Bound | None]:
    """Return a number within minReplicas and maxReplicas, and the one that changed it."""
    if count > context.policy.maximum:
        return context.policy.maximum, Bound.MAX
    if count < context.policy.minimum:
        return context.policy.minimum, Bound.MIN
    return count, None


def _baseline_seconds(context: PoolContext) -> float:
    return max(context.window, LEAST_BASELINE_SECONDS)
