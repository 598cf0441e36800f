"""Decides the replicas of each revision: one step of a rollout, from the observed state.

strategy Recreate              ─▶ old pods end, then new pods start
pods of another compat exist   ─▶ coordinated.py   all roles in steps, gateways included
else, role by role             ─▶ old and new communicate with the same peers

target 3, surge 1      old ███        old ███ new ░    old ██ new █░    old █ new ██░    new ███

If the new pods of a role do not load a stage that its old pods load, the old pods stay until the
new pods of the role that takes over the stage are available.

Only annotations of the Deployments keep state: the replicas of an old one before the rollout
(`initial`), and the reason why a new one is not tried again (`failed`). So a step is idempotent
and does not depend on the process that takes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from vlm_operator.api import RolloutStrategy
from vlm_operator.names import Role
from vlm_operator.rollout import replica_counts
from vlm_operator.rollout.coordinated import CoordinatedStep, step_coordinated
from vlm_operator.rollout.replica_counts import SurgeLimits
from vlm_operator.rollout.target import RevisionTarget, RolloutTarget
from vlm_operator.state import DeploymentState, Key


@dataclasses.dataclass(frozen=True)
class Step:
    """The desired state after this turn.

    Attributes:
        replicas: replicas by role, variant and revision; a Deployment without an entry is deleted.
        waiting: why the rollout is not done; "" if it is done.
        gateways: gateway replicas by compat; a gateway Deployment without an entry is deleted.
        initial: value of the `initial` annotation of old Deployments.
        failed: value of the `failed` annotation of Deployments that are not tried again.
        failure: one sentence naming pod and cause; "" if nothing failed.
        back: the rollout rolls back, or rolled back, to the previous revision.
        at: number of completed steps; 0 if roles are replaced independently.
        of: total number of steps; 0 if roles are replaced independently.
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
        """Whether only pods of the goal's revisions exist."""
        return not self.waiting


def next_step(
    rollout_target: RolloutTarget,
    target: Mapping[tuple[Role, str], int],
    live: Sequence[DeploymentState],
    gateways: Mapping[str, int],
    limits_by_role: Mapping[Role, SurgeLimits],
    strategy: RolloutStrategy,
) -> Step:
    """Decide the replicas of every revision from the observed state.

    Args:
        rollout_target: target revisions and failures.
        target: replicas of each role and variant after the rollout, gateway included.
        live: all Deployments of the service.
        gateways: number of existing gateway pods by compat, draining ones included.
        limits_by_role: surge and unavailability limits of each role.
        strategy: with Recreate, old pods end before new pods start.
    """
    goals = rollout_target.goals
    kept = {
        **{item.key: item.failed for item in live if item.failed},
        **rollout_target.marks,
    }
    wanted = {(*key, goal.revision) for key, goal in goals.items()}
    compat = goals[Role.GATEWAY, ""].compat
    fronts = {item.compat for item in live if item.role is Role.GATEWAY} - {compat}
    fronts |= {name for name, count in gateways.items() if count} - {compat}
    pools = [item for item in live if item.role is not Role.GATEWAY]
    old = [item for item in pools if item.key not in wanted]
    moving = [item for item in old if item.desired or item.replicas]
    coordinated = None
    fronted: Mapping[str, int]
    if strategy is RolloutStrategy.RECREATE:
        replicas, fronted = _recreate(goals, target, live, moving, fronts)
        waiting = "old pods drain before new ones start" if moving else ""
    elif fronts or any(item.compat != compat for item in moving):
        coordinated = step_coordinated(goals, target, live, gateways, limits_by_role)
        replicas, fronted, waiting = (
            dict(coordinated.replicas),
            coordinated.gateways,
            _awaited(coordinated, goals),
        )
    else:
        replicas, waiting = _roles(goals, target, pools, moving, limits_by_role)
        fronted = {compat: target.get((Role.GATEWAY, ""), 0)}
    if fronts and not waiting:
        waiting = "gateways of the old revision finish their streams"
    # a failed revision keeps its Deployment at 0 replicas: its annotation says that it failed
    failed = {item.key for item in pools} & kept.keys() - wanted
    replicas |= {key: replicas.get(key, 0) for key in failed if rollout_target.back}
    return Step(
        replicas=replicas,
        waiting=waiting,
        gateways=fronted,
        initial=_initial(old, replicas),
        failed={key: said for key, said in kept.items() if key in replicas},
        failure=next(iter(rollout_target.failures.values()), ""),
        back=rollout_target.back,
        at=coordinated.at if coordinated else 0,
        of=coordinated.of if coordinated else 0,
    )


