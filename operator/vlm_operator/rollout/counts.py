"""Sums over Deployments, and how a change of a sum is shared out among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vlm_operator.names import Role
from vlm_operator.state import DeploymentState

Key = tuple[Role, str, str]  # role, variant, revision


def key_of(item: DeploymentState) -> Key:
    """Role, variant and revision."""
    return (item.role, item.variant, item.revision)


def desired(items: Iterable[DeploymentState]) -> int:
    """Pods that are asked for."""
    return sum(item.desired for item in items)


def existing(items: Iterable[DeploymentState]) -> int:
    """Pods that are asked for, or still there."""
    return sum(max(item.desired, item.replicas) for item in items)


def available(items: Iterable[DeploymentState]) -> int:
    """Pods that are ready, and have been for long enough."""
    return sum(min(item.available, item.desired) for item in items)


def initial(items: Iterable[DeploymentState]) -> int:
    """Pods that were asked for when the rollout began to take them."""
    return sum(item.desired if item.initial is None else item.initial for item in items)


def grown(current: Mapping[str, int], target: Mapping[str, int], total: int) -> dict[str, int]:
    """Bring variants from `current` towards `target`, `total` pods in all at most.

    No variant shrinks but to its target; what is added goes where most is missing.
    """
    found = {name: min(current.get(name, 0), count) for name, count in target.items()}
    while sum(found.values()) < min(total, sum(target.values())):
        name = max(found, key=lambda item: (target[item] - found[item], item))
        found[name] += 1
    return found


def shrunk(items: Sequence[DeploymentState], total: int, *, least: int = 0) -> dict[Key, int]:
    """Leave `total` pods, at least `least`, of these Deployments; what is broken goes first."""
    found = {key_of(item): item.desired for item in items}
    healthy = {key_of(item): min(item.available, item.desired) for item in items}
    while sum(found.values()) > max(total, least):
        choices = [key for key, count in found.items() if count]
        key = max(choices, key=lambda one: (found[one] > healthy[one], found[one], one))
        found[key] -= 1
        healthy[key] = min(healthy[key], found[key])
    return found
