"""`/metrics` and the TTFT part of `/stats` of a gateway.

The edges of the TTFT buckets follow the target. So the share of requests that miss it is exact, and
the 95th percentile is precise near it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vlm_worker import metrics
from vlm_worker.core.measurements import Buckets, Rates
from vlm_worker.core.measurements import Histogram as Seconds
from vlm_worker.core.process_memory import HOST_MEMORY_METRICS, HostMemory, ProcessMemory
from vlm_worker.gateway.memory import Bound, Kind, MemoryBudget
from vlm_worker.metrics import SECONDS_BUCKETS, STAGE_BUCKETS
from vlm_worker.types import STAGES, Modality

VISUAL_TOKENS_BUCKETS: Final = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class GatewayMetrics:
    """All metrics of a gateway. Label values come from closed sets only.

    `now` is a time in seconds on the gateway's clock, here and in all methods. `memory` is the
    budget of the requests.
    """

    def __init__(self, now: float = 0.0, *, memory: MemoryBudget | None = None) -> None:
        # avoids an unused `_created` series for each counter
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self._registry = CollectorRegistry()
        self.ttft = {modality: TTFTSummary() for modality in Modality}
        self.num_output_tokens = 0
        self.num_requests = 0
        self.num_images = 0
        self.num_visual_tokens = 0
        self._num_image_requests = 0
        self._rates = Rates(now)
        self._gaps = Seconds(SECONDS_BUCKETS)
        registry.register(_TtftSeconds(self.ttft))
        self._stage_seconds = Histogram(
            metrics.STAGE_SECONDS,
            "Time of each stage within the time to first token.",
            ["stage", "modality"],
            buckets=STAGE_BUCKETS,
            registry=registry,
        )
        self._stage_total = self._counter(
            metrics.TTFT_STAGE_SECONDS_TOTAL,
            "Seconds of time to first token, by stage.",
            "stage",
            "slo",
            "modality",
        )
        self._ttft_total = self._counter(
            metrics.SLO_REQUESTS_TOTAL,
            "Requests by whether they met the target for the time to first token.",
            "slo",
            "modality",
        )
        registry.register(_GapSeconds(self._gaps))
        self._requests = self._counter(metrics.REQUESTS_TOTAL, "Requests by outcome.", "outcome")
        self._output_tokens = self._counter(metrics.OUTPUT_TOKENS_TOTAL, "Tokens delivered.")
        self._images = self._counter(metrics.IMAGES_TOTAL, "Images in requests.")
        self._visual_tokens = self._counter(
            metrics.VISUAL_TOKENS_TOTAL, "Visual tokens in requests."
        )
        self._visual_tokens_per_request = Histogram(
            metrics.VISUAL_TOKENS_PER_REQUEST,
            "Visual tokens per request with images.",
            buckets=VISUAL_TOKENS_BUCKETS,
            registry=registry,
        )
        self._refused = self._counter(
            metrics.GATEWAY_REFUSED_TOTAL, "Requests refused, by limit.", "bound"
        )
        for bound in Bound:
            self._refused.labels(bound)
        self._memory = memory or MemoryBudget(0)
        self._memory_bytes = Gauge(
            metrics.GATEWAY_MEMORY_BYTES,
            "Bytes that requests hold.",
            ["kind"],
            registry=registry,
        )
        self._memory_limit = self._gauge(
            metrics.GATEWAY_MEMORY_LIMIT_BYTES, "Bytes that requests may hold."
        )
        self._inflight = self._gauge(metrics.INFLIGHT, "Requests in flight.")
        self._accepting = self._gauge(metrics.ACCEPTING, "1 while the process accepts new work.")
        self._heartbeat = self._gauge(
            metrics.HEARTBEAT_TIMESTAMP_SECONDS, "When the event loop last answered."
        )

    def declare(self, memory: ProcessMemory, resident: Callable[[], int]) -> None:
        """Add the metrics of the declared and of the resident memory of this process."""
        self._registry.register(_Declared(memory, resident))

    def record_images(self, num_images: int, num_visual_tokens: int) -> None:
        """Record the images of a request that goes to the workers."""
        if num_images == 0:
            return
        self._num_image_requests += 1
        self.num_images += num_images
        self.num_visual_tokens += num_visual_tokens
        self._images.inc(num_images)
        self._visual_tokens.inc(num_visual_tokens)
        self._visual_tokens_per_request.observe(num_visual_tokens)

    def first_token(
        self,
        seconds: float,
        stages: Mapping[str, float],
        modality: Modality,
        target: float | None,
    ) -> None:
        """Record the first token of a request: its TTFT and stages, in seconds."""
        met = self.ttft[modality].add(seconds, stages, target)
        slo = "met" if met else "missed"
        self._count_token()
        self._ttft_total.labels(slo, modality).inc()
        for stage, share in stages.items():
            self._stage_seconds.labels(stage, modality).observe(share)
            self._stage_total.labels(stage, slo, modality).inc(share)

    def further_choice(self) -> None:
        """Record the first token of a choice other than the first."""
        self._count_token()

    def next_token(self, seconds: float) -> None:
        """Record a further token, `seconds` after the previous one of its choice."""
        self._count_token()
        self._gaps.add(seconds)

    def request(self, outcome: str) -> None:
        """Record the end of a request."""
        self.num_requests += 1
        self._requests.labels(outcome).inc()

    def refused(self, bound: Bound) -> None:
        """Record that a limit of this gateway rejected a request."""
        self._refused.labels(bound).inc()

    @property
    def gaps(self) -> dict[str, Any]:
        """`gaps` of `/stats`: the histogram of times between tokens."""
        buckets = self._gaps.buckets
        return {"count": sum(buckets.counts), "buckets": dict(buckets.cumulative)}

    def tick(self, now: float) -> None:
        """Record the counters for the rates. Call it at least once a second."""
        self._rates.note(now, self._totals)

    def rates(self, now: float) -> dict[str, float]:
        """`rates` of `/stats`."""
        found = self._rates.per_second(now, self._totals)
        image_requests = found.pop("image_requests")
        mean = found["visual_tokens_per_second"] / image_requests if image_requests else 0.0
        return {
            "window_seconds": self._rates.window_seconds,
            **found,
            "visual_tokens_per_image_request": mean,
        }

    def exposition(self, *, num_inflight: int, accepting: bool) -> bytes:
        """Return `/metrics` in Prometheus' text format."""
        self._inflight.set(num_inflight)
        self._accepting.set(accepting)
        self._heartbeat.set(time.time())
        self._memory_limit.set(self._memory.num_bytes)
        for kind in Kind:
            self._memory_bytes.labels(kind).set(self._memory.used(kind))
        text: bytes = generate_latest(self._registry)
        return text

    @property
    def _totals(self) -> dict[str, float]:
        return {
            "requests_per_second": self.num_requests,
            "output_tokens_per_second": self.num_output_tokens,
            "visual_tokens_per_second": self.num_visual_tokens,
            "image_requests": self._num_image_requests,
        }

    def _count_token(self) -> None:
        self.num_output_tokens += 1
        self._output_tokens.inc()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, registry=self._registry)


