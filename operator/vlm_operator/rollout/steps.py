"""How many replicas of which revision, now: one step at a time, from what is there.

another compat than the goal's is there ─▶ together.py   all roles in steps, gateways included
else, role by role                      ─▶ alone.py      old and new talk to the same peers
strategy Recreate                       ─▶ the old go first, then the new come

Nothing is remembered but on the Deployments themselves: what an old one had at first (`initial`),
and why a new one is not tried again (`failed`). So a step is the same whoever takes it, and how
often.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from vlm_operator.api import RolloutStrategy
from vlm_operator.names import Role
from vlm_operator.rollout import counts
from vlm_operator.rollout.alone import missing, replace_role, waits_for
from vlm_operator.rollout.counts import Key
from vlm_operator.rollout.goal import Course, Goal
from vlm_operator.rollout.pace import Pace
from vlm_operator.rollout.together import Stride, step_together
from vlm_operator.state import DeploymentState


@dataclasses.dataclass(frozen=True)
class Step:
    """What should be there after this turn.

    Attributes:
        replicas: by role, variant and revision; what is missing here goes.
        waiting: why the rollout is not done, "" when it is.
        gateways: replicas of the gateway's Deployment of each compat; what is missing goes.
        initial: what to note on Deployments of old revisions.
        failed: what to note on Deployments that are not tried again.
        failure: one sentence naming pod and cause, "" while nothing failed.
        back: the rollout goes, or went, back to the revision before.
        at: steps done, of `of`; 0 of 0 where roles are replaced on their own.
        over_budget: spec.budget does not allow the next surge pod.
    """

    replicas: Mapping[Key, int]
    waiting: str
    gateways: Mapping[str, int] = dataclasses.field(default_factory=dict)
    initial: Mapping[Key, int] = dataclasses.field(default_factory=dict)
    failed: Mapping[Key, str] = dataclasses.field(default_factory=dict)
    failure: str = ""
    back: bool = False
    at: int = 0
    of: int = 0
    over_budget: bool = False

    @property
    def done(self) -> bool:
        """Nothing but the goal's revisions is left."""
        return not self.waiting


def next_step(
    course: Course,
    target: Mapping[tuple[Role, str], int],
    live: Sequence[DeploymentState],
    gateways: Mapping[str, int],
    paces: Mapping[Role, Pace],
    strategy: RolloutStrategy,
) -> Step:
    """Decide the replicas of every revision from what is there, without memory.

    Args:
        course: where the rollout goes.
        target: replicas of each role and variant of the goals in the end, gateway included.
        live: all Deployments of the service.
        gateways: gateway pods that are there, leaving ones included, by compat.
        paces: what the rollout may do to each role.
        strategy: Recreate empties the old revisions first.
    """
    goals = course.goals
    kept = {**{counts.key_of(item): item.failed for item in live if item.failed}, **course.marks}
    wanted = {(*key, goal.revision) for key, goal in goals.items()}
    compat = goals[Role.GATEWAY, ""].compat
    fronts = {item.compat for item in live if item.role is Role.GATEWAY} - {compat}
    fronts |= {name for name, count in gateways.items() if count} - {compat}
    pools = [item for item in live if item.role is not Role.GATEWAY]
    old = [item for item in pools if counts.key_of(item) not in wanted]
    moving = [item for item in old if item.desired or item.replicas]
    stride = None
    fronted: Mapping[str, int]
    if strategy is RolloutStrategy.RECREATE:
        replicas, fronted = _recreate(goals, target, live, moving, fronts)
        waiting = "old pods drain before new ones start" if moving else ""
    elif fronts or any(item.compat != compat for item in moving):
        stride = step_together(goals, target, live, gateways, paces)
        replicas, fronted, waiting = dict(stride.replicas), stride.gateways, _awaited(stride, goals)
    else:
        replicas, waiting = _roles(goals, target, pools, moving, paces)
        fronted = {compat: target.get((Role.GATEWAY, ""), 0)}
    if fronts and not waiting:
        waiting = "gateways of the old revision finish their streams"
    # the memory of a failed revision is its Deployment, at 0 replicas
    failed = {counts.key_of(item) for item in pools} & kept.keys() - wanted
    replicas |= {key: replicas.get(key, 0) for key in failed if course.back}
    return Step(
        replicas=replicas,
        waiting=waiting,
        gateways=fronted,
        initial=_initial(old, replicas),
        failed={key: said for key, said in kept.items() if key in replicas},
        failure=next(iter(course.failures.values()), ""),
        back=course.back,
        at=stride.at if stride else 0,
        of=stride.of if stride else 0,
    )


