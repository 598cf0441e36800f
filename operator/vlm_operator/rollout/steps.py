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

from vlm_operator.api.enums import RolloutStrategy
from vlm_operator.names import Role
from vlm_operator.rollout import replica_counts
from vlm_operator.rollout.coordinated import CoordinatedStep, step_coordinated
from vlm_operator.rollout.replica_counts import SurgeLimits
from vlm_operator.rollout.target import RevisionTargets, RolloutTarget, Sizes
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
        return not self.waiting


def next_step(
    rollout_target: RolloutTarget,
    target: Sizes,
    live: Sequence[DeploymentState],
    gateways: Mapping[str, int],
    limits_by_role: Mapping[Role, SurgeLimits],
    strategy: RolloutStrategy,
) -> Step:
    """Decide the replicas of every revision from the observed state.

    `target` are the replicas of each role and variant after the rollout, gateway included.
    `gateways` is the number of existing gateway pods by compat, draining ones included.
    """
    goals = rollout_target.goals
    noted = {item.key: item.failed for item in live if item.failed}
    noted.update(rollout_target.failed_notes)
    wanted = {(*key, goal.revision) for key, goal in goals.items()}
    compat = goals[Role.GATEWAY, ""].compat
    fronts = {item.compat for item in live if item.role is Role.GATEWAY} - {compat}
    fronts |= {name for name, count in gateways.items() if count} - {compat}
    pools = [item for item in live if item.role is not Role.GATEWAY]
    old = [item for item in pools if item.key not in wanted]
    moving = [item for item in old if item.desired or item.replicas]
    coordinated: CoordinatedStep | None = None
    fronted: Mapping[str, int]
    if strategy is RolloutStrategy.RECREATE:
        replicas, fronted = _recreate(goals, target, live, moving, fronts)
        waiting = "old pods drain before new ones start" if moving else ""
    elif fronts or any(item.compat != compat for item in moving):
        coordinated = step_coordinated(goals, target, live, gateways, limits_by_role)
        replicas, fronted = dict(coordinated.replicas), coordinated.gateways
        waiting = _awaited(coordinated, goals)
    else:
        replicas, waiting = _roles(goals, target, pools, moving, limits_by_role)
        fronted = {compat: target.get((Role.GATEWAY, ""), 0)}
    if fronts and not waiting:
        waiting = "gateways of the old revision finish their streams"
    # a failed revision keeps its Deployment at 0 replicas: its annotation says that it failed
    failed = {item.key for item in pools} & noted.keys() - wanted
    replicas |= {key: replicas.get(key, 0) for key in failed if rollout_target.back}
    return Step(
        replicas=replicas,
        waiting=waiting,
        gateways=fronted,
        initial=_initial(old, replicas),
        failed={key: reason for key, reason in noted.items() if key in replicas},
        failure=next(iter(rollout_target.failures.values()), ""),
        back=rollout_target.back,
        at=coordinated.at if coordinated else 0,
        of=coordinated.of if coordinated else 0,
    )


def _roles(
    goals: RevisionTargets,
    target: Sizes,
    pools: Sequence[DeploymentState],
    moving: Sequence[DeploymentState],
    limits_by_role: Mapping[Role, SurgeLimits],
) -> tuple[dict[Key, int], str]:
    """Replace every role independently; return the replicas and what the rollout waits for."""
    roles = {role for role, _ in goals if role is not Role.GATEWAY} | {i.role for i in moving}
    lacking = {role: _missing(role, goals, target, pools) for role in roles}
    unready = [role for role, count in lacking.items() if count]
    replicas: dict[Key, int] = {}
    for role in sorted(roles):
        own = [item for item in pools if item.role is role]
        limits = limits_by_role.get(role, SurgeLimits(1, 0))
        replicas |= _replace_role(role, goals, target, own, limits, unready=unready)
    num_old = sum(replica_counts.existing([item]) for item in moving)
    if not num_old:
        return replicas, ""
    movers = {item.role for item in moving}
    needed = movers | {
        one
        for role in movers
        for one in _waits_for(role, goals, target, [i for i in moving if i.role is role])
    }
    awaited = [role for role in unready if role in needed]
    return replicas, _not_ready(awaited, lacking, goals) or _draining(num_old)


