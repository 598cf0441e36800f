"""Replaces the pods of one role; old and new pods can communicate with the same peers.

target 3, surge 1      old ███        old ███ new ░    old ██ new █░    old █ new ██░    new ███

If the new pods of a role do not load a stage that its old pods load, the old pods stay until the
new pods of the role that takes over the stage are available.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from vlm_operator.names import Role
from vlm_operator.rollout import replica_counts
from vlm_operator.rollout.replica_counts import Key
from vlm_operator.rollout.surge import SurgeLimits
from vlm_operator.rollout.target import RevisionTarget
from vlm_operator.state import DeploymentState


def replace_role(
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
    new = [item for item in live if replica_counts.key_of(item) in wanted]
    old = [item for item in live if replica_counts.key_of(item) not in wanted]
    sizes = {variant: target.get((role, variant), 0) for variant in own}
    whole = sum(sizes.values())
    room = whole + limits.surge - replica_counts.existing(old)
    grown = replica_counts.grown({item.variant: item.desired for item in new}, sizes, room)
    found: dict[Key, int] = {
        (role, variant, goal.revision): grown[variant] for variant, goal in own.items()
    }
    if old and waits_for(role, goals, target, old) & set(behind):
        return found | {replica_counts.key_of(item): item.desired for item in old}
    keep = max(0, limits.floor(whole) - replica_counts.available(new))
    return found | {key: count for key, count in replica_counts.shrunk(old, keep).items() if count}


def waits_for(
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


def missing(
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
            new = [item for item in live if replica_counts.key_of(item) == key]
            found += max(0, target.get((role, variant), 0) - replica_counts.available(new))
    return found
