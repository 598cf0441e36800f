"""All roles are replaced together, step by step, because old and new do not talk to each other.

of T steps, step i      new(i) = ceil(i · target / T)      old(i) = initial - floor(i · initial / T)

encoder  ██ → █░ → ░░            Each step waits until its new pods are available. Every set that
prefill  ███ → ██░ → █░░ → ░░░   has a gateway has a pod of each role that it needs; the gateways
gateway  █ → █░ → ░              of a set leave before its last pods do.

T = max over roles of ceil(max(initial, target) / batch); the formula is that of LWS'
DisaggregatedSet, without its rule that a role at zero takes the others to zero.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from vlm_operator.names import Role
from vlm_operator.rollout import counts
from vlm_operator.rollout.counts import Key
from vlm_operator.rollout.goal import Goal
from vlm_operator.rollout.pace import Pace
from vlm_operator.state import DeploymentState


@dataclasses.dataclass(frozen=True)
class Stride:
    """One step of all roles.

    Attributes:
        replicas: of the pools' Deployments; what is missing goes.
        gateways: by compat.
        at: steps that are done, of `of`.
        missing: new pods that the step waits for, by role.
        retiring: the compat set whose gateways are leaving.
    """

    replicas: Mapping[Key, int]
    gateways: Mapping[str, int]
    at: int
    of: int
    missing: Mapping[Role, int]
    retiring: str | None


@dataclasses.dataclass(frozen=True)
class _Part:
    """One role across all compat sets that matter: `old` are those that have gateways."""

    role: Role
    target: int
    pace: Pace
    new: Sequence[DeploymentState]
    old: Sequence[DeploymentState]
    keep: int  # old pods that must stay, so that no set lacks the role

    @property
    def cap(self) -> int:
        """New pods that fit beside what must stay."""
        return max(0, min(self.target, self.target + self.pace.surge - self.keep))

    @property
    def ready(self) -> int:
        return counts.available(self.new)

    def new_at(self, step: int, steps: int) -> int:
        return min(math.ceil(step * self.target / steps), self.cap)

    def old_at(self, step: int, steps: int) -> int:
        whole = counts.initial(self.old)
        return whole - step * whole // steps

    def next_new(self, at: int, steps: int, others: int) -> int:
        """New pods to ask for; `others` exist beside them."""
        room = self.target + self.pace.surge - others
        have = min(counts.desired(self.new), self.target)
        return max(have, min(self.new_at(min(at + 1, steps), steps), room))

    def next_old(self, at: int, steps: int) -> int:
        """Old pods to leave: as the formula says, fewer to make room, more to stay available."""
        low = self.old_at(at, steps)
        if self.target:
            after = self.new_at(min(at + 1, steps), steps)
            low = min(low, self.target + self.pace.surge - after) - self.pace.drain_first
        floor = self.pace.floor(self.target) - self.ready
        return min(counts.desired(self.old), max(self.keep, floor, low))


def step_together(
    goals: Mapping[tuple[Role, str], Goal],
    target: Mapping[tuple[Role, str], int],
    live: Sequence[DeploymentState],
    gateways: Mapping[str, int],
    paces: Mapping[Role, Pace],
) -> Stride:
    """Decide the next step of a change of compat.

    Args:
        goals: by role and variant, gateway included.
        target: replicas of each role and variant in the end, gateway included.
        live: all Deployments.
        gateways: gateway pods that are there, leaving ones included, by compat.
        paces: what the rollout may do to each role.
    """
    goal = goals[Role.GATEWAY, ""].compat
    sets = {item.compat for item in live} - {goal}
    serving = sorted(
        (compat for compat in sets if _fronts(live, compat) or gateways.get(compat, 0)),
        key=lambda compat: (counts.available(_of(live, compat)), compat),
    )
    roles = sorted({role for role, _ in goals} | {item.role for item in live})
    parts = {role: _part(role, goal, serving, target, live, paces) for role in roles}
    steps = max(1, *(_steps(part) for part in parts.values()))
    at = _progress(parts, steps)
    retiring = next((one for one in serving if _suffices(parts, without=one)), None)
    replicas: dict[Key, int] = {}
    for role, part in parts.items():
        if role is not Role.GATEWAY:
            replicas |= _grow(part, goals, target, at, steps, live)
            replicas |= _shrink(part, serving, retiring, at, steps)
    return Stride(
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
    target: Mapping[tuple[Role, str], int],
    live: Sequence[DeploymentState],
    paces: Mapping[Role, Pace],
) -> _Part:
    own = [item for item in live if item.role is role]
    old = [item for item in own if item.compat in serving]
    whole = sum(count for (name, _), count in target.items() if name is role)
    keep = len({item.compat for item in old if item.desired})
    pace = paces.get(role, Pace(1, 0))
    if role is Role.GATEWAY:
        pace = Pace(max(1, len(serving)), 0)  # they hold no device
    if pace.gives_last or (whole and whole + pace.surge - keep < 1):
        keep = 0  # one pod and no room beside it: it goes before its successor comes
    return _Part(role, whole, pace, [item for item in own if item.compat == goal], old, keep)


def _steps(part: _Part) -> int:
    whole = max(counts.initial(part.old), part.target)
    return 0 if part.role is Role.GATEWAY else math.ceil(whole / part.pace.batch)


def _progress(parts: Mapping[Role, _Part], steps: int) -> int:
    """Steps whose new pods are all available."""
    done = 0
    while done < steps and all(
        part.ready >= part.new_at(done + 1, steps) for part in parts.values()
    ):
        done += 1
    return done


def _suffices(parts: Mapping[Role, _Part], *, without: str) -> bool:
    """Whether one old set may go at once: what is left is complete, and enough."""
    for part in parts.values():
        rest = part.ready + counts.available([item for item in part.old if item.compat != without])
        least = max(1, part.pace.floor(part.target)) if part.target else 0
        if rest < least:
            return False
    return True


def _grow(
    part: _Part,
    goals: Mapping[tuple[Role, str], Goal],
    target: Mapping[tuple[Role, str], int],
    at: int,
    steps: int,
    live: Sequence[DeploymentState],
) -> dict[Key, int]:
    """The new set's own. Within it, older revisions keep the pods that serve until the end."""
    own = {variant: goal for (name, variant), goal in goals.items() if name is part.role}
    current = {(part.role, variant, goal.revision) for variant, goal in own.items()}
    older = [item for item in part.new if counts.key_of(item) not in current]
    kept = counts.shrunk(older, counts.available(older))
    newest = [item for item in part.new if counts.key_of(item) in current]
    others = counts.existing(
        [item for item in live if item.role is part.role and item not in part.new]
    )
    room = part.target + part.pace.surge - others - counts.existing(older)
    total = part.next_new(at, steps, others) - sum(kept.values())
    sizes = {variant: target.get((part.role, variant), 0) for variant in own}
    now = {item.variant: item.desired for item in newest}
    grown = counts.grown(now, sizes, max(counts.desired(newest), min(total, room)))
    return {key: count for key, count in kept.items() if count} | {
        (part.role, variant, goal.revision): grown[variant] for variant, goal in own.items()
    }


