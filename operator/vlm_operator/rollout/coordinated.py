"""Replaces all roles together, step by step, because old and new cannot communicate.

of T steps, step i      new(i) = ceil(i · target / T)      old(i) = initial - floor(i · initial / T)

encoder  ██ → █░ → ░░            Each step waits until its new pods are available. A set with a
prefill  ███ → ██░ → █░░ → ░░░   gateway keeps a pod of each role that it needs. The gateways of
gateway  █ → █░ → ░              a set are removed before the last pods of its other roles.

T = max over roles of ceil(max(initial, target) / batch). The formula is the one of
DisaggregatedSet in LeaderWorkerSet (LWS). Its rule that a role at zero scales the others to zero
is omitted. A set is the pods of one compatibility set (`compat`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from vlm_operator.names import Role
from vlm_operator.rollout import replica_counts
from vlm_operator.rollout.replica_counts import SurgeLimits
from vlm_operator.rollout.target import RevisionTargets, Sizes
from vlm_operator.state import DeploymentState, Key


@dataclasses.dataclass(frozen=True)
class CoordinatedStep:
    """One step of all roles; the fields that `Step` has, too, are as there.

    Attributes:
        missing: number of new pods that the step waits for, by role.
        retiring: compat whose gateways are being removed; None if no set is being removed.
    """

    replicas: Mapping[Key, int]
    gateways: Mapping[str, int]
    at: int
    of: int
    missing: Mapping[Role, int]
    retiring: str | None


@dataclasses.dataclass(frozen=True)
class _Part:
    """One role across the new compat set and the old ones that have gateways.

    Attributes:
        target: replicas of the role after the rollout, over all variants.
        new: Deployments of the goal's compat.
        old: Deployments of the old compat sets that have gateways.
        keep: old pods that must stay, so that each of those sets keeps a pod of the role.
    """

    role: Role
    target: int
    limits: SurgeLimits
    new: Sequence[DeploymentState]
    old: Sequence[DeploymentState]
    keep: int

    @property
    def cap(self) -> int:
        """Number of new pods that fit beside the old pods that must stay."""
        return max(0, min(self.target, self.target + self.limits.surge - self.keep))

    @property
    def ready(self) -> int:
        return replica_counts.available(self.new)

    def new_at(self, step: int, steps: int) -> int:
        return min(math.ceil(step * self.target / steps), self.cap)

    def old_at(self, step: int, steps: int) -> int:
        whole = replica_counts.initial(self.old)
        return whole - step * whole // steps

    def next_new(self, at: int, steps: int, others: int) -> int:
        """Return the number of new pods to request; `others` pods of the role exist already."""
        allowed = self.target + self.limits.surge - others
        have = min(replica_counts.desired(self.new), self.target)
        return max(have, min(self.new_at(min(at + 1, steps), steps), allowed))

    def next_old(self, at: int, steps: int) -> int:
        """Return the number of old pods to keep.

        The formula gives the start value. Surge limits lower it so that new pods fit. The
        availability floor and `keep` raise it.
        """
        low = self.old_at(at, steps)
        if self.target:
            after = self.new_at(min(at + 1, steps), steps)
            low = min(low, self.target + self.limits.surge - after) - self.limits.drain_first
        floor = self.limits.floor(self.target) - self.ready
        return min(replica_counts.desired(self.old), max(self.keep, floor, low))


def step_coordinated(
    goals: RevisionTargets,
    target: Sizes,
    live: Sequence[DeploymentState],
    gateways: Mapping[str, int],
    limits_by_role: Mapping[Role, SurgeLimits],
) -> CoordinatedStep:
    """Decide the next step of a change of compat; the arguments are as in `next_step`."""
    goal = goals[Role.GATEWAY, ""].compat
    sets = {item.compat for item in live} - {goal}
    serving = sorted(
        (compat for compat in sets if _fronts(live, compat) or gateways.get(compat, 0)),
        key=lambda compat: (replica_counts.available(_of(live, compat)), compat),
    )
    roles = sorted({role for role, _ in goals} | {item.role for item in live})
    parts = {role: _part(role, goal, serving, target, live, limits_by_role) for role in roles}
    steps = max(1, *(_steps(part) for part in parts.values()))
    at = _progress(parts, steps)
    retiring = next((one for one in serving if _suffices(parts, without=one)), None)
    replicas: dict[Key, int] = {}
    for role, part in parts.items():
        if role is not Role.GATEWAY:
            replicas |= _grow(part, goals, target, at, steps, live)
            replicas |= _shrink(part, serving, retiring, at, steps)
    return CoordinatedStep(
        replicas=replicas,
        gateways=_gateways(parts, goal, serving, retiring, at, steps),
        at=at,
        of=steps,
        missing={
            role: part.new_at(min(at + 1, steps), steps) - part.ready
            for role, part in parts.items()
            if part.new_at(min(at + 1, steps), steps) > part.ready
        },
        retiring=retiring,
    )


def _of(live: Sequence[DeploymentState], compat: str) -> list[DeploymentState]:
    return [item for item in live if item.compat == compat]


def _fronts(live: Sequence[DeploymentState], compat: str) -> bool:
    return any(item.role is Role.GATEWAY and item.desired for item in _of(live, compat))


def _part(
    role: Role,
    goal: str,
    serving: Sequence[str],
    target: Sizes,
    live: Sequence[DeploymentState],
    limits_by_role: Mapping[Role, SurgeLimits],
) -> _Part:
    own = [item for item in live if item.role is role]
    old = [item for item in own if item.compat in serving]
    whole = sum(count for (name, _), count in target.items() if name is role)
    keep = len({item.compat for item in old if item.desired})
    limits = limits_by_role.get(role, SurgeLimits(1, 0))
    if role is Role.GATEWAY:
        limits = SurgeLimits(max(1, len(serving)), 0)  # gateways hold no device
    if limits.gives_last or (whole and whole + limits.surge - keep < 1):
        keep = 0  # no capacity for a second pod: the only pod ends before its successor starts
    return _Part(role, whole, limits, [item for item in own if item.compat == goal], old, keep)


def _steps(part: _Part) -> int:
    whole = max(replica_counts.initial(part.old), part.target)
    return 0 if part.role is Role.GATEWAY else math.ceil(whole / part.limits.batch)


def _progress(parts: Mapping[Role, _Part], steps: int) -> int:
    """Return the number of steps whose new pods are all available."""
    done = 0
    while done < steps and all(
        part.ready >= part.new_at(done + 1, steps) for part in parts.values()
    ):
        done += 1
    return done


def _suffices(parts: Mapping[Role, _Part], *, without: str) -> bool:
    """Whether the other sets keep enough available pods of each role without the set `without`."""
    for part in parts.values():
        rest = part.ready + replica_counts.available(
            [item for item in part.old if item.compat != without]
        )
        least = max(1, part.limits.floor(part.target)) if part.target else 0
        if rest < least:
            return False
    return True


def _grow(
    part: _Part,
    goals: RevisionTargets,
    target: Sizes,
    at: int,
    steps: int,
    live: Sequence[DeploymentState],
) -> dict[Key, int]:
    """Return the replicas of the new set's Deployments.

    Older revisions within the new set keep their available pods until the rollout ends.
    """
    own = {variant: goal for (name, variant), goal in goals.items() if name is part.role}
    current = {(part.role, variant, goal.revision) for variant, goal in own.items()}
    older = [item for item in part.new if item.key not in current]
    older_replicas = replica_counts.shrunk(older, replica_counts.available(older))
    newest = [item for item in part.new if item.key in current]
    others = replica_counts.existing(
        [item for item in live if item.role is part.role and item not in part.new]
    )
    allowed = part.target + part.limits.surge - others - replica_counts.existing(older)
    total = part.next_new(at, steps, others) - sum(older_replicas.values())
    sizes = {variant: target.get((part.role, variant), 0) for variant in own}
    now = {item.variant: item.desired for item in newest}
    grown = replica_counts.grown(
        now, sizes, max(replica_counts.desired(newest), min(total, allowed))
    )
    return {key: count for key, count in older_replicas.items() if count} | {
        (part.role, variant, goal.revision): grown[variant] for variant, goal in own.items()
    }


def _shrink(
    part: _Part, serving: Sequence[str], retiring: str | None, at: int, steps: int
) -> dict[Key, int]:
    """Return the replicas of the old sets' Deployments.

    Pods of the set with the fewest available pods are removed first. While the gateways of a set
    are being removed, no pool shrinks.
    """
    if retiring is not None:
        return {item.key: item.desired for item in part.old}
    excess = replica_counts.desired(part.old) - part.next_old(at, steps)
    replicas: dict[Key, int] = {}
    for compat in serving:
        members = _of(part.old, compat)
        have = replica_counts.desired(members)
        least = min(have, 1) if part.keep else 0
        remaining = replica_counts.shrunk(members, have - max(0, excess), least=least)
        excess -= have - sum(remaining.values())
        replicas |= remaining
    return replicas


def _gateways(
    parts: Mapping[Role, _Part],
    goal: str,
    serving: Sequence[str],
    retiring: str | None,
    at: int,
    steps: int,
) -> dict[str, int]:
    """Return gateway replicas by compat.

    The new set gets gateways once each of its roles has an available pod. Old gateways are removed
    step by step.
    """
    part = parts[Role.GATEWAY]
    complete = all(
        other.ready or not other.target for role, other in parts.items() if role is not Role.GATEWAY
    )
    have = replica_counts.desired(part.new)
    others = replica_counts.existing(part.old)
    replicas = {goal: part.next_new(at, steps, others)} if complete else {}
    if part.new and not complete:
        replicas[goal] = min(have, part.target)
    excess = replica_counts.desired(part.old) - part.next_old(at, steps)
    for compat in serving:
        size = replica_counts.desired(_of(part.old, compat))
        if retiring is not None:
            replicas[compat] = 0 if compat == retiring else size
            continue
        taken = min(max(0, excess), max(0, size - 1))
        replicas[compat] = size - taken
        excess -= taken
    return replicas
