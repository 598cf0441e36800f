"""Chooses the target of a rollout: the manifest's revision, or the previous one if it failed.

wanted revision ─ its Deployment has annotation `failed` ─▶ the revision that it should replace
                └ else ─▶ the wanted revision

If a pod of the new revision is not ready within the deadline, the revision has failed. With
onFailure Rollback, an annotation of its Deployment stores the reason. The Deployment stays at 0
replicas until the manifest asks for another revision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from vlm_operator.api.enums import OnFailure
from vlm_operator.api.policy import Rollout
from vlm_operator.names import Role
from vlm_operator.state import DeploymentState, Key, PodState, Revision

RoleVariant = tuple[Role, str]
CRASHES = 3  # restarts from which a short time of readiness does not count as recovery


@dataclasses.dataclass(frozen=True)
class RevisionTarget:
    """The revision that one role and variant runs after the rollout.

    Attributes:
        stages: stages that its pods load.
    """

    revision: str
    compat: str
    stages: frozenset[str]


RevisionTargets = Mapping[RoleVariant, RevisionTarget]
Sizes = Mapping[RoleVariant, int]  # replicas


@dataclasses.dataclass(frozen=True)
class RolloutTarget:
    """The target revision of each role and variant.

    Attributes:
        goals: target revisions by role and variant, gateway included.
        failures: failures by role and variant; one sentence naming pod and cause.
        back: some goal differs from the manifest: the rollout rolls back.
        failed_notes: values of the `failed` annotation of Deployments that are not tried again.
    """

    goals: RevisionTargets
    failures: Mapping[RoleVariant, str]
    back: bool
    failed_notes: Mapping[Key, str]


def select_target(
    revisions: Mapping[RoleVariant, Revision],
    stages: Mapping[Role, frozenset[str]],
    deployments: Sequence[DeploymentState],
    pods: Iterable[PodState],
    policy: Rollout,
    *,
    unschedulable_timeout: float,
    now: float,
    progressed: float = 0.0,
) -> RolloutTarget:
    """Choose the goals of this turn.

    `stages` are those that each role loads. A pod's deadline starts at its creation or at
    `progressed`, the time of the service's last progress, whichever is later. A pod may wait
    `unschedulable_timeout` seconds for a node before the rollout drains another pod for it.
    """
    wanted = {
        key: RevisionTarget(item.id, item.resolved.compat, stages.get(key[0], frozenset()))
        for key, item in revisions.items()
    }
    noted = {item.key: item.failed for item in deployments if item.failed}
    failures = {
        key: noted[*key, goal.revision]
        for key, goal in wanted.items()
        if (*key, goal.revision) in noted
    }
    marked = set(failures)
    old = [item for item in deployments if _is_old(item, wanted)]
    if old:
        deadline = policy.progress_deadline_seconds
        fresh = _failing(wanted, pods, deadline, unschedulable_timeout, now, progressed)
        failures |= {key: cause for key, cause in fresh.items() if key not in failures}
    returning = policy.on_failure is OnFailure.ROLLBACK
    failed_notes = {
        (*key, wanted[key].revision): cause
        for key, cause in failures.items()
        if key not in marked and returning and _can_roll_back(key, wanted, old)
    }
    returning_keys = [
        key for key in failures if key in marked or (*key, wanted[key].revision) in failed_notes
    ]
    goals = _rolled_back(wanted, old, returning_keys)
    return RolloutTarget(goals, failures, back=goals != wanted, failed_notes=failed_notes)


def _is_old(item: DeploymentState, wanted: RevisionTargets) -> bool:
    goal = wanted.get((item.role, item.variant))
    if item.role is Role.GATEWAY:
        return goal is None or item.compat != goal.compat
    return goal is None or item.revision != goal.revision


def _failing(
    wanted: RevisionTargets,
    pods: Iterable[PodState],
    deadline: float,
    unschedulable_timeout: float,
    now: float,
    progressed: float,
) -> dict[RoleVariant, str]:
    """Return one failure sentence for each role and variant with a pod past its deadline.

    Of several such pods, one with a known cause is named, then the oldest.
    """
    failures: dict[RoleVariant, str] = {}
    for pod in sorted(pods, key=lambda item: (not item.blocked, item.created, item.name)):
        key = (pod.role, pod.variant)
        goal = wanted.get(key)
        if goal is None or pod.revision != goal.revision or key in failures:
            continue
        # a pending pod may get its node only after the rollout drained another pod for it
        allowed = max(deadline, 2 * unschedulable_timeout) if pod.pending else deadline
        stuck = pod.restarts >= CRASHES or now - (pod.unready_since or pod.created) >= deadline
        began = pod.created if pod.restarts >= CRASHES else max(pod.created, progressed)
        if pod.ready or pod.draining or pod.finished or now - began < allowed or not stuck:
            continue
        cause = pod.blocked or ("waits for a node" if pod.pending else "does not become ready")
        failures[key] = f"{pod.role} pod {pod.name} of revision {pod.revision}: {cause}"
    return failures


def _can_roll_back(
    key: RoleVariant, wanted: RevisionTargets, old: Sequence[DeploymentState]
) -> bool:
    return _same_compat(key, wanted, old) != [] or _previous_set(wanted, old) is not None


def _rolled_back(
    wanted: RevisionTargets, old: Sequence[DeploymentState], failed: Iterable[RoleVariant]
) -> dict[RoleVariant, RevisionTarget]:
    """Return the goals with the failed ones replaced by previous revisions."""
    goals = dict(wanted)
    for key in failed:
        role = key[0]
        peers = _same_compat(key, wanted, old)
        if peers:
            # only the failed role rolls back; the others of its compat set keep their goals
            goals = {name: goal for name, goal in goals.items() if name[0] is not role}
            goals |= {(role, item.variant): _goal(item) for item in _newest(peers)}
            continue
        before = _previous_set(wanted, old)
        if before is None:
            continue
        members = [item for item in old if item.compat == before and not item.failed]
        return newest_goals(members)
    return goals


def newest_goals(members: Iterable[DeploymentState]) -> dict[RoleVariant, RevisionTarget]:
    """Return the goals that keep one set of Deployments as it is."""
    return {(item.role, item.variant): _goal(item) for item in _newest(members)}


def _same_compat(
    key: RoleVariant, wanted: RevisionTargets, old: Sequence[DeploymentState]
) -> list[DeploymentState]:
    """Return the old Deployments to which a role can roll back without the others.

    They are of the wanted compat. A gateway has none.
    """
    role, compat = key[0], wanted[key].compat
    if role is Role.GATEWAY:
        return []
    return [item for item in old if (item.role, item.compat) == (role, compat) and not item.failed]


def _previous_set(wanted: RevisionTargets, old: Iterable[DeploymentState]) -> str | None:
    """Return the old compat set with the most decode pods; None if no old set has decode pods."""
    new = {goal.compat for goal in wanted.values()}
    sizes: dict[str, int] = {}
    for item in old:
        if item.role is Role.DECODE and item.compat not in new and not item.failed:
            sizes[item.compat] = sizes.get(item.compat, 0) + max(item.desired, item.available)
    return max(sizes, key=lambda compat: (sizes[compat], compat), default=None)


def _newest(items: Iterable[DeploymentState]) -> list[DeploymentState]:
    """Return one Deployment of each role and variant: the largest, then the newest."""
    best: dict[RoleVariant, DeploymentState] = {}
    for item in sorted(items, key=lambda one: (one.desired, one.created, one.name)):
        best[item.role, item.variant] = item
    return list(best.values())


def _goal(item: DeploymentState) -> RevisionTarget:
    return RevisionTarget(item.revision, item.compat, item.stages)


def sizes(
    goals: RevisionTargets, target: Sizes, live: Sequence[DeploymentState]
) -> dict[RoleVariant, int]:
    """Return the replicas of each goal.

    If a rollback restores other variants, the pool's target is distributed over them by their
    former replicas. A role that the manifest no longer has keeps its former size.
    """
    replicas: dict[RoleVariant, int] = {}
    for role in {name for name, _ in goals}:
        variants = sorted(variant for name, variant in goals if name is role)
        asked = {variant: count for (name, variant), count in target.items() if name is role}
        if set(asked) == set(variants):
            replicas |= {(role, variant): asked[variant] for variant in variants}
            continue
        had = {
            item.variant: item.before_rollout
            for item in live
            if item.role is role
            and item.revision == goals.get((role, item.variant), _NOWHERE).revision
        }
        whole, left = sum(had.values()), sum(asked.values()) if asked else sum(had.values())
        for variant in variants:
            part = round(left * had.get(variant, 0) / whole) if whole else left
            replicas[role, variant] = part
            left, whole = left - part, whole - had.get(variant, 0)
    return replicas


_NOWHERE = RevisionTarget("", "", frozenset())
