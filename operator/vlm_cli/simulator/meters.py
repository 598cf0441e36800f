"""Metrics of the simulated gateway: TTFT by modality and stage, ITL."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping

from vlm_cli.simulator.decoder import GAP_BUCKETS
from vlm_cli.simulator.job import Job
from vlm_operator.names import Role
from vlm_operator.state import ItlHistogram, Sample, StageSeconds, Ttft

UID = "gateway-0"
# The edges of the real gateway (docs/metrics.md), and its multiples of the target.
_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5,
    0.75, 1.0, 1.5, 2.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
)  # fmt: skip
_STAGE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, math.inf)
_TARGET = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)


class _Histogram:
    """Counts by upper bound of the bucket."""

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
        own = () if target is None else tuple(target * share for share in _TARGET)
        self._target = target
        self._seconds = _Histogram(tuple(sorted({*_SECONDS, *own, math.inf})))
        self._count = self._missed = 0
        self._sum = 0.0
        self._stages: dict[str, tuple[list[float], _Histogram]] = {}

    def add(self, seconds: float, marks: Mapping[str, float]) -> None:
        missed = self._target is not None and seconds > self._target
        self._count += 1
        self._missed += missed
        self._sum += seconds
        self._seconds.add(seconds)
        for stage, took in marks.items():
            sums, histogram = self._stages.setdefault(stage, ([0.0, 0.0], _Histogram(_STAGE)))
            sums[missed] += took
            histogram.add(took)

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
    """The gateway's metrics. The gateway writes them; decode pods write `gaps`."""

    def __init__(self, targets: Mapping[str, float]) -> None:
        self._targets = targets
        self._modalities: dict[str, _Modality] = {}
        self.gaps = [0.0] * len(GAP_BUCKETS)

    def first_token(self, job: Job) -> None:
        """Record the TTFT of a job; time that no stage owns is added to `other`."""
        assert job.ttft is not None
        job.mark_rest(job.ttft)
        name = job.request.modality
        if name not in self._modalities:
            self._modalities[name] = _Modality(self._targets.get(name))
        self._modalities[name].add(job.ttft, job.marks)

    def sample(self, *, held: Mapping[Role, int], inflight: int) -> Sample:
        """Return the gateway's report; `held` counts requests by the pool that they wait for."""
        cumulative = [int(count) for count in itertools.accumulate(self.gaps)]
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
            gaps=ItlHistogram(cumulative[-1], dict(zip(GAP_BUCKETS, cumulative, strict=True))),
            held_for={role.value: count for role, count in held.items() if count},
        )
