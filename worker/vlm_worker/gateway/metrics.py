"""`/metrics` and the TTFT part of `/stats` of a gateway.

The edges of the TTFT buckets follow the target. So the share of requests that miss it is exact, and
the 95th percentile is precise near it.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from vlm_worker import metrics
from vlm_worker.core.measurements import Buckets, Histogram, Rates
from vlm_worker.core.process_memory import HOST_MEMORY_METRICS, HostMemory, ProcessMemory
from vlm_worker.gateway.fetching import fetcher
from vlm_worker.gateway.memory import Bound, Kind, MemoryBudget
from vlm_worker.gateway.pod_caches import PodCaches
from vlm_worker.gateway.rate_limits import Account
from vlm_worker.gateway.visual import TIERS
from vlm_worker.metrics import COUNTER, GAUGE, SECONDS_BUCKETS, STAGE_BUCKETS, Metric, families
from vlm_worker.types import STAGES, Modality
from vlm_worker.wire.identity_store import IDENTITY_METRICS, IdentityStore

OUTCOMES: Final = ("ok", "invalid", "rejected", "cancelled", "error")
WAKE_BUCKETS: Final = (1, 2, 5, 10, 20, 30, 60, 120, 180, 300, 600, 1200, 1800, 3600)
FETCH_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
VISUAL_TOKENS_BUCKETS: Final = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class GatewayMetrics:
    """All metrics of a gateway. Label values come from closed sets only; tenants are names of keys.

    `now` is a time in seconds on the gateway's clock, here and in all methods. `memory` is the
    budget of the requests. The owner of a PodCaches sets `caches`, that of session prefetches
    `prefetches`, that of the limits of tenants `accounts`.
    """

    def __init__(self, now: float = 0.0, *, memory: MemoryBudget | None = None) -> None:
        self.ttft = {modality: TTFTSummary() for modality in Modality}
        self.identity: IdentityStore | None = None
        self.num_output_tokens = 0
        self.num_requests = 0
        self.num_visual_tokens = 0
        self.image_tiers: Counter[str] = Counter(dict.fromkeys(TIERS, 0))
        self.memory = memory or MemoryBudget(0)
        self.caches = PodCaches()
        self.prefetches: Counter[str] = Counter()
        self.accounts: Mapping[str, Account] = {}
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.refusals = Counter(dict.fromkeys(Bound, 0))
        self.fetches = Counter(dict.fromkeys(fetcher.OUTCOMES, 0))
        self._num_image_requests = 0
        self._rates = Rates(now)
        self._gaps = Histogram(SECONDS_BUCKETS)
        self._visual_tokens = Histogram(VISUAL_TOKENS_BUCKETS)
        self._wakes = Histogram(WAKE_BUCKETS)
        self._fetches = Histogram(FETCH_BUCKETS)
        self._host: Callable[[], HostMemory] | None = None

    def declare(self, memory: ProcessMemory, resident: Callable[[], int]) -> None:
        """Add the metrics of the declared and of the resident memory of this process."""
        self._host = lambda: HostMemory(memory, resident())

    @property
    def num_images(self) -> int:
        """Images in requests."""
        return self.image_tiers.total()

    def record_images(self, tiers: Sequence[str], num_visual_tokens: int) -> None:
        """Record the images of a request that goes to the workers, each by its tier."""
        if not tiers:
            return
        self._num_image_requests += 1
        self.image_tiers.update(tiers)
        self.num_visual_tokens += num_visual_tokens
        self._visual_tokens.add(num_visual_tokens)

    def first_token(
        self,
        seconds: float,
        stages: Mapping[str, float],
        modality: Modality,
        target: float | None,
        *,
        num_tokens: int = 1,
    ) -> None:
        """Record the first token of a request: its TTFT and stages, in seconds.

        `num_tokens` is 0 if the client gets the prompt alone.
        """
        self.ttft[modality].add(seconds, stages, target)
        self.num_output_tokens += num_tokens

    def further_choice(self, num_tokens: int) -> None:
        self.num_output_tokens += num_tokens

    def next_token(self, seconds: float) -> None:
        """Record a further token, `seconds` after the previous one of its choice."""
        self.num_output_tokens += 1
        self._gaps.add(seconds)

    def request(self, outcome: str) -> None:
        self.num_requests += 1
        self.outcomes[outcome] += 1

    def waited_for_wake(self, seconds: float) -> None:
        """Record the end of a request that waited for the pods of a service at zero."""
        self._wakes.add(seconds)

    def fetched(self, outcome: str, seconds: float) -> None:
        """Record the end of the fetch of an image by URL."""
        self.fetches[outcome] += 1
        self._fetches.add(seconds)

    def refused(self, bound: Bound) -> None:
        self.refusals[bound] += 1

    @property
    def gaps(self) -> dict[str, Any]:
        """`gaps` of `/stats`: the histogram of times between tokens."""
        buckets = self._gaps.buckets
        return {"count": sum(buckets.counts), "buckets": dict(buckets.cumulative)}

    def tick(self, now: float) -> None:
        """Record the counters for the rates. Call it at least once a second."""
        self._rates.note(now, self._totals)

    def rates(self, now: float) -> dict[str, float]:
        rates = self._rates.per_second(now, self._totals)
        image_requests = rates.pop("image_requests")
        mean = rates["visual_tokens_per_second"] / image_requests if image_requests else 0.0
        return {
            "window_seconds": self._rates.window_seconds,
            **rates,
            "visual_tokens_per_image_request": mean,
        }

    def exposition(
        self,
        *,
        num_inflight: int,
        accepting: bool,
        num_lent: int = 0,
        has_valid_settings: bool = True,
    ) -> bytes:
        registry = CollectorRegistry()
        registry.register(_Page(self, num_inflight, accepting, num_lent, has_valid_settings))
        text: bytes = generate_latest(registry)
        return text

    def histograms(self) -> Iterable[Family]:
        ttft = HistogramMetricFamily(
            metrics.TTFT_SECONDS,
            "Time to first token, from the last byte of the request.",
            labels=["modality"],
        )
        for modality, summary in self.ttft.items():
            if any(summary.buckets.counts):
                cumulative, total = summary.buckets.cumulative, summary.buckets.total
                ttft.add_metric([modality], buckets=list(cumulative), sum_value=total)
        yield ttft
        gaps = self._gaps.buckets
        yield HistogramMetricFamily(
            metrics.ITL_SECONDS,
            "Time between two tokens of an answer.",
            buckets=list(gaps.cumulative),
            sum_value=gaps.total,
        )
        yield HistogramMetricFamily(
            metrics.VISUAL_TOKENS_PER_REQUEST,
            "Visual tokens per request with images.",
            buckets=_with_decimals(self._visual_tokens.buckets),
            sum_value=self._visual_tokens.buckets.total,
        )
        yield HistogramMetricFamily(
            metrics.WAKE_WAIT_SECONDS,
            "Wait of requests for the pods of a service at zero.",
            buckets=_with_decimals(self._wakes.buckets),
            sum_value=self._wakes.buckets.total,
        )
        yield HistogramMetricFamily(
            metrics.IMAGE_FETCH_SECONDS,
            "Time of a fetch of an image by URL.",
            buckets=_with_decimals(self._fetches.buckets),
            sum_value=self._fetches.buckets.total,
        )

    def stages(self) -> Iterable[Family]:
        """The metrics by stage and by whether the target was met.

        Stages are those of modalities with requests. The counts of requests start at 0, so that
        their rates include the first request.
        """
        histogram = HistogramMetricFamily(
            metrics.STAGE_SECONDS,
            "Time of each stage within the time to first token.",
            labels=["stage", "modality"],
        )
        seconds = CounterMetricFamily(
            metrics.TTFT_STAGE_SECONDS_TOTAL,
            "Seconds of time to first token, by stage.",
            labels=["stage", "slo", "modality"],
        )
        requests = CounterMetricFamily(
            metrics.SLO_REQUESTS_TOTAL,
            "Requests by whether they met the target for the time to first token.",
            labels=["slo", "modality"],
        )
        for modality, summary in self.ttft.items():
            for slo, count in summary.num_requests.items():
                requests.add_metric([slo, modality], count)
                if count:
                    for stage, sums in summary.stages.items():
                        seconds.add_metric([stage, slo, modality], sums[slo])
            if any(summary.num_requests.values()):
                for stage, durations in summary.stage_seconds.items():
                    buckets = durations.buckets
                    histogram.add_metric(
                        [stage, modality], buckets=_with_decimals(buckets), sum_value=buckets.total
                    )
        yield from (histogram, seconds, requests)

    def host_memory(self) -> Iterable[Family]:
        """The declared memory of the process by part, and its resident memory."""
        return () if self._host is None else families(HOST_MEMORY_METRICS, self._host())

    def tenants(self) -> Iterable[Family]:
        """What tenants with limits used; nothing before the first request of one."""
        if not self.accounts:
            return
        requests = CounterMetricFamily(
            metrics.TENANT_REQUESTS_TOTAL, "Requests of tenants with limits.", labels=["tenant"]
        )
        tokens = CounterMetricFamily(
            metrics.TENANT_TOKENS_TOTAL,
            "Tokens of tenants with limits, of prompts and answers.",
            labels=["tenant", "kind"],
        )
        refused = CounterMetricFamily(
            metrics.TENANT_REFUSED_TOTAL,
            "Requests refused by a limit of their tenant.",
            labels=["tenant", "limit"],
        )
        for tenant, account in self.accounts.items():
            requests.add_metric([tenant], account.num_requests)
            tokens.add_metric([tenant, "prompt"], account.num_prompt_tokens)
            tokens.add_metric([tenant, "output"], account.num_output_tokens)
            for limit, count in account.refusals.items():
                refused.add_metric([tenant, limit.value], count)
        yield from (requests, tokens, refused)

    @property
    def _totals(self) -> dict[str, float]:
        return {
            "requests_per_second": self.num_requests,
            "output_tokens_per_second": self.num_output_tokens,
            "visual_tokens_per_second": self.num_visual_tokens,
            "image_requests": self._num_image_requests,
        }


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Page(Collector):
    """The state that one `/metrics` page shows."""

    metrics: GatewayMetrics
    num_inflight: int
    accepting: bool
    num_lent: int
    has_valid_settings: bool

    def collect(self) -> Iterable[Family]:
        yield from self.metrics.stages()
        yield from self.metrics.histograms()
        yield from families(_METRICS, self)
        yield from self.metrics.host_memory()
        yield from self.metrics.tenants()
        if self.metrics.identity is not None:
            yield from families(IDENTITY_METRICS, self.metrics.identity)


_METRICS: Final[tuple[Metric[_Page], ...]] = (
    Metric(metrics.REQUESTS_TOTAL, COUNTER, "Requests by outcome.",
           lambda page: page.metrics.outcomes, label="outcome"),
    Metric(metrics.OUTPUT_TOKENS_TOTAL, COUNTER, "Tokens delivered.",
           lambda page: page.metrics.num_output_tokens),
    Metric(metrics.IMAGES_TOTAL, COUNTER, "Images in requests.",
           lambda page: page.metrics.num_images),
    Metric(metrics.VISUAL_TOKENS_TOTAL, COUNTER, "Visual tokens in requests.",
           lambda page: page.metrics.num_visual_tokens),
    Metric(metrics.IMAGE_TIERS_TOTAL, COUNTER, "Images in requests, by tier of visual tokens.",
           lambda page: page.metrics.image_tiers, label="tier"),
    Metric(metrics.ROUTED_CACHED_TOKENS_TOTAL, COUNTER, "Tokens known to be on a chosen pod.",
           lambda page: page.metrics.caches.num_known_tokens, label="stage"),
    Metric(metrics.KNOWN_CACHE_ENTRIES, GAUGE, "Digests known to be on pods.",
           lambda page: page.metrics.caches.num_entries),
    Metric(metrics.LENT_REQUESTS_TOTAL, COUNTER, "Text-only attempts on encoders that lend.",
           lambda page: page.num_lent),
    Metric(metrics.IMAGE_FETCHES_TOTAL, COUNTER, "Fetches of images by URL, by outcome.",
           lambda page: page.metrics.fetches, label="outcome"),
    Metric(metrics.SESSION_PREFETCHES_TOTAL, COUNTER, "Session prefetches, by outcome.",
           lambda page: page.metrics.prefetches or None, label="outcome"),
    Metric(metrics.GATEWAY_REFUSED_TOTAL, COUNTER, "Requests refused, by limit.",
           lambda page: page.metrics.refusals, label="bound"),
    Metric(metrics.GATEWAY_MEMORY_BYTES, GAUGE, "Bytes that requests hold.",
           lambda page: {kind: page.metrics.memory.used(kind) for kind in Kind}, label="kind"),
    Metric(metrics.GATEWAY_MEMORY_LIMIT_BYTES, GAUGE, "Bytes that requests may hold.",
           lambda page: page.metrics.memory.num_bytes),
    Metric(metrics.GATEWAY_SETTINGS_VALID, GAUGE, "1 if the files of settings are applied.",
           lambda page: page.has_valid_settings),
    Metric(metrics.INFLIGHT, GAUGE, "Requests in flight.", lambda page: page.num_inflight),
    Metric(metrics.ACCEPTING, GAUGE, "1 while the process accepts new work.",
           lambda page: page.accepting),
    Metric(metrics.HEARTBEAT_TIMESTAMP_SECONDS, GAUGE, "When the event loop last answered.",
           lambda _: time.time()),
)  # fmt: skip


def _with_decimals(buckets: Buckets) -> list[tuple[str, float]]:
    """The cumulative buckets with edges as prometheus_client writes them, `1.0` and not `1`."""
    return [
        (str(float(edge)) if edge != "+Inf" else edge, count) for edge, count in buckets.cumulative
    ]


TARGET_EDGES: Final = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Edges around a target, in multiples of it."""


