"""What the gateway measures: `/metrics` for Prometheus, and the part of `/stats` that it owns.

Written by the event loop alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
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
from vlm_worker.core.histogram import Histogram as Seconds
from vlm_worker.core.rates import Rates
from vlm_worker.gateway.memory import Bound, Kind, MemoryBudget
from vlm_worker.gateway.ttft import TtftSummary
from vlm_worker.metrics import SECONDS_BUCKETS, STAGE_BUCKETS
from vlm_worker.types import Modality

VISUAL_TOKENS_BUCKETS: Final = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Meters:
    """Every collector of the gateway; label values come from closed sets alone.

    `now` is the time on the gateway's clock, as in all that is told it. `memory` is what requests
    may hold.
    """

    def __init__(self, now: float = 0.0, *, memory: MemoryBudget | None = None) -> None:
        # a second series for each counter, which nobody reads
        disable_created_metrics()  # type: ignore[no-untyped-call]
        registry = self._registry = CollectorRegistry()
        self.ttft = {modality: TtftSummary() for modality in Modality}
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
            "Time that each stage owned of the time to first token.",
            ["stage", "modality"],
            buckets=STAGE_BUCKETS,
            registry=registry,
        )
        self._stage_total = self._counter(
            metrics.TTFT_STAGE_SECONDS_TOTAL,
            "Seconds of time to first token by the stage that owned them.",
            "stage",
            "slo",
            "modality",
        )
        self._ttft_total = self._counter(
            metrics.TTFT_TOTAL,
            "Requests by whether they met the target for the time to first token.",
            "slo",
            "modality",
        )
        registry.register(_GapSeconds(self._gaps))
        self._requests = self._counter(metrics.REQUESTS_TOTAL, "Requests by outcome.", "outcome")
        self._output_tokens = self._counter(metrics.OUTPUT_TOKENS_TOTAL, "Tokens delivered.")
        self._images = self._counter(metrics.IMAGES_TOTAL, "Pictures in requests.")
        self._visual_tokens = self._counter(
            metrics.VISUAL_TOKENS_TOTAL, "Tokens that pictures of requests became."
        )
        self._visual_tokens_per_request = Histogram(
            metrics.VISUAL_TOKENS_PER_REQUEST,
            "Visual tokens of the requests with pictures.",
            buckets=VISUAL_TOKENS_BUCKETS,
            registry=registry,
        )
        self._refused = self._counter(
            metrics.GATEWAY_REFUSED_TOTAL, "Requests refused by what was full.", "bound"
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
        self._inflight = self._gauge(metrics.INFLIGHT, "Requests being served.")
        self._accepting = self._gauge(metrics.ACCEPTING, "1 while new requests are taken.")
        self._heartbeat = self._gauge(
            metrics.HEARTBEAT_TIMESTAMP_SECONDS, "When the event loop last answered."
        )

    def pictures(self, num_images: int, num_visual_tokens: int) -> None:
        """A request goes to the workers with so many pictures."""
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
        """A first token left."""
        met = self.ttft[modality].add(seconds, stages, target)
        slo = "met" if met else "missed"
        self._count_token()
        self._ttft_total.labels(slo, modality).inc()
        for stage, share in stages.items():
            self._stage_seconds.labels(stage, modality).observe(share)
            self._stage_total.labels(stage, slo, modality).inc(share)

    def further_choice(self) -> None:
        """The first token of another choice than the first left."""
        self._count_token()

    def next_token(self, seconds: float) -> None:
        """Another token left, so long after the one before."""
        self._count_token()
        self._gaps.add(seconds)

    def request(self, outcome: str) -> None:
        """A request had its last word."""
        self.num_requests += 1
        self._requests.labels(outcome).inc()

    def refused(self, bound: Bound) -> None:
        """A bound of this gateway refused a request."""
        self._refused.labels(bound).inc()

    @property
    def gaps(self) -> dict[str, Any]:
        """Times between tokens, as in `/stats`."""
        buckets = self._gaps.buckets
        return {"count": sum(buckets.counts), "buckets": dict(buckets.cumulative)}

    def tick(self, now: float) -> None:
        """Note where the counters stand; called at least once a second while they grow."""
        self._rates.note(now, self._totals)

    def rates(self, now: float) -> dict[str, float]:
        """As in `/stats`."""
        found = self._rates.per_second(now, self._totals)
        image_requests = found.pop("image_requests")
        mean = found["visual_tokens_per_second"] / image_requests if image_requests else 0.0
        return {
            "window_seconds": self._rates.window_seconds,
            **found,
            "visual_tokens_per_image_request": mean,
        }

    def exposition(self, *, num_inflight: int, accepting: bool) -> bytes:
        """`/metrics`, in Prometheus' text format."""
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


class _GapSeconds(Collector):
    """The histogram of times between tokens, which `/stats` tells too."""

    def __init__(self, gaps: Seconds) -> None:
        self._gaps = gaps

    def collect(self) -> Iterable[Metric]:
        """One family, one series."""
        buckets = self._gaps.buckets
        yield HistogramMetricFamily(
            metrics.ITL_SECONDS,
            "Time between two tokens of an answer.",
            buckets=list(buckets.cumulative),
            sum_value=buckets.total,
        )


class _TtftSeconds(Collector):
    """The histogram of TTFT; its edges change with the target, which prometheus_client's cannot."""

    def __init__(self, ttft: Mapping[Modality, TtftSummary]) -> None:
        self._ttft = ttft

    def collect(self) -> Iterable[Metric]:
        """One family, a series for each modality that came."""
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