def _roles(
    goals: Mapping[tuple[Role, str], RevisionTarget],
    target: Mapping[tuple[Role, str], int],
    pools: Sequence[DeploymentState],
    moving: Sequence[DeploymentState],
    limits_by_role: Mapping[Role, SurgeLimits],
) -> tuple[dict[Key, int], str]:
    """Replace every role independently; return the replicas and what the rollout waits for."""
    roles = {role for role, _ in goals if role is not Role.GATEWAY} | {i.role for i in moving}
    lacking = {role: _missing(role, goals, target, pools) for role in roles}
    behind = [role for role, count in lacking.items() if count]
    replicas: dict[Key, int] = {}
    for role in sorted(roles):
        own = [item for item in pools if item.role is role]
        limits = limits_by_role.get(role, SurgeLimits(1, 0))
        replicas |= _replace_role(role, goals, target, own, limits, behind=behind)
    left = sum(replica_counts.existing([item]) for item in moving)
    if not left:
        return replicas, ""
    movers = {item.role for item in moving}
    needed = movers | {
        one
        for role in movers
        for one in _waits_for(role, goals, target, [i for i in moving if i.role is role])
    }
    awaited = [role for role in behind if role in needed]
    return replicas, _not_ready(awaited, lacking, goals) or _draining(left)


def _replace_role(
    role: Role,
    goals: Mapping[tuple[Role, str], RevisionTarget],
    target: Mapping[tuple[Role, str], int],
    live: Sequence[DeploymentState],
    limits: SurgeLimits,
    *,
    behind: Collection[Role],
) -> dict[Key, int]:
    """Decide the replicas of one role's Deployments, all of one compat set.

    Args:
        role: the role to replace.
        goals: target revisions of all roles.
        target: replicas of each role and variant after the rollout.
        live: Deployments of this role.
        limits: surge and unavailability limits of this role.
        behind: roles whose new pods are not all available.

    Returns:
        Replicas by Deployment; an old Deployment without an entry is deleted.
    """
    own = {variant: goal for (name, variant), goal in goals.items() if name is role}
    wanted = {(role, variant, goal.revision) for variant, goal in own.items()}
    new = [item for item in live if item.key in wanted]
    old = [item for item in live if item.key not in wanted]
    sizes = {variant: target.get((role, variant), 0) for variant in own}
    whole = sum(sizes.values())
    room = whole + limits.surge - replica_counts.existing(old)
    grown = replica_counts.grown({item.variant: item.desired for item in new}, sizes, room)
    found: dict[Key, int] = {
        (role, variant, goal.revision): grown[variant] for variant, goal in own.items()
    }
    if old and _waits_for(role, goals, target, old) & set(behind):
        return found | {item.key: item.desired for item in old}
    keep = max(0, limits.floor(whole) - replica_counts.available(new))
    return found | {key: count for key, count in replica_counts.shrunk(old, keep).items() if count}