class TTFTSummary:
    """TTFT of the requests of one modality. The event loop is the only writer.

    If the target changes, the edges around the old target are dropped. Their counts move to the
    next higher bucket.
    """

    def __init__(self) -> None:
        self._seconds = Histogram(SECONDS_BUCKETS)
        self._target: float | None = None
        self.num_requests = {"met": 0, "missed": 0}
        self.stages = {stage: {"met": 0.0, "missed": 0.0} for stage in STAGES}
        self.stage_seconds = {stage: Histogram(STAGE_BUCKETS) for stage in STAGES}

    def add(self, seconds: float, stages: Mapping[str, float], target: float | None) -> None:
        """Record one request, in seconds."""
        if target is not None and target != self._target:
            self._target = target
            self._seconds.regroup([*SECONDS_BUCKETS, *(target * share for share in TARGET_EDGES)])
        slo = "met" if target is None or seconds <= target else "missed"
        self._seconds.add(seconds)
        self.num_requests[slo] += 1
        for stage, share in stages.items():
            self.stages[stage][slo] += share
            self.stage_seconds[stage].add(share)

    @property
    def buckets(self) -> Buckets:
        return self._seconds.buckets

    @property
    def body(self) -> dict[str, Any]:
        """An entry of `ttft` of `/stats`."""
        buckets = self._seconds.buckets
        return {
            "count": sum(self.num_requests.values()),
            "missed": self.num_requests["missed"],
            "sum_seconds": buckets.total,
            "buckets": dict(buckets.cumulative),
            "stages": {
                stage: {**sums, "buckets": dict(self.stage_seconds[stage].buckets.cumulative)}
                for stage, sums in self.stages.items()
            },
        }
