"""A simulated pod's life, and what every kind of pod can be asked.

pending ─ node ─▶ starting ─▶ ready ─ drain ─▶ draining ─ empty, or deadline ─▶ gone
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from vlm_operator.autoscale.view import PodPhase, PodView
from vlm_operator.names import Role
from vlm_operator.simulate.job import Job
from vlm_operator.state import Busy, KvTokens, Sample

_LATENCY_SECONDS = 60.0  # of which a pod remembers how long its work took


@dataclasses.dataclass(eq=False)
class Life:
    """Who a pod is and how far it has come; written by its pool.

    Attributes:
        scheduled_since: since when it is on a node and holds its devices; None before.
        draining_since: None while it takes work.
        predicted: its predictions of its own work, as a multiple of the truth.
    """

    uid: str
    role: Role
    variant: str
    speed: float
    accelerators: int
    cost_per_hour: float
    created: float
    scheduled_since: float | None = None
    ready_since: float | None = None
    draining_since: float | None = None
    gone: bool = False
    predicted: float = 1.0

    @property
    def scheduled(self) -> bool:
        """Whether it is on a node."""
        return self.scheduled_since is not None

    @property
    def phase(self) -> PodPhase:
        """As decisions see it."""
        if self.draining_since is not None:
            return "draining"
        if self.ready_since is not None:
            return "ready"
        return "starting" if self.scheduled else "pending"

    @property
    def accepting(self) -> bool:
        """Takes new work."""
        return self.ready_since is not None and self.draining_since is None and not self.gone

    def sample(
        self,
        *,
        inflight: int,
        kv: KvTokens | None,
        busy: Mapping[str, Busy],
        queued_requests: int = 0,
        queued_seconds: float = 0.0,
        admitted_seconds: float = 0.0,
    ) -> Sample:
        """What its pod reports now."""
        return Sample(
            pod_uid=self.uid,
            boot_id=self.uid,
            role=self.role,
            phase="draining" if self.draining_since is not None else "ready",
            message="",
            accepting=self.accepting,
            inflight=inflight,
            queued_requests=queued_requests,
            queued_work_seconds=queued_seconds,
            admitted_work_seconds=admitted_seconds,
            kv=kv,
            model=None,
            ttft={},
            config_hash=None,
            busy={name: item for name, item in busy.items() if item.calls},
        )

    def view(self, epoch: float) -> PodView:
        """What decisions see; the clock's zero is `epoch` in seconds since the epoch."""

        def moment(since: float | None) -> float | None:
            return None if since is None else epoch + since

        return PodView(
            self.uid,
            self.variant,
            self.phase,
            epoch + self.created,
            moment(self.ready_since),
            moment(self.scheduled_since),
        )


class Pod(Protocol):
    """What a pool needs of its pods; `Computer` and `Decoder` are the two kinds."""

    life: Life

    @property
    def inflight(self) -> int:
        """Requests that it has."""
        ...

    def sample(self, now: float) -> Sample:
        """Its report."""
        ...

    def evacuate(self, now: float) -> list[Job]:
        """Give up everything it has; a drain is at its deadline."""
        ...

    def p95(self, now: float) -> float | None:
        """Seconds that its own work took at the 95th percentile of the last minute."""
        ...


class Latencies:
    """How long the work of the last minute took at one pod."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, float]] = deque()

    def add(self, now: float, seconds: float) -> None:
        """One piece of work ended."""
        self._kept.append((now, seconds))

    def p95(self, now: float) -> float | None:
        """None where nothing ended."""
        while self._kept and self._kept[0][0] < now - _LATENCY_SECONDS:
            self._kept.popleft()
        if not self._kept:
            return None
        taken = sorted(seconds for _, seconds in self._kept)
        return taken[max(0, -(-len(taken) * 95 // 100) - 1)]


Handed = Callable[[Job], None]
