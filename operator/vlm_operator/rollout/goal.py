"""Where a rollout goes: to what the manifest asks for, or back, if that was tried and failed.

wanted revision ─ its Deployment carries `failed` ─▶ the revision that it was to replace
                └ else ─▶ itself

A pod of the new revision that is not ready within the deadline has failed. With onFailure
Rollback the reason is written onto its Deployment, which stays at 0 replicas as the memory of it
until the manifest asks for another revision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from vlm_operator.api.enums import OnFailure
from vlm_operator.api.policy import Rollout
from vlm_operator.names import Role
from vlm_operator.rollout.counts import Key, key_of
from vlm_operator.state import DeploymentState, PodState, Revision

CRASHES = 3  # restarts after which short times of readiness are no recovery


@dataclasses.dataclass(frozen=True)
class Goal:
    """What one role and variant should run in the end of this rollout."""

    revision: str
    compat: str
    stages: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Course:
    """Where the service goes.

    Attributes:
        goals: by role and variant, gateway included.
        failures: what failed, by role and variant; one sentence naming pod and cause.
        back: some goal is not what the manifest asks for.
        marks: sentences to write onto Deployments, so that they are not tried again.
    """

    goals: Mapping[tuple[Role, str], Goal]
    failures: Mapping[tuple[Role, str], str]
    back: bool
    marks: Mapping[Key, str]


def course(
    revisions: Mapping[tuple[Role, str], Revision],
    stages: Mapping[Role, frozenset[str]],
    deployments: Sequence[DeploymentState],
    pods: Iterable[PodState],
    policy: Rollout,
    *,
    patience: float,
    now: float,
    progressed: float = 0.0,
) -> Course:
    """Choose the goals of this turn.

    Args:
        revisions: what the manifest asks for.
        stages: what each role is to load.
        deployments: what is there.
        pods: of all roles.
        policy: spec.rollout.
        patience: seconds that a pod may wait for a node before one is drained for it.
        now: seconds since the epoch.
        progressed: when the service last got on; the deadline counts from there at the earliest.
    """
    wanted = {
        key: Goal(item.id, item.resolved.compat, stages.get(key[0], frozenset()))
        for key, item in revisions.items()
    }
    known = {key_of(item): item for item in deployments}
    failures = {
        key: live.failed
        for key, goal in wanted.items()
        if (live := known.get((*key, goal.revision))) is not None and live.failed
    }
    marked = set(failures)
    old = [item for item in deployments if _is_old(item, wanted)]
    if old:
        deadline = policy.progress_deadline_seconds
        fresh = _failing(wanted, pods, deadline, patience, now, progressed)
        failures |= {key: said for key, said in fresh.items() if key not in failures}
    returning = policy.on_failure is OnFailure.ROLLBACK
    marks = {
        (*key, wanted[key].revision): said
        for key, said in failures.items()
        if key not in marked and returning and _way_back(key, wanted, old)
    }
    backward = [key for key in failures if key in marked or (*key, wanted[key].revision) in marks]
    goals = _back(wanted, old, backward)
    return Course(goals, failures, back=goals != wanted, marks=marks)


def _is_old(item: DeploymentState, wanted: Mapping[tuple[Role, str], Goal]) -> bool:
    goal = wanted.get((item.role, item.variant))
    if item.role is Role.GATEWAY:
        return goal is None or item.compat != goal.compat
    return goal is None or item.revision != goal.revision


def _failing(
    wanted: Mapping[tuple[Role, str], Goal],
    pods: Iterable[PodState],
    deadline: float,
    patience: float,
    now: float,
    progressed: float,
) -> dict[tuple[Role, str], str]:
    """The worst pod of each role and variant that had its time."""
    found: dict[tuple[Role, str], str] = {}
    for pod in sorted(pods, key=lambda item: (not item.blocked, item.created, item.name)):
        key = (pod.role, pod.variant)
        goal = wanted.get(key)
        if goal is None or pod.revision != goal.revision or key in found:
            continue
        # a pod that waits for a node gets one once another is drained for it
        allowed = max(deadline, 2 * patience) if pod.pending else deadline
        stuck = pod.restarts >= CRASHES or now - (pod.unready_since or pod.created) >= deadline
        began = pod.created if pod.restarts >= CRASHES else max(pod.created, progressed)
        if pod.ready or pod.draining or pod.finished or now - began < allowed or not stuck:
            continue
        cause = pod.blocked or ("waits for a node" if pod.pending else "does not become ready")
        found[key] = f"{pod.role} pod {pod.name} of revision {pod.revision}: {cause}"
    return found


def _way_back(
    key: tuple[Role, str], wanted: Mapping[tuple[Role, str], Goal], old: Sequence[DeploymentState]
) -> bool:
    return _alone(key, wanted, old) != [] or _set_before(wanted, old) is not None


def _back(
    wanted: Mapping[tuple[Role, str], Goal],
    old: Sequence[DeploymentState],
    failed: Iterable[tuple[Role, str]],
) -> dict[tuple[Role, str], Goal]:
    """The goals with failed ones replaced by what was there before."""
    goals = dict(wanted)
    for key in failed:
        role = key[0]
        alone = _alone(key, wanted, old)
        if alone:
            # its own role goes back, the others of the same compat set stay as they are wanted
            goals = {name: goal for name, goal in goals.items() if name[0] is not role}
            goals |= {(role, item.variant): _goal(item) for item in _newest(alone)}
            continue
        before = _set_before(wanted, old)
        if before is None:
            continue
        members = [item for item in old if item.compat == before and not item.failed]
        return {(item.role, item.variant): _goal(item) for item in _newest(members)}
    return goals


def _alone(
    key: tuple[Role, str], wanted: Mapping[tuple[Role, str], Goal], old: Sequence[DeploymentState]
) -> list[DeploymentState]:
    """What a role may go back to on its own: pods that the others can talk to."""
    role, compat = key[0], wanted[key].compat
    if role is Role.GATEWAY:
        return []
    return [item for item in old if (item.role, item.compat) == (role, compat) and not item.failed]


def _set_before(
    wanted: Mapping[tuple[Role, str], Goal], old: Iterable[DeploymentState]
) -> str | None:
    """The compat set to go back to, the fullest first; None where there is none that serves."""
    new = {goal.compat for goal in wanted.values()}
    sizes: dict[str, int] = {}
    for item in old:
        if item.role is Role.DECODE and item.compat not in new and not item.failed:
            sizes[item.compat] = sizes.get(item.compat, 0) + max(item.desired, item.available)
    return max(sizes, key=lambda compat: (sizes[compat], compat), default=None)


def _newest(items: Iterable[DeploymentState]) -> list[DeploymentState]:
    """One Deployment of each role and variant: the largest, then the youngest."""
    best: dict[tuple[Role, str], DeploymentState] = {}
    for item in sorted(items, key=lambda one: (one.desired, one.created, one.name)):
        best[item.role, item.variant] = item
    return list(best.values())


def _goal(item: DeploymentState) -> Goal:
    return Goal(item.revision, item.compat, item.stages)


def sizes(
    goals: Mapping[tuple[Role, str], Goal],
    target: Mapping[tuple[Role, str], int],
    live: Sequence[DeploymentState],
) -> dict[tuple[Role, str], int]:
    """The target of each goal; on the way back, the pools' targets over the variants of then.

    A role that the manifest has no longer keeps the size that it had.
    """
    found: dict[tuple[Role, str], int] = {}
    for role in {name for name, _ in goals}:
        variants = sorted(variant for name, variant in goals if name is role)
        asked = {variant: count for (name, variant), count in target.items() if name is role}
        if set(asked) == set(variants):
            found |= {(role, variant): asked[variant] for variant in variants}
            continue
        had = {
            item.variant: item.desired if item.initial is None else item.initial
            for item in live
            if item.role is role
            and item.revision == goals.get((role, item.variant), _NOWHERE).revision
        }
        whole, left = sum(had.values()), sum(asked.values()) if asked else sum(had.values())
        for variant in variants:
            part = round(left * had.get(variant, 0) / whole) if whole else left
            found[role, variant] = part
            left, whole = left - part, whole - had.get(variant, 0)
    return found


_NOWHERE = Goal("", "", frozenset())
