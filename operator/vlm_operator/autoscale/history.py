"""The memory of allocation between two ticks. All times are seconds since the epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vlm_operator.api import ScalingMode
from vlm_operator.autoscale.outcome import Decision
from vlm_operator.autoscale.sleep import SleepMemory
from vlm_operator.names import Role

KEPT_DECISIONS = 8
KEPT_SECONDS = 900.0  # of changes


@dataclasses.dataclass(frozen=True)
class ExternalWrite:
    """The last number that another manager wrote to VLMPool in mode Auto.

    Attributes:
        since: time of the first tick that saw this number.
        conflict: the manager wrote two different numbers within one window.
    """

    manager: str
    replicas: int
    since: float
    conflict: bool = False


@dataclasses.dataclass(frozen=True)
class Exhausted:
    """A variant that provided no ready pod in time. It is not tried again before `until`.

    Attributes:
        times: number of such failures in a row; each doubles the wait.
        nodes: the variant did not even provide a node.
        late: uids of the pods that did not become ready; empty if only another pool saw it.
        scope: what the failure says something about: the placement of the late pods if `nodes`,
            else their revision. "" if unknown, or if only another pool saw it.
    """

    since: float
    until: float
    times: int
    nodes: bool = False
    late: tuple[str, ...] = ()
    scope: str = ""

    @property
    def what(self) -> str:
        """The predicate of a message about the variant."""
        return f"got no {'node' if self.nodes else 'ready pod'} in time"


@dataclasses.dataclass(frozen=True)
class Change:
    """One change of a pool's replicas."""

    at: float
    before: int
    to: int


@dataclasses.dataclass(frozen=True)
class ScalingHistory:
    """The history of one pool.

    Attributes:
        since: first tick of this process with the pool in this mode. The pool does not shrink
            before one window has passed since then.
        wants: (time, largest `least_units`) per slot of the window, over `pace.LONG_WINDOWS`
            windows.
        over_since: time since which the need has exceeded the capacity.
        idle_since: time since which every tick reported the pool idle.
        changes: changes of the last `KEPT_SECONDS`, the newest last.
        exhausted: by variant.
        foreign: None if the autoscaler owns the number.
        standing: replicas of the last decision, by variant.
        decisions: the last decisions that changed the replicas, the newest last.
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
    """The history of all pools of a service.

    Attributes:
        strained_at: time at which TTFT or ITL last exceeded its margin; None if it never did.
        sleep: None if the service does not scale to zero.
    """

    pools: Mapping[Role, ScalingHistory] = dataclasses.field(default_factory=dict)
    strained_at: float | None = None
    sleep: SleepMemory | None = None
