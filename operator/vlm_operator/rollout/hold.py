"""Holds a rollout until the model of the wanted revision is downloaded. Pure.

not downloaded, and no pod of the wanted set runs
  ├─ a set with a gateway serves ─▶ it is the target: full strength, and the autoscaler sizes it
  └─ none serves ────────────────▶ all Deployments of the wanted set have 0 replicas

A set is the pods of one compatibility set. If pods of the wanted set run already, nothing is held:
their claim is complete, and only its Job was deleted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vlm_operator.names import Role
from vlm_operator.rollout.target import RolloutTarget, newest_goals
from vlm_operator.state import DeploymentState


@dataclasses.dataclass(frozen=True)
class Hold:
    """The target until the model is downloaded.

    Attributes:
        target: the set that serves meanwhile, else the wanted one.
        empty: whether no set serves, so that no pod may run.
    """

    target: RolloutTarget
    empty: bool


def hold(target: RolloutTarget, deployments: Sequence[DeploymentState]) -> Hold | None:
    """Return the target of a rollout whose model is not downloaded; None if it goes on."""
    wanted = target.goals[Role.GATEWAY, ""].compat
    if target.back or any(item.compat == wanted and _runs(item) for item in deployments):
        return None
    fronted = {item.compat for item in deployments if item.role is Role.GATEWAY and _runs(item)}
    if not fronted:
        return Hold(target, empty=True)
    chosen = max(fronted, key=lambda compat: (_decoders(deployments, compat), compat))
    members = [item for item in deployments if item.compat == chosen and not item.failed]
    goals = newest_goals(members)
    return Hold(dataclasses.replace(target, goals=goals), empty=False)


def _runs(item: DeploymentState) -> bool:
    return bool(item.desired or item.replicas)


def _decoders(deployments: Sequence[DeploymentState], compat: str) -> int:
    return sum(
        max(item.desired, item.available)
        for item in deployments
        if item.role is Role.DECODE and item.compat == compat and not item.failed
    )