def _roles(
    goals: Mapping[tuple[Role, str], Goal],
    target: Mapping[tuple[Role, str], int],
    pools: Sequence[DeploymentState],
    moving: Sequence[DeploymentState],
    paces: Mapping[Role, Pace],
) -> tuple[dict[Key, int], str]:
    """Every role on its own."""
    roles = {role for role, _ in goals if role is not Role.GATEWAY} | {i.role for i in moving}
    lacking = {role: missing(role, goals, target, pools) for role in roles}
    behind = [role for role, count in lacking.items() if count]
    replicas: dict[Key, int] = {}
    for role in sorted(roles):
        own = [item for item in pools if item.role is role]
        pace = paces.get(role, Pace(1, 0))
        replicas |= replace_role(role, goals, target, own, pace, behind=behind)
    left = sum(counts.existing([item]) for item in moving)
    if not left:
        return replicas, ""
    movers = {item.role for item in moving}
    needed = movers | {
        one
        for role in movers
        for one in waits_for(role, goals, target, [i for i in moving if i.role is role])
    }
    awaited = [role for role in behind if role in needed]
    return replicas, _not_ready(awaited, lacking, goals) or _draining(left)


def _recreate(
    goals: Mapping[tuple[Role, str], Goal],
    target: Mapping[tuple[Role, str], int],
    live: Sequence[DeploymentState],
    moving: Sequence[DeploymentState],
    fronts: set[str],
) -> tuple[dict[Key, int], dict[str, int]]:
    """Old pods go, then new ones come. Gateways stay meanwhile: they tell clients to retry."""
    now = {counts.key_of(item): item.desired for item in live}
    replicas: dict[Key, int] = {
        (role, variant, goal.revision): target.get((role, variant), 0)
        for (role, variant), goal in goals.items()
        if role is not Role.GATEWAY
    }
    if moving:
        replicas = {key: min(count, now.get(key, 0)) for key, count in replicas.items()}
    compat, whole = goals[Role.GATEWAY, ""].compat, target.get((Role.GATEWAY, ""), 0)
    own = [item for item in live if item.role is Role.GATEWAY]
    served = counts.available([item for item in own if item.compat == compat]) >= whole
    old = {item.compat: item.desired for item in own if item.compat in fronts and not served}
    return replicas, old | {compat: whole}


def _initial(old: Sequence[DeploymentState], replicas: Mapping[Key, int]) -> dict[Key, int]:
    """What old Deployments had before the rollout took the first of their pods."""
    found = {}
    for item in old:
        key = counts.key_of(item)
        if key in replicas and (item.initial is not None or replicas[key] < item.desired):
            found[key] = item.desired if item.initial is None else item.initial
    return found


def _awaited(stride: Stride, goals: Mapping[tuple[Role, str], Goal]) -> str:
    """What one step of all roles waits for."""
    where = f"step {min(stride.at + 1, stride.of)} of {stride.of}: "
    if stride.retiring is not None:
        return where + "the last gateways of the old revision finish their streams"
    lacking = [role for role in stride.missing if role is not Role.GATEWAY]
    said = _not_ready(lacking or list(stride.missing), stride.missing, goals)
    return where + (said or "pods of the old revision drain")


def _not_ready(
    roles: Sequence[Role], lacking: Mapping[Role, int], goals: Mapping[tuple[Role, str], Goal]
) -> str:
    for role in roles:
        revision = next((goal.revision for key, goal in goals.items() if key[0] is role), "")
        count, one = lacking[role], lacking[role] == 1
        which = f"{count} {role} {'pod' if one else 'pods'} of revision {revision}"
        return f"{which} {'is' if one else 'are'} not ready yet"
    return ""


def _draining(left: int) -> str:
    return f"{left} pods of the old revision drain" if left > 1 else "the last old pod drains"
