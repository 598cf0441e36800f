"""What the gateway measures: `/metrics` for Prometheus, and the part of `/stats` that it owns.

Written by the event loop alone.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vlm_worker import metrics
from vlm_worker.metrics import SECONDS_BUCKETS
from vlm_worker.types import STAGES, Modality


class TtftSummary:
    """TTFT of one modality since the start, as docs/stats.schema.json has it.

    The bucket edges hold the target itself, so that the share that missed it is exact. A new target
    adds an edge; what was counted before stays in the next higher bucket.
    """

    def __init__(self) -> None:
        self._edges = list(SECONDS_BUCKETS)
        self._counts = [0] * (len(self._edges) + 1)
        self._count = 0
        self._missed = 0
        self._sum_seconds = 0.0
        self._stages = {stage: {"met": 0.0, "missed": 0.0} for stage in STAGES}

    def add(self, seconds: float, stages: Mapping[str, float], target: float | None) -> bool:
        """Count one request; whether it met the target."""
        if target is not None and target not in self._edges:
            at = bisect.bisect_left(self._edges, target)
            self._edges.insert(at, target)
            self._counts.insert(at, 0)
        met = target is None or seconds <= target
        self._counts[bisect.bisect_left(self._edges, seconds)] += 1
        self._count += 1
        self._missed += not met
        self._sum_seconds += seconds
        for stage, share in stages.items():
            self._stages[stage]["met" if met else "missed"] += share
        return met

    @property
    def body(self) -> dict[str, Any]:
        """As in `/stats`."""
        edges = [f"{edge:g}" for edge in self._edges] + ["+Inf"]
        return {
            "count": self._count,
            "missed": self._missed,
            "sum_seconds": self._sum_seconds,
            "buckets": dict(zip(edges, itertools.accumulate(self._counts), strict=True)),
            "stages": {stage: dict(sums) for stage, sums in self._stages.items()},
        }


class Meters:
    """Every collector of the gateway; label values come from closed sets alone."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.ttft = {modality: TtftSummary() for modality in Modality}
        self.num_output_tokens = 0
        self.num_requests = 0
        self.num_images = 0
        self.num_visual_tokens = 0
        self._ttft_seconds = Histogram(
            metrics.TTFT_SECONDS,
            "Time to first token, from the last byte of the request.",
            ["modality"],
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self._stage_seconds = Histogram(
            metrics.STAGE_SECONDS,
            "Time that each stage owned of the time to first token.",
            ["stage", "modality"],
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self._stage_total = Counter(
            metrics.TTFT_STAGE_SECONDS_TOTAL,
            "Seconds of time to first token by the stage that owned them.",
            ["stage", "slo", "modality"],
            registry=registry,
        )
        self._ttft_total = Counter(
            metrics.TTFT_TOTAL,
            "Requests by whether they met the target for the time to first token.",
            ["slo", "modality"],
            registry=registry,
        )
        self._itl_seconds = Histogram(
            metrics.ITL_SECONDS,
            "Time between two tokens of an answer.",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self._requests = Counter(
            metrics.REQUESTS_TOTAL, "Requests by outcome.", ["outcome"], registry=registry
        )
        self._inflight = Gauge(metrics.INFLIGHT, "Requests being served.", registry=registry)
        self._accepting = Gauge(
            metrics.ACCEPTING, "1 while new requests are taken.", registry=registry
        )

    def first_token(
        self,
        seconds: float,
        stages: Mapping[str, float],
        modality: Modality,
        target: float | None,
    ) -> None:
        """A first token left."""
        met = self.ttft[modality].add(seconds, stages, target)
        slo = "met" if met else "missed"
        self._ttft_seconds.labels(modality).observe(seconds)
        self._ttft_total.labels(slo, modality).inc()
        for stage, share in stages.items():
            self._stage_seconds.labels(stage, modality).observe(share)
            self._stage_total.labels(stage, slo, modality).inc(share)

    def next_token(self, seconds: float) -> None:
        """Another token left, so long after the one before."""
        self._itl_seconds.observe(seconds)

    def request(self, outcome: str) -> None:
        """A request had its last word."""
        self.num_requests += 1
        self._requests.labels(outcome).inc()

    def exposition(self, *, num_inflight: int, accepting: bool) -> bytes:
        """`/metrics`, in Prometheus' text format."""
        self._inflight.set(num_inflight)
        self._accepting.set(accepting)
        text: bytes = generate_latest(self._registry)
        return text
