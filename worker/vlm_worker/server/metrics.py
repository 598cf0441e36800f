"""`/metrics` and `/stats` (version 1, docs/stats.schema.json) of a worker.

Most metrics are read from one snapshot of the engine when a page is requested. `WorkerMetrics` adds
the durations and bytes of transfers and image decoding.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vlm_worker import metrics
from vlm_worker.core.request_memory import MemoryKind
from vlm_worker.engine.settings import EncoderCacheStats, EngineStats, KVStats
from vlm_worker.errors import Refusal
from vlm_worker.media.settings import REFUSALS, MediaTimes
from vlm_worker.roles.context import TransferStats
from vlm_worker.server.state import (
    CallOutcome,
    LeaseCounts,
    Snapshot,
    TransferCounts,
    WorkerState,
    growth_of,
)

CONTENT_TYPE = CONTENT_TYPE_LATEST


class WorkerMetrics:
    """The metrics of one process. Label values come from closed sets only."""

    def __init__(self, state: WorkerState, snapshot: Callable[[], Snapshot | None]) -> None:
        # avoids an unused `_created` series for each counter
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._registry.register(_FromSnapshot(state, snapshot))
        self._seconds = {
            "kv": self._histogram(metrics.KV_TRANSFER_SECONDS, "From the first block to the last."),
            "embed": self._histogram(metrics.EMBED_TRANSFER_SECONDS, "From request to last row."),
        }
        self._bytes = {
            "kv": self._counter(metrics.KV_TRANSFER_BYTES, "KV bytes pulled from prefill."),
            "embed": self._counter(metrics.EMBED_TRANSFER_BYTES, "Embedding bytes pulled."),
        }
        self._media_seconds = self._histogram(
            metrics.MEDIA_SECONDS, "From an image's bytes to its patches.", "part"
        )
        self._media_failures = self._counter(
            metrics.MEDIA_FAILURES_TOTAL, "Images that could not be used.", "reason"
        )
        for code in REFUSALS:
            self._media_failures.labels(code)

    def observe(self, transfer: TransferStats) -> None:
        """Record a transfer that this worker pulled."""
        self._seconds[transfer.kind].observe(transfer.seconds)
        self._bytes[transfer.kind].inc(transfer.num_bytes)

    def image_prepared(self, times: MediaTimes) -> None:
        """See `media.settings.MediaObserver`."""
        for part in ("queue", "decode", "prepare", "key"):
            self._media_seconds.labels(part).observe(getattr(times, part))

    def image_refused(self, code: str) -> None:
        """See `media.settings.MediaObserver`."""
        self._media_failures.labels(code).inc()

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        buckets = metrics.SECONDS_BUCKETS
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)


class _FromSnapshot(Collector):
    """Collector of the values that a snapshot contains."""

    def __init__(self, state: WorkerState, snapshot: Callable[[], Snapshot | None]) -> None:
        self._state = state
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        state = self._state
        yield from process_families(
            accepting=state.accepting, heartbeat=state.heartbeat, outcomes=state.outcomes
        )
        snapshot = self._snapshot()
        if snapshot is not None:
            yield from snapshot_families(snapshot, max_requests=state.settings.max_requests)


Word = TypeVar("Word", bound=str)


def process_families(
    *, accepting: bool, heartbeat: float | None, outcomes: Mapping[CallOutcome, int]
) -> Iterable[Metric]:
    """Yield the metrics that exist before the model is loaded.

    `heartbeat` is in seconds since 1970.
    """
    yield gauge(metrics.ACCEPTING, "1 while the process accepts new work.", float(accepting))
    if heartbeat is not None:
        yield gauge(
            metrics.HEARTBEAT_TIMESTAMP_SECONDS, "When the engine last reported.", heartbeat
        )
    ended = {outcome.value: outcomes[outcome] for outcome in CallOutcome}
    yield labelled_counter(metrics.REQUESTS_TOTAL, "Calls by how they ended.", "outcome", ended)


def snapshot_families(snapshot: Snapshot, *, max_requests: int) -> Iterable[Metric]:
    """Yield the metrics of a snapshot; `max_requests` is the maximum of running sequences."""
    engine = snapshot.engine
    yield gauge(metrics.INFLIGHT, "Requests in flight.", engine.inflight)
    yield gauge(
        metrics.BATCH_OCCUPANCY,
        "Running sequences divided by their maximum.",
        engine.num_running / (engine.queue.running_limit or max_requests),
    )
    yield from _queue(engine)
    if engine.kv is not None:
        yield from _kv(engine.kv)
    yield _kv_request_bytes(engine)
    yield from _leases(snapshot.leases)
    yield from _transfers(snapshot.transfers)
    yield from _memory(snapshot)
    yield from _encoder_cache(engine.encoder_cache)
    yield from _prefix_cache(engine)
    yield from _counters(engine)


def _queue(engine: EngineStats) -> Iterable[Metric]:
    queue = engine.queue
    yield labelled_gauge(metrics.QUEUE_REQUESTS, "Waiting sequences.", "lane", queue.waiting)
    yield gauge(
        metrics.QUEUE_IMAGES, "Images that wait for the encoder.", engine.num_waiting_images
    )
    yield gauge(
        metrics.QUEUE_OLDEST_SECONDS,
        "Age of the oldest waiting sequence.",
        queue.oldest_wait_seconds,
    )
    yield labelled_counter(
        metrics.ADMITTED_TOTAL,
        "Sequences admitted, by rule.",
        "reason",
        queue.admitted,
    )
    yield labelled_counter(
        metrics.REFUSED_TOTAL, "Requests refused, by limit.", "bound", queue.refused
    )
    yield gauge(metrics.MAX_RUNNING_REQUESTS, "Maximum of running sequences.", queue.running_limit)
    yield gauge(
        metrics.WORK_QUEUED_SECONDS,
        "Predicted service time of the queued work.",
        engine.work_queued_seconds,
    )
    yield counter(
        metrics.WORK_STARTED_SECONDS_TOTAL,
        "Work that left the queue.",
        engine.work_admitted_seconds_total,
    )


def _kv(kv: KVStats) -> Iterable[Metric]:
    yield gauge(
        metrics.KV_CAPACITY_TOKENS, "KV tokens that fit into the cache.", kv.capacity_tokens
    )
    yield gauge(metrics.KV_QUEUED_TOKENS, "Tokens of waiting sequences.", kv.queued_tokens)
    states = {
        "running": kv.running_tokens,
        "reserved": kv.reserved_tokens,
        "cached": kv.cached_tokens,
        "free": kv.free_tokens,
    }
    yield labelled_gauge(metrics.KV_TOKENS, "KV tokens by state.", "state", states)


def _kv_request_bytes(engine: EngineStats) -> Metric:
    family = HistogramMetricFamily(
        metrics.KV_REQUEST_BYTES, "KV bytes of a sequence when it ended.", labels=["modality"]
    )
    for modality, buckets in engine.kv_request_bytes:
        family.add_metric([modality], buckets=list(buckets.cumulative), sum_value=buckets.total)
    return family


def _leases(leases: LeaseCounts) -> Iterable[Metric]:
    states = {
        "held": leases.held,
        "reserved": leases.reserved,
        "quarantined": leases.quarantined,
    }
    yield labelled_gauge(metrics.LEASES, "Leases by state.", "state", states)
    yield counter(metrics.LEASES_EXPIRED_TOTAL, "Leases that expired.", leases.expired)


def _transfers(transfers: TransferCounts) -> Iterable[Metric]:
    refused = {refusal.value: transfers.refused.get(refusal, 0) for refusal in Refusal}
    yield labelled_counter(
        metrics.TRANSFERS_REFUSED_TOTAL, "Pulled transfers that were rejected.", "reason", refused
    )
    exposed = {"used": transfers.exposed_bytes, "lost": transfers.lost_bytes}
    yield labelled_gauge(
        metrics.EXPOSED_BYTES, "Memory that peers read directly.", "state", exposed
    )


def _memory(snapshot: Snapshot) -> Iterable[Metric]:
    memory = snapshot.memory
    for name, text, values in (
        (metrics.REQUEST_MEMORY_BYTES, "Bytes that requests hold.", memory.used),
        (metrics.REQUEST_MEMORY_LIMIT_BYTES, "Maximum of these bytes.", memory.limits),
    ):
        by_kind = {kind: values.get(kind, 0) for kind in MemoryKind}
        yield labelled_gauge(name, text, "kind", by_kind)
    declared = memory.declared
    text = "Host memory that this process may use, by purpose."
    yield labelled_gauge(metrics.MEMORY_DECLARED_BYTES, text, "part", declared.by_part())
    yield gauge(metrics.MEMORY_DECLARED_TOTAL_BYTES, "Sum of the parts.", declared.total)
    yield gauge(metrics.MEMORY_RESIDENT_BYTES, "Resident host memory.", memory.resident)
    variant = {snapshot.native_kernels: 1.0}
    text = "Variant of the C++ kernels; none: torch computes, slower."
    yield labelled_gauge(metrics.NATIVE_KERNELS_INFO, text, "variant", variant)


def _encoder_cache(cache: EncoderCacheStats) -> Iterable[Metric]:
    tiers = {"hot": cache.hot, "cold": cache.cold}
    size = {name: tier.bytes for name, tier in tiers.items()}
    hits = {name: tier.hits for name, tier in tiers.items()}
    evictions = {name: tier.evictions for name, tier in tiers.items()}
    moves = {"hot": cache.promotions, "cold": cache.demotions}
    yield labelled_gauge(metrics.ENCODER_CACHE_BYTES, "Bytes of cached embeddings.", "tier", size)
    yield labelled_counter(metrics.ENCODER_CACHE_HITS, "Encoder cache hits.", "tier", hits)
    yield counter(
        metrics.ENCODER_CACHE_JOINS, "Lookups that found the image being encoded.", cache.joins
    )
    yield counter(metrics.ENCODER_CACHE_MISSES, "Encoder cache misses.", cache.misses)
    yield labelled_counter(
        metrics.ENCODER_CACHE_EVICTIONS, "Embeddings evicted from a tier.", "tier", evictions
    )
    yield labelled_counter(
        metrics.ENCODER_CACHE_MOVES, "Embeddings moved between the tiers.", "to", moves
    )
    yield counter(
        metrics.ENCODER_CACHE_EXPIRATIONS,
        "Embeddings unused for their time to live.",
        cache.expirations,
    )


def _prefix_cache(engine: EngineStats) -> Iterable[Metric]:
    for name, text, both, visual in (
        (
            metrics.PREFIX_CACHE_QUERIES,
            "Prompt tokens looked up.",
            engine.prefix_cache_queries,
            engine.prefix_cache_visual_queries,
        ),
        (
            metrics.PREFIX_CACHE_HITS,
            "Prompt tokens found.",
            engine.prefix_cache_hits,
            engine.prefix_cache_visual_hits,
        ),
    ):
        yield labelled_counter(name, text, "kind", {"text": both - visual, "visual": visual})


def _counters(engine: EngineStats) -> Iterable[Metric]:
    for name, text, value in (
        (metrics.IMAGES_TOTAL, "Images encoded.", engine.images),
        (metrics.PATCHES_TOTAL, "Patches encoded.", engine.patches),
        (metrics.VISUAL_TOKENS_TOTAL, "Visual tokens encoded.", engine.visual_tokens),
        (metrics.OUTPUT_TOKENS_TOTAL, "Tokens sampled.", engine.output_tokens),
        (metrics.PREEMPTIONS_TOTAL, "Sequences preempted.", engine.preemptions),
        (metrics.OUT_OF_MEMORY_TOTAL, "Calls that ran out of memory.", engine.out_of_memory),
        (metrics.PREFIX_CACHE_EVICTIONS, "Blocks evicted.", engine.prefix_cache_evictions),
        (
            metrics.INVARIANT_VIOLATIONS_TOTAL,
            "Accounting mismatches; nonzero is a bug.",
            engine.invariant_violations,
        ),
    ):
        yield counter(name, text, value)


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def labelled_gauge(name: str, text: str, label: str, values: Mapping[Word, float]) -> Metric:
    """Return a gauge with one series per value of a closed set."""
    family = GaugeMetricFamily(name, text, labels=[label])
    for word, value in values.items():
        family.add_metric([word], value)
    return family


def labelled_counter(name: str, text: str, label: str, values: Mapping[Word, float]) -> Metric:
    """Return a counter with one series per value of a closed set."""
    family = CounterMetricFamily(name, text, labels=[label])
    for word, value in values.items():
        family.add_metric([word], value)
    return family


VERSION = 1


def stats_document(state: WorkerState, snapshot: Snapshot | None) -> dict[str, Any]:
    """Return the document of `/stats`. Without a snapshot, its values are zero or null."""
    settings = state.settings
    identity = settings.identity
    engine = snapshot.engine if snapshot else EngineStats()
    return {
        "version": VERSION,
        "role": settings.role.value,
        "stages": sorted(stage.value for stage in settings.stages),
        "service": identity.service,
        "revision": identity.revision,
        "compat": settings.compat,
        "variant": identity.variant,
        "pod_name": identity.pod_name,
        "pod_uid": identity.pod_uid,
        "boot_id": state.boot_id.hex(),
        "uptime_seconds": round(state.uptime_seconds, 3),
        "phase": state.phase.value,
        "message": state.message,
        "accepting": state.accepting,
        "inflight": max(engine.inflight, snapshot.num_calls) if snapshot else 0,
        "queue": {
            "requests": engine.num_waiting + engine.num_waiting_images,
            "work_seconds": engine.work_queued_seconds,
            "started_work_seconds_total": engine.work_admitted_seconds_total,
            "oldest_wait_seconds": engine.queue.oldest_wait_seconds,
            "waiting": dict(engine.queue.waiting),
            "running_limit": engine.queue.running_limit,
        },
        "kv": dataclasses.asdict(engine.kv) if engine.kv else None,
        "encoder_cache": dataclasses.asdict(engine.encoder_cache) if snapshot else None,
        "leases": dataclasses.asdict(snapshot.leases) if snapshot else None,
        "counters": {
            "requests": engine.requests,
            "images": engine.images,
            "visual_tokens": engine.visual_tokens,
            "output_tokens": engine.output_tokens,
            "preemptions": engine.preemptions,
            "patches": engine.patches,
            "out_of_memory": engine.out_of_memory,
            "prefix_cache_queries": engine.prefix_cache_queries,
            "prefix_cache_hits": engine.prefix_cache_hits,
        },
        "rates": _rates(state, engine),
        "model": dataclasses.asdict(state.model) if state.model else None,
        "device": state.device,
        "busy": {kind.value: dataclasses.asdict(busy) for kind, busy in engine.busy.items()},
        "ttft": None,
        "gaps": None,
        "held_for": None,
        "config_hash": None,
    }


def _rates(state: WorkerState, engine: EngineStats) -> dict[str, float]:
    """Return the growth per second over the rate window."""
    found = state.rates.per_second(time.monotonic(), growth_of(engine))
    return {"window_seconds": state.rates.window_seconds, **found}
