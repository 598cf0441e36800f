"""A service's Deployments in memory, moved by hand: what a rollout steers, without a cluster.

A test starts, breaks, repairs and drains pods, and may interrupt a plan half-way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from vlm_operator.api.enums import RolloutStrategy
from vlm_operator.names import Role
from vlm_operator.rollout.replica_counts import SurgeLimits
from vlm_operator.rollout.steps import Step, next_step
from vlm_operator.rollout.target import RevisionTarget, RolloutTarget, sizes
from vlm_operator.state import DeploymentState

Key = tuple[Role, str, str]
CHAIN = {
    "epd": {
        Role.ENCODER: {"encoder"},
        Role.PREFILL: {"encoder", "prefill"},
        Role.DECODE: {"decode"},
    },
    "pd": {Role.PREFILL: {"encoder", "prefill"}, Role.DECODE: {"decode"}},
    "ed": {Role.ENCODER: {"encoder"}, Role.DECODE: {"prefill", "decode"}},
    "d": {Role.DECODE: {"encoder", "prefill", "decode"}},
}
STAGES = frozenset({"encoder", "prefill", "decode"})


@dataclasses.dataclass
class Live:
    """One Deployment: what is asked for, and how many of its pods are there, ready and ill."""

    compat: str
    stages: frozenset[str]
    desired: int
    pods: int = 0
    ready: int = 0
    initial: int | None = None


class Fleet:
    """Deployments of one service on its way from one topology and revision to another."""

    def __init__(self, start: str, counts: Mapping[Role, int], *, gateways: int = 1) -> None:
        self.live: dict[Key, Live] = {}
        self.gateways: dict[str, Live] = {}
        for role, stages in CHAIN[start].items():
            size = counts[role]
            self.live[role, "default", "old"] = Live("one", frozenset(stages), size, size, size)
        self.gateways["one"] = Live("one", frozenset(), gateways, gateways, gateways)
        self.limits_by_role: dict[Role, SurgeLimits] = {}
        self.strategy = RolloutStrategy.ROLLING_BY_REVISION
        self.goals: dict[tuple[Role, str], RevisionTarget] = {}
        self.target: dict[tuple[Role, str], int] = {}

    def aim(self, topology: str, compat: str, counts: Mapping[Role, int], *, gateways: int) -> None:
        """Ask for another topology, all of whose pods are of the revision `new`."""
        self.goals = {
            (role, "default"): RevisionTarget("new", compat, frozenset(stages))
            for role, stages in CHAIN[topology].items()
        }
        self.target = {(role, "default"): counts[role] for role in CHAIN[topology]}
        self.goals[Role.GATEWAY, ""] = RevisionTarget("front", compat, frozenset())
        self.target[Role.GATEWAY, ""] = gateways

    def states(self) -> list[DeploymentState]:
        """What decisions see."""
        found = [self._state(key, item) for key, item in sorted(self.live.items())]
        for compat, item in sorted(self.gateways.items()):
            found.append(self._state((Role.GATEWAY, "", "front"), item, name=f"front-{compat}"))
        return found

    def step(self) -> Step:
        """Decide the next step."""
        rollout_target = RolloutTarget(self.goals, {}, back=False, failed_notes={})
        states = self.states()
        return next_step(
            rollout_target,
            sizes(self.goals, self.target, states),
            states,
            {compat: item.pods for compat, item in self.gateways.items()},
            self.limits_by_role,
            self.strategy,
        )

    def write(self, step: Step, *, only: int | None = None) -> None:
        """Carry a step out as far as the numbers go, or only its first changes."""
        changes = [*self._pool_changes(step), *self._gateway_changes(step)]
        for key, count in changes[:only]:
            if isinstance(key, str):
                self._make(self.gateways, key, RevisionTarget("", key, frozenset())).desired = count
                continue
            goal = self.goals.get(key[:2], RevisionTarget("", "", frozenset()))
            item = self._make(self.live, key, goal)
            item.desired = count
            item.initial = step.initial.get(key)

    def start(self, key: Key | str) -> None:
        """One more pod of a Deployment becomes ready; a gateway does if its set is complete."""
        item = self._get(key)
        if isinstance(key, str) and not self.complete(key):
            return
        item.pods = max(item.pods, item.desired)
        item.ready = min(item.ready + 1, item.pods)

    def fall_ill(self, key: Key | str) -> None:
        """One pod of a Deployment is ready no longer."""
        item = self._get(key)
        item.ready = max(0, item.ready - 1)

    def leave(self) -> None:
        """Pods that are too many are gone, the ill first; empty Deployments are pruned."""
        for found in (self.live, self.gateways):
            for item in found.values():
                item.pods = min(item.pods, item.desired)
                item.ready = min(item.ready, item.pods)

    def create(self) -> None:
        """Pods that are asked for exist, not ready yet."""
        for item in [*self.live.values(), *self.gateways.values()]:
            item.pods = max(item.pods, item.desired)

    def prune(self, step: Step) -> None:
        """Deployments that no step names go once they are empty."""
        for key in [key for key in self.live if key not in step.replicas]:
            if not self.live[key].pods:
                del self.live[key]
        for compat in [name for name in self.gateways if name not in step.gateways]:
            if not self.gateways[compat].pods:
                del self.gateways[compat]

    def names(self) -> list[Key | str]:
        """Every Deployment; gateways by their compat."""
        return [*sorted(self.live), *sorted(self.gateways)]

    def asked(self, role: Role) -> int:
        """Pods that a role's Deployments ask for, in all."""
        return sum(item.desired for key, item in self.live.items() if key[0] is role)

    def ready(self, role: Role) -> int:
        """Ready pods of a role, of all revisions."""
        return sum(item.ready for key, item in self.live.items() if key[0] is role)

    def reachable(self, role: Role) -> int:
        """Ready pods of a role that a gateway can send requests to, now or once it is there."""
        goal = self.goals[Role.GATEWAY, ""].compat
        served = {goal, *(name for name, item in self.gateways.items() if item.pods)}
        return sum(
            item.ready
            for key, item in self.live.items()
            if key[0] is role and item.compat in served
        )

    def whole(self, role: Role) -> int:
        """What a role should have in the end."""
        return sum(count for (name, _), count in self.target.items() if name is role)

    def complete(self, compat: str) -> bool:
        """Whether some ready pod of the set loads each stage."""
        loaded = [i.stages for i in self.live.values() if i.compat == compat and i.ready]
        return frozenset.union(frozenset(), *loaded) >= STAGES

    def fronted(self) -> list[str]:
        """Compat sets that get traffic."""
        return [compat for compat, item in self.gateways.items() if item.ready]

    def _state(self, key: Key, item: Live, *, name: str = "") -> DeploymentState:
        return DeploymentState(
            name=name or "-".join(key),
            role=key[0],
            variant=key[1],
            revision=key[2],
            compat=item.compat,
            inputs="",
            resolved="",
            desired=item.desired,
            replicas=item.pods,
            ready=item.ready,
            deleting=False,
            available=item.ready,
            stages=item.stages,
            initial=item.initial,
        )

    def _pool_changes(self, step: Step) -> Iterable[tuple[Key, int]]:
        for key in sorted({*step.replicas, *self.live}):
            yield key, step.replicas.get(key, 0)

    def _gateway_changes(self, step: Step) -> Iterable[tuple[str, int]]:
        for compat in sorted({*step.gateways, *self.gateways}):
            yield compat, step.gateways.get(compat, 0)

    def _make(self, found: dict, key: Key | str, goal: RevisionTarget) -> Live:
        if key not in found:
            found[key] = Live(goal.compat, goal.stages, 0)
        return found[key]

    def _get(self, key: Key | str) -> Live:
        return self.gateways[key] if isinstance(key, str) else self.live[key]
