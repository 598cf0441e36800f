"""One role's pods are replaced while the others stay: old and new talk to the same peers.

target 3, surge 1      old ███        old ███ new ░    old ██ new █░    old █ new ██░    new ███

An old pod whose stages its successor does not load waits for the role that takes them over: the
receiver is ready, traffic moves, the donor drains.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from vlm_operator.names import Role
from vlm_operator.rollout import counts
from vlm_operator.rollout.counts import Key
from vlm_operator.rollout.goal import Goal
from vlm_operator.rollout.pace import Pace
from vlm_operator.state import DeploymentState


def replace_role(
    role: Role,
    goals: Mapping[tuple[Role, str], Goal],
    target: Mapping[tuple[Role, str], int],
    live: Sequence[DeploymentState],
    pace: Pace,
    *,
    behind: Collection[Role],
) -> dict[Key, int]:
    """Decide the replicas of one role's Deployments, all of one compat set.

    Args:
        role: whose.
        goals: of all roles.
        target: replicas of each role and variant in the end.
        live: this role's Deployments.
        pace: what the rollout may do to this role.
        behind: roles whose new pods are not all available.
    """
    own = {variant: goal for (name, variant), goal in goals.items() if name is role}
    wanted = {(role, variant, goal.revision) for variant, goal in own.items()}
    new = [item for item in live if counts.key_of(item) in wanted]
    old = [item for item in live if counts.key_of(item) not in wanted]
    sizes = {variant: target.get((role, variant), 0) for variant in own}
    whole = sum(sizes.values())
    room = whole + pace.surge - counts.existing(old)
    grown = counts.grown({item.variant: item.desired for item in new}, sizes, room)
    found: dict[Key, int] = {
        (role, variant, goal.revision): grown[variant] for variant, goal in own.items()
    }
    if old and waits_for(role, goals, target, old) & set(behind):
        return found | {counts.key_of(item): item.desired for item in old}
    keep = max(0, pace.floor(whole) - counts.available(new))
    return found | {key: count for key, count in counts.shrunk(old, keep).items() if count}


def waits_for(
    role: Role,
    goals: Mapping[tuple[Role, str], Goal],
    target: Mapping[tuple[Role, str], int],
    old: Sequence[DeploymentState],
) -> set[Role]:
    """Roles that take over stages which old pods load and their successors, if any, do not."""
    staffed = {key: goal for key, goal in goals.items() if target.get(key, 0)}
    loaded = frozenset.union(
        frozenset(), *(goal.stages for (name, _), goal in staffed.items() if name is role)
    )
    lost = frozenset.union(frozenset(), *(item.stages for item in old)) - loaded
    if lost or any(name is role for name, _ in goals):
        return {name for (name, _), goal in staffed.items() if goal.stages & lost}
    # a role that leaves and says nothing of its stages waits for everybody
    return {name for name, _ in goals} - {Role.GATEWAY}


def missing(
    role: Role,
    goals: Mapping[tuple[Role, str], Goal],
    target: Mapping[tuple[Role, str], int],
    live: Sequence[DeploymentState],
) -> int:
    """How many pods of a role's goal are not available yet."""
    found = 0
    for (name, variant), goal in goals.items():
        if name is role:
            key = (role, variant, goal.revision)
            new = [item for item in live if counts.key_of(item) == key]
            found += max(0, target.get((role, variant), 0) - counts.available(new))
    return found
