"""Who owns a pool's number, and what follows.

Manual    this manifest: VLMPool is put back to it
External  whoever writes VLMPool: the Deployments follow, within min, max and budget
Auto      the rule of `pace`: VLMPool follows it, unless somebody else has just written there
"""

from __future__ import annotations

import dataclasses

from vlm_operator import names
from vlm_operator.autoscale.reasons import Bound, Reason
from vlm_operator.autoscale.settling.goal import Case, Goal
from vlm_operator.autoscale.settling.paced import Foreign

# Somebody else's number stands at least this long, however short the window is.
LEAST_BASELINE_SECONDS = 60.0


def manual(case: Case) -> Goal:
    """The manifest's number."""
    count, before, owner = case.policy.replicas, case.pool.replicas, case.pool.owner
    if before in (None, count):
        return case.exactly(count, Reason.MANUAL, f"spec asks for {count}")
    if owner not in (None, names.MANAGER_AUTOSCALER):
        message = (
            f"{owner} set VLMPool to {before}, put back to {count}: "
            "mode Manual takes scaling.replicas; use mode External to scale VLMPool"
        )
        return case.exactly(count, Reason.PUT_BACK, message)
    return case.exactly(count, Reason.MANUAL, f"spec asks for {count} instead of {before}")


def external(case: Case) -> Goal:
    """The number of whoever writes VLMPool; one that is missing starts with what is live."""
    asked = case.pool.replicas
    if asked is None:
        start, _ = clamp(case, case.before)
        return case.exactly(start, Reason.EXTERNAL, f"VLMPool starts with {start}")
    count, bound = clamp(case, asked)
    message = f"VLMPool asks for {asked}"
    if bound is not None:
        message += f", {bound.lower()}Replicas is {count}"
    return case.exactly(count, Reason.EXTERNAL, message, limited_by=bound, claim=False)


def foreign_write(case: Case) -> tuple[Goal | None, Foreign | None]:
    """What somebody else's number in mode Auto means: once it is the baseline, twice a conflict.

    Returns:
        The goal, None where the number is ours to decide; and what to remember.
    """
    known, asked, owner = case.pace.foreign, case.pool.replicas, case.pool.owner
    if asked is None or owner is None or owner == names.MANAGER_AUTOSCALER:
        return None, None
    window = max(case.window, LEAST_BASELINE_SECONDS)
    if known is None or known.manager != owner:
        known = Foreign(owner, asked, case.now)
    elif known.replicas != asked:
        again = known.conflict or case.now - known.since < window
        known = Foreign(owner, asked, case.now, conflict=again)
    if not known.conflict and case.now - known.since >= window:
        return None, known
    count, bound = clamp(case, asked)
    reason, message = Reason.FOREIGN_WRITE, f"{owner} set VLMPool to {asked}: kept for one window"
    if known.conflict:
        reason = Reason.SCALING_CONFLICT
        message = (
            f"{owner} keeps writing VLMPool, so it is held: use mode External, or delete "
            f"the VLMPool once {owner} has stopped"
        )
    goal = case.exactly(
        count, reason, message, limited_by=bound, claim=False, conflict=known.conflict
    )
    return goal, known


def clamp(case: Case, count: int) -> tuple[int, Bound | None]:
    """Bring a number within minReplicas and maxReplicas; tells which one moved it."""
    if count > case.policy.maximum:
        return case.policy.maximum, Bound.MAX
    if count < case.policy.minimum:
        return case.policy.minimum, Bound.MIN
    return count, None


def off(case: Case) -> Goal:
    """Nothing decides: the number that stands, within its bounds."""
    asked = case.before if case.pool.replicas is None else case.pool.replicas
    count, bound = clamp(case, asked)
    message = "autoscaling.policy is Off: the number stays"
    goal = case.exactly(count, Reason.OFF, message, limited_by=bound)
    ours = case.pool.owner in (None, names.MANAGER_AUTOSCALER)
    return dataclasses.replace(
        goal, claim=ours and (bound is not None or case.pool.replicas is None)
    )