def _shrink(
    part: _Part, serving: Sequence[str], retiring: str | None, at: int, steps: int
) -> dict[Key, int]:
    """The old sets' own, the weakest first; while a set retires all stay as they are."""
    if retiring is not None:
        return {counts.key_of(item): item.desired for item in part.old}
    excess = counts.desired(part.old) - part.next_old(at, steps)
    found: dict[Key, int] = {}
    for compat in serving:
        members = _of(part.old, compat)
        have = counts.desired(members)
        least = min(have, 1) if part.keep else 0
        left = counts.shrunk(members, have - max(0, excess), least=least)
        excess -= have - sum(left.values())
        found |= left
    return found


def _gateways(
    parts: Mapping[Role, _Part],
    goal: str,
    serving: Sequence[str],
    retiring: str | None,
    at: int,
    steps: int,
) -> dict[str, int]:
    """Gateways by compat: a new one once its set is complete, the old ones by steps."""
    part = parts[Role.GATEWAY]
    complete = all(
        other.ready or not other.target for role, other in parts.items() if role is not Role.GATEWAY
    )
    have = counts.desired(part.new)
    others = counts.existing(part.old)
    found = {goal: part.next_new(at, steps, others)} if complete else {}
    if part.new and not complete:
        found[goal] = min(have, part.target)
    excess = counts.desired(part.old) - part.next_old(at, steps)
    for compat in serving:
        size = counts.desired(_of(part.old, compat))
        if retiring is not None:
            found[compat] = 0 if compat == retiring else size
            continue
        taken = min(max(0, excess), max(0, size - 1))
        found[compat] = size - taken
        excess -= taken
    return found
