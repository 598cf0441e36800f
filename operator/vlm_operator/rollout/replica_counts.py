"""Sums of replicas over Deployments, and the distribution of a changed sum over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from vlm_operator.names import Role
from vlm_operator.state import DeploymentState

Key = tuple[Role, str, str]  # role, variant, revision


def key_of(item: DeploymentState) -> Key:
    return (item.role, item.variant, item.revision)


def desired(items: Iterable[DeploymentState]) -> int:
    """Sum `spec.replicas`."""
    return sum(item.desired for item in items)


def existing(items: Iterable[DeploymentState]) -> int:
    """Count pods that are requested or still exist, per Deployment the larger number."""
    return sum(max(item.desired, item.replicas) for item in items)


def available(items: Iterable[DeploymentState]) -> int:
    """Count pods that are available in the sense of Deployments, at most the requested ones."""
    return sum(min(item.available, item.desired) for item in items)


def initial(items: Iterable[DeploymentState]) -> int:
    """Sum the replicas from before the rollout removed the first pod."""
    return sum(item.desired if item.initial is None else item.initial for item in items)


def grown(current: Mapping[str, int], target: Mapping[str, int], total: int) -> dict[str, int]:
    """Raise variants from `current` towards `target`, at most to `total` pods in sum.

    A variant above its target shrinks to it. Each added pod goes to the variant that lacks most.
    """
    found = {name: min(current.get(name, 0), count) for name, count in target.items()}
    while sum(found.values()) < min(total, sum(target.values())):
        name = max(found, key=lambda item: (target[item] - found[item], item))
        found[name] += 1
    return found


def shrunk(items: Sequence[DeploymentState], total: int, *, least: int = 0) -> dict[Key, int]:
    """Lower replicas to a sum of `total`, but not below `least`; unavailable pods go first."""
    found = {key_of(item): item.desired for item in items}
    healthy = {key_of(item): min(item.available, item.desired) for item in items}
    while sum(found.values()) > max(total, least):
        choices = [key for key, count in found.items() if count]
        key = max(choices, key=lambda one: (found[one] > healthy[one], found[one], one))
        found[key] -= 1
        healthy[key] = min(healthy[key], found[key])
    return found
