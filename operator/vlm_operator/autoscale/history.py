"""What allocation passes from one tick to the next. All times are seconds since the epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vlm_operator.api import ScalingMode
from vlm_operator.autoscale.outcome import Decision
from vlm_operator.names import Role

KEPT_DECISIONS = 8
KEPT_SECONDS = 900.0  # of changes


@dataclasses.dataclass(frozen=True)
class ExternalWrite:
    """The number of another manager in mode Auto: the baseline of one window.

    A different number of the same manager within that window is a conflict.
    """

    manager: str
    replicas: int
    since: float
    conflict: bool = False


@dataclasses.dataclass(frozen=True)
class Exhausted:
    """A node type that gave no ready pod in time: not tried again before `until`.

    Attributes:
        times: that it happened in a row; each doubles the wait.
        nodes: it gave not even a node.
        late: uids of the pods that it did not make ready.
    """

    since: float
    until: float
    times: int
    nodes: bool = False
    late: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """What it did not do, in words."""
        return "gave no node in time" if self.nodes else "gave no ready pod in time"


@dataclasses.dataclass(frozen=True)
class Change:
    """One change of a pool's number."""

    at: float
    before: int
    to: int

    @property
    def up(self) -> bool:
        """Whether the pool grew."""
        return self.to > self.before


@dataclasses.dataclass(frozen=True)
class ScalingHistory:
    """One pool's past.

    Attributes:
        since: when it was first seen in its mode by this process; nothing shrinks before one whole
            window of it.
        wants: (when, most units that shrinking had to leave), thinned, over
            `pace.LONG_WINDOWS` windows.
        over_since: since when more has been needed than stands.
        idle_since: since when nothing has come, to the pool's knowledge.
        changes: the last ones, newest last.
        exhausted: by variant.
        standing: the last decision's replicas by variant.
        decisions: the last that changed something, newest last.
    """

    since: float
    mode: ScalingMode
    wants: tuple[tuple[float, float], ...] = ()
    over_since: float | None = None
    idle_since: float | None = None
    changes: tuple[Change, ...] = ()
    exhausted: Mapping[str, Exhausted] = dataclasses.field(default_factory=dict)
    foreign: ExternalWrite | None = None
    standing: Mapping[str, int] = dataclasses.field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()


@dataclasses.dataclass(frozen=True)
class ScalingMemory:
    """What allocation remembers of a service.

    Attributes:
        strained_at: when a target was last closer than shrinking allows; None: never seen.
    """

    pools: Mapping[Role, ScalingHistory] = dataclasses.field(default_factory=dict)
    strained_at: float | None = None