class _Declared(Collector):
    """Declared memory of the process by part, and its resident memory."""

    def __init__(self, memory: ProcessMemory, resident: Callable[[], int]) -> None:
        self._memory = memory
        self._resident = resident

    def collect(self) -> Iterable[Metric]:
        memory = HostMemory(self._memory, self._resident())
        for metric in HOST_MEMORY_METRICS:
            if (family := metric.family(metric.value(memory))) is not None:
                yield family


class _GapSeconds(Collector):
    """The histogram of times between tokens; `/stats` has the same buckets."""

    def __init__(self, gaps: Seconds) -> None:
        self._gaps = gaps

    def collect(self) -> Iterable[Metric]:
        buckets = self._gaps.buckets
        yield HistogramMetricFamily(
            metrics.ITL_SECONDS,
            "Time between two tokens of an answer.",
            buckets=list(buckets.cumulative),
            sum_value=buckets.total,
        )


class _TtftSeconds(Collector):
    """The histogram of TTFT. Its edges follow the target, unlike prometheus_client's."""

    def __init__(self, ttft: Mapping[Modality, TTFTSummary]) -> None:
        self._ttft = ttft

    def collect(self) -> Iterable[Metric]:
        """Return one family with a series for each modality that has requests."""
        family = HistogramMetricFamily(
            metrics.TTFT_SECONDS,
            "Time to first token, from the last byte of the request.",
            labels=["modality"],
        )
        for modality, summary in self._ttft.items():
            buckets = summary.buckets
            if any(buckets.counts):
                family.add_metric(
                    [modality], buckets=list(buckets.cumulative), sum_value=buckets.total
                )
        yield family


TARGET_EDGES: Final = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Edges around a target, in multiples of it."""


class TTFTSummary:
    """TTFT of the requests of one modality. The event loop is the only writer.

    If the target changes, the edges around the old target are dropped. Their counts move to the
    next higher bucket.
    """

    def __init__(self) -> None:
        self._seconds = Seconds(SECONDS_BUCKETS)
        self._target: float | None = None
        self._count = 0
        self._missed = 0
        self._stages = {stage: {"met": 0.0, "missed": 0.0} for stage in STAGES}
        self._stage_seconds = {stage: Seconds(STAGE_BUCKETS) for stage in STAGES}

    def add(self, seconds: float, stages: Mapping[str, float], target: float | None) -> bool:
        """Record one request, in seconds; return whether it met the target."""
        if target is not None and target != self._target:
            self._target = target
            self._seconds.regroup([*SECONDS_BUCKETS, *(target * share for share in TARGET_EDGES)])
        met = target is None or seconds <= target
        self._seconds.add(seconds)
        self._count += 1
        self._missed += not met
        for stage, share in stages.items():
            self._stages[stage]["met" if met else "missed"] += share
            self._stage_seconds[stage].add(share)
        return met

    @property
    def buckets(self) -> Buckets:
        return self._seconds.buckets

    @property
    def body(self) -> dict[str, Any]:
        """An entry of `ttft` of `/stats`."""
        buckets = self._seconds.buckets
        return {
            "count": self._count,
            "missed": self._missed,
            "sum_seconds": buckets.total,
            "buckets": dict(buckets.cumulative),
            "stages": {
                stage: {**sums, "buckets": dict(self._stage_seconds[stage].buckets.cumulative)}
                for stage, sums in self._stages.items()
            },
        }
