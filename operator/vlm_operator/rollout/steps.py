"""How many replicas of which revision, now: one step at a time, from what is there.

old ████████          old ████████           old
new            ─▶     new ░░░░░░░░   ─▶      new ████████      the old go once the new are ready

Roles whose `compat` changes go together: no old pod leaves before every role's new pods are
ready, because old and new do not talk to each other. A role that leaves the manifest waits for
the others in the same way, since the next role has to load its stage first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from vlm_operator.api import RolloutStrategy, Variant
from vlm_operator.names import Role
from vlm_operator.state import DeploymentState, Revision

Key = tuple[Role, str, str]  # role, variant, revision


@dataclasses.dataclass(frozen=True)
class Step:
    """What should be there after this turn.

    Attributes:
        replicas: by role, variant and revision; what is missing here goes.
        waiting: why the rollout is not done, "" when it is.
    """

    replicas: Mapping[Key, int]
    waiting: str

    @property
    def done(self) -> bool:
        """Nothing of an older revision is left."""
        return not self.waiting


def next_step(
    *,
    target: Mapping[tuple[Role, str], int],
    revisions: Mapping[tuple[Role, str], Revision],
    deployments: Iterable[DeploymentState],
    strategy: RolloutStrategy,
) -> Step:
    """Decide the replicas of every revision from what is there, without memory.

    Args:
        target: replicas of each role and variant in the end.
        revisions: what each role and variant should run.
        deployments: what is there, pools only.
        strategy: Recreate empties the old revisions first.
    """
    live = [deployment for deployment in deployments if deployment.role is not Role.GATEWAY]
    wanted: dict[Key, int] = {
        (role, variant, revision.id): target[role, variant]
        for (role, variant), revision in revisions.items()
        if role is not Role.GATEWAY
    }
    old = [item for item in live if (item.role, item.variant, item.revision) not in wanted]
    if not old:
        return Step(wanted, "")
    left = sum(item.replicas for item in old)
    if strategy is RolloutStrategy.RECREATE and left:
        empty = {key: min(count, _desired(live, key)) for key, count in wanted.items()}
        return Step(empty, f"{left} pods of the old revision drain before new ones start")
    behind = {key: count - _ready(live, key) for key, count in wanted.items()}
    together = _compat_changes(old, revisions)
    replicas = dict(wanted)
    for item in old:
        own = [key for key in wanted if key[0] is item.role]
        blocking = own if own and not together else list(wanted)
        if any(behind[key] > 0 for key in blocking):
            replicas[item.role, item.variant, item.revision] = item.desired
    return Step(replicas, _waiting(behind, left))


def spread(count: int, choices: Sequence[Variant]) -> dict[str, int]:
    """Distribute a pool over its variants: the preferred first, each up to its own maximum.

    What no variant has room for is left out: the manifest's rules keep that from happening.
    """
    found: dict[str, int] = {}
    for variant in sorted(choices, key=lambda item: (-item.preference, item.name)):
        room = count if variant.max_replicas is None else min(count, variant.max_replicas)
        found[variant.name] = room
        count -= room
    return found


def _desired(live: Iterable[DeploymentState], key: Key) -> int:
    return sum(item.desired for item in live if (item.role, item.variant, item.revision) == key)


def _ready(live: Iterable[DeploymentState], key: Key) -> int:
    return sum(item.ready for item in live if (item.role, item.variant, item.revision) == key)


def _compat_changes(
    old: Iterable[DeploymentState], revisions: Mapping[tuple[Role, str], Revision]
) -> bool:
    new = {revision.resolved.compat for revision in revisions.values()}
    return any(item.compat not in new for item in old)


def _waiting(behind: Mapping[Key, int], left: int) -> str:
    for (role, _, revision), missing in behind.items():
        if missing > 0:
            return f"{missing} {role} pods of revision {revision} are not ready yet"
    return f"{left} pods of the old revision drain"