def _replace_role(
    role: Role,
    goals: RevisionTargets,
    target: Sizes,
    live: Sequence[DeploymentState],
    limits: SurgeLimits,
    *,
    unready: Collection[Role],
) -> dict[Key, int]:
    """Decide the replicas of one role's Deployments `live`, all of one compat set.

    An old Deployment without an entry is deleted. The new pods of `unready` roles are not all
    available.
    """
    own = {variant: goal for (name, variant), goal in goals.items() if name is role}
    wanted = {(role, variant, goal.revision) for variant, goal in own.items()}
    new = [item for item in live if item.key in wanted]
    old = [item for item in live if item.key not in wanted]
    sizes = {variant: target.get((role, variant), 0) for variant in own}
    whole = sum(sizes.values())
    allowed = whole + limits.surge - replica_counts.existing(old)
    grown = replica_counts.grown({item.variant: item.desired for item in new}, sizes, allowed)
    replicas: dict[Key, int] = {
        (role, variant, goal.revision): grown[variant] for variant, goal in own.items()
    }
    if old and _waits_for(role, goals, target, old) & set(unready):
        return replicas | {item.key: item.desired for item in old}
    keep = max(0, limits.floor(whole) - replica_counts.available(new))
    return replicas | {
        key: count for key, count in replica_counts.shrunk(old, keep).items() if count
    }


def _waits_for(
    role: Role, goals: RevisionTargets, target: Sizes, old: Sequence[DeploymentState]
) -> set[Role]:
    """Return the roles that take over stages which the old pods of `role` load and its new do not.

    A goal with 0 replicas takes over nothing.
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
    role: Role, goals: RevisionTargets, target: Sizes, live: Sequence[DeploymentState]
) -> int:
    missing = 0
    for (name, variant), goal in goals.items():
        if name is role:
            key = (role, variant, goal.revision)
            new = [item for item in live if item.key == key]
            missing += max(0, target.get((role, variant), 0) - replica_counts.available(new))
    return missing


def _recreate(
    goals: RevisionTargets,
    target: Sizes,
    live: Sequence[DeploymentState],
    moving: Sequence[DeploymentState],
    fronts: set[str],
) -> tuple[dict[Key, int], dict[str, int]]:
    """End old pods, then start new ones; return replicas, and gateway replicas by compat.

    Old gateways stay until enough new ones are available, because they answer clients with a retry
    time.
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
    return {
        item.key: item.before_rollout
        for item in old
        if item.key in replicas and (item.initial is not None or replicas[item.key] < item.desired)
    }


def _awaited(coordinated: CoordinatedStep, goals: RevisionTargets) -> str:
    where = f"step {min(coordinated.at + 1, coordinated.of)} of {coordinated.of}: "
    if coordinated.retiring is not None:
        return where + "the last gateways of the old revision finish their streams"
    lacking = [role for role in coordinated.missing if role is not Role.GATEWAY]
    awaited = _not_ready(lacking or list(coordinated.missing), coordinated.missing, goals)
    return where + (awaited or "pods of the old revision drain")


def _not_ready(roles: Sequence[Role], lacking: Mapping[Role, int], goals: RevisionTargets) -> str:
    if not roles:
        return ""
    role, count = roles[0], lacking[roles[0]]
    revision = next((goal.revision for key, goal in goals.items() if key[0] is role), "")
    pods, are = ("pod", "is") if count == 1 else ("pods", "are")
    return f"{count} {role} {pods} of revision {revision} {are} not ready yet"


def _draining(num_pods: int) -> str:
    return (
        f"{num_pods} pods of the old revision drain" if num_pods > 1 else "the last old pod drains"
    )
