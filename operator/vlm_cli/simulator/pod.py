"""Life cycle of a simulated pod, and the interface of encoder, prefill and decode pods.

pending ─ node ─▶ starting ─▶ ready ─ drain ─▶ draining ─ no request, or deadline ─▶ removed
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from vlm_cli.simulator.job import Job
from vlm_operator.autoscale.view import PodPhase, PodView
from vlm_operator.names import Role
from vlm_operator.state import KvTokens, Sample, WorkCounters

_LATENCY_SECONDS = 60.0  # window of recorded latencies


@dataclasses.dataclass(eq=False)
class Lifecycle:
    """Identity and state of a pod; its pool is the one writer. Times are in simulated seconds.

    Attributes:
        scheduled_since: time of its scheduling to a node with its devices; None if pending.
        draining_since: start of its drain; None if it does not drain.
        prediction_factor: ratio of predicted to real work.
        served: whether it was ready before a crash.
        unready_since: time of its crash; None if it is ready or never was.
        restarts: number of restarts of its process.
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
    removed: bool = False
    prediction_factor: float = 1.0
    served: bool = False
    unready_since: float | None = None
    restarts: int = 0

    @property
    def scheduled(self) -> bool:
        """Whether it has a node."""
        return self.scheduled_since is not None

    @property
    def phase(self) -> PodPhase:
        """Phase in the autoscaler's view."""
        if self.draining_since is not None:
            return "draining"
        if self.ready_since is not None:
            return "ready"
        return "starting" if self.scheduled else "pending"

    @property
    def accepting(self) -> bool:
        """Whether it accepts new work."""
        return self.ready_since is not None and self.draining_since is None and not self.removed

    def sample(
        self,
        *,
        inflight: int,
        kv: KvTokens | None,
        busy: Mapping[str, WorkCounters],
        queued_requests: int = 0,
        queued_seconds: float = 0.0,
        started_seconds: float = 0.0,
    ) -> Sample:
        """Return the pod's report now."""
        return Sample(
            pod_uid=self.uid,
            boot_id=f"{self.uid}/{self.restarts}",
            role=self.role,
            phase="draining" if self.draining_since is not None else "ready",
            message="",
            accepting=self.accepting,
            inflight=inflight,
            queued_requests=queued_requests,
            queued_work_seconds=queued_seconds,
            started_work_seconds=started_seconds,
            kv=kv,
            model=None,
            ttft={},
            config_hash=None,
            busy={name: item for name, item in busy.items() if item.calls},
        )

    def view(self, epoch: float) -> PodView:
        """Return the autoscaler's view; `epoch` is the Unix time of the clock's zero."""

        def moment(since: float | None) -> float | None:
            return None if since is None else epoch + since

        return PodView(
            self.uid,
            self.variant,
            self.phase,
            epoch + self.created,
            moment(self.ready_since),
            moment(self.scheduled_since),
            served=self.served,
            unready_since=moment(self.unready_since),
        )


class Pod(Protocol):
    """Interface of `ComputePod` and `DecodePod`."""

    lifecycle: Lifecycle

    @property
    def inflight(self) -> int:
        """Number of requests at this pod."""
        ...

    def sample(self) -> Sample:
        """Return the pod's report now."""
        ...

    def evacuate(self) -> list[Job]:
        """Remove and return all jobs, if a drain reaches its deadline or the pod crashes."""
        ...

    def p95(self, now: float) -> float | None:
        """Return the 95th percentile of its latencies in the last minute, in seconds."""
        ...


class Latencies:
    """Latencies of one pod in the last minute."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque()

    def add(self, now: float, seconds: float) -> None:
        """Add the latency of work that ends `now`."""
        self._recent.append((now, seconds))

    def p95(self, now: float) -> float | None:
        """Return the 95th percentile in seconds; None if no work ended in the last minute."""
        while self._recent and self._recent[0][0] < now - _LATENCY_SECONDS:
            self._recent.popleft()
        if not self._recent:
            return None
        taken = sorted(seconds for _, seconds in self._recent)
        return taken[max(0, -(-len(taken) * 95 // 100) - 1)]


JobCallback = Callable[[Job], None]
