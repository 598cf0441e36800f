"""Metrics of the simulated gateway: TTFT by modality and stage, ITL."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping

from vlm_cli.simulator.decode_pod import ITL_BUCKETS
from vlm_cli.simulator.job import Job
from vlm_operator.names import Role
from vlm_operator.state import ItlHistogram, Sample, StageSeconds, Ttft

UID = "gateway-0"
# The buckets of the worker's gateway (docs/metrics.md), and its multiples of the target.
_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5,
    0.75, 1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
)  # fmt: skip
_STAGE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, math.inf)
_TARGET = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)


class _Histogram:
    """Counts by the bucket's upper bound."""

    def __init__(self, edges: tuple[float, ...]) -> None:
        self._edges = edges
        self._counts = [0] * len(edges)

    def add(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._edges, value)] += 1

    def cumulative(self) -> dict[float, int]:
        return dict(zip(self._edges, itertools.accumulate(self._counts), strict=True))


class _Modality:
    """TTFT of one modality."""

    def __init__(self, target: float | None) -> None:
        edges = () if target is None else tuple(target * factor for factor in _TARGET)
        self._target = target
        self._seconds = _Histogram(tuple(sorted({*_SECONDS, *edges, math.inf})))
        self._count = self._missed = 0
        self._sum = 0.0
        self._stages: dict[str, tuple[list[float], _Histogram]] = {}

    def add(self, seconds: float, stages: Mapping[str, float]) -> None:
        missed = self._target is not None and seconds > self._target
        self._count += 1
        self._missed += missed
        self._sum += seconds
        self._seconds.add(seconds)
        for stage, stage_seconds in stages.items():
            sums, histogram = self._stages.setdefault(stage, ([0.0, 0.0], _Histogram(_STAGE)))
            sums[missed] += stage_seconds
            histogram.add(stage_seconds)

    def freeze(self) -> Ttft:
        return Ttft(
            count=self._count,
            missed=self._missed,
            sum_seconds=self._sum,
            buckets=self._seconds.cumulative(),
            stages={
                name: StageSeconds(sums[0], sums[1], histogram.cumulative())
                for name, (sums, histogram) in self._stages.items()
            },
        )


class GatewayMetrics:
    """The gateway's metrics. The gateway writes them; decode pods write `itl_counts`."""

    def __init__(self, targets: Mapping[str, float]) -> None:
        self._targets = targets
        self._modalities: dict[str, _Modality] = {}
        self.itl_counts = [0.0] * len(ITL_BUCKETS)

    def first_token(self, job: Job) -> None:
        """Record the TTFT of a job, without its wait for a wake-up.

        Time of no stage is added to `other`.
        """
        assert job.ttft is not None
        seconds = job.ttft - job.wake_seconds
        job.add_other(seconds)
        name = job.request.modality
        if name not in self._modalities:
            self._modalities[name] = _Modality(self._targets.get(name))
        self._modalities[name].add(seconds, job.stages)

    def sample(
        self, *, held: Mapping[Role, int], inflight: int, asleep: int, idle_seconds: float
    ) -> Sample:
        """Return the gateway's report.

        Args:
            held: number of requests by the pool they wait for.
            inflight: requests in flight.
            asleep: requests that wait for a service at zero.
            idle_seconds: time since the last request.
        """
        cumulative = [int(count) for count in itertools.accumulate(self.itl_counts)]
        return Sample(
            pod_uid=UID,
            boot_id=UID,
            role=Role.GATEWAY,
            phase="ready",
            message="",
            accepting=True,
            inflight=inflight,
            queued_requests=0,
            queued_work_seconds=0.0,
            started_work_seconds=0.0,
            kv=None,
            model=None,
            ttft={name: item.freeze() for name, item in self._modalities.items()},
            config_hash=None,
            gaps=ItlHistogram(cumulative[-1], dict(zip(ITL_BUCKETS, cumulative, strict=True))),
            held_for={role.value: count for role, count in held.items() if count},
            idle_seconds=idle_seconds,
            waiting_for_wake=asleep,
        )