def _waits_for(
    role: Role,
    goals: Mapping[tuple[Role, str], RevisionTarget],
    target: Mapping[tuple[Role, str], int],
    old: Sequence[DeploymentState],
) -> set[Role]:
    """Return the roles that take over stages which the old pods of `role` load and its new do not.

    Args:
        role: the role whose old pods may wait.
        goals: target revisions of all roles.
        target: replicas of each role and variant; a goal with 0 replicas takes over nothing.
        old: old Deployments of `role`.
    """
    staffed = {key: goal for key, goal in goals.items() if target.get(key, 0)}
    loaded = frozenset.union(
        frozenset(), *(goal.stages for (name, _), goal in staffed.items() if name is role)
    )
    lost = frozenset.union(frozenset(), *(item.stages for item in old)) - loaded
    if lost or any(name is role for name, _ in goals):
        return {name for (name, _), goal in staffed.items() if goal.stages & lost}
    # if a removed role's Deployments do not name their stages, its pods wait for all other roles
    return {name for name, _ in goals} - {Role.GATEWAY}


def _missing(
    role: Role,
    goals: Mapping[tuple[Role, str], RevisionTarget],
    target: Mapping[tuple[Role, str], int],
    live: Sequence[DeploymentState],
) -> int:
    """Return how many pods of a role's goals are not available yet."""
    found = 0
    for (name, variant), goal in goals.items():
        if name is role:
            key = (role, variant, goal.revision)
            new = [item for item in live if item.key == key]
            found += max(0, target.get((role, variant), 0) - replica_counts.available(new))
    return found


def _recreate(
    goals: Mapping[tuple[Role, str], RevisionTarget],
    target: Mapping[tuple[Role, str], int],
    live: Sequence[DeploymentState],
    moving: Sequence[DeploymentState],
    fronts: set[str],
) -> tuple[dict[Key, int], dict[str, int]]:
    """End old pods, then start new ones.

    Old gateways stay until enough new ones are available, because they answer clients with a retry
    time.

    Returns:
        Replicas of the pools' Deployments, and gateway replicas by compat.
    """
    now = {item.key: item.desired for item in live}
    replicas: dict[Key, int] = {
        (role, variant, goal.revision): target.get((role, variant), 0)
        for (role, variant), goal in goals.items()
        if role is not Role.GATEWAY
    }
    if moving:
        replicas = {key: min(count, now.get(key, 0)) for key, count in replicas.items()}
    compat, whole = goals[Role.GATEWAY, ""].compat, target.get((Role.GATEWAY, ""), 0)
    own = [item for item in live if item.role is Role.GATEWAY]
    served = replica_counts.available([item for item in own if item.compat == compat]) >= whole
    old = {item.compat: item.desired for item in own if item.compat in fronts and not served}
    return replicas, old | {compat: whole}


def _initial(old: Sequence[DeploymentState], replicas: Mapping[Key, int]) -> dict[Key, int]:
    """Return the replicas of old Deployments from before the rollout removed their first pod."""
    found = {}
    for item in old:
        key = item.key
        if key in replicas and (item.initial is not None or replicas[key] < item.desired):
            found[key] = item.before_rollout
    return found


def _awaited(coordinated: CoordinatedStep, goals: Mapping[tuple[Role, str], RevisionTarget]) -> str:
    """Say what a coordinated step waits for."""
    where = f"step {min(coordinated.at + 1, coordinated.of)} of {coordinated.of}: "
    if coordinated.retiring is not None:
        return where + "the last gateways of the old revision finish their streams"
    lacking = [role for role in coordinated.missing if role is not Role.GATEWAY]
    said = _not_ready(lacking or list(coordinated.missing), coordinated.missing, goals)
    return where + (said or "pods of the old revision drain")


def _not_ready(
    roles: Sequence[Role],
    lacking: Mapping[Role, int],
    goals: Mapping[tuple[Role, str], RevisionTarget],
) -> str:
    for role in roles:
        revision = next((goal.revision for key, goal in goals.items() if key[0] is role), "")
        count, one = lacking[role], lacking[role] == 1
        which = f"{count} {role} {'pod' if one else 'pods'} of revision {revision}"
        return f"{which} {'is' if one else 'are'} not ready yet"
    return ""


def _draining(left: int) -> str:
    return f"{left} pods of the old revision drain" if left > 1 else "the last old pod drains"
