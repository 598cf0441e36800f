"""`/metrics` and `/stats` (version 1, docs/stats.schema.json) of a worker.

Most metrics are rows of tables, whose values are computed when a page is requested. The engine
thread computes those in `engine.state.COUNTERS`. `WorkerMetrics` adds the durations and bytes of
transfers and image decoding.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from vlm_worker import metrics
from vlm_worker.core.measurements import BusyTime, WorkKind
from vlm_worker.core.probe import Verification
from vlm_worker.core.process_memory import HOST_MEMORY_METRICS
from vlm_worker.core.request_memory import MemoryKind
from vlm_worker.engine.settings import DiskStats, EncoderCacheStats, EngineStats, KVStats
from vlm_worker.engine.state import COUNTERS
from vlm_worker.errors import Refusal
from vlm_worker.media.pool import REFUSALS, MediaTimes
from vlm_worker.metrics import COUNTER, GAUGE, Metric
from vlm_worker.roles.context import TransferStats
from vlm_worker.server.state import CallOutcome, Snapshot, WorkerState, growth_of
from vlm_worker.wire.identity_store import IDENTITY_METRICS

CONTENT_TYPE = CONTENT_TYPE_LATEST
MEDIA_PARTS: Final = ("queue", "decode", "prepare", "key")


class WorkerMetrics:
    """The metrics of one process. Label values come from closed sets only."""

    def __init__(self, state: WorkerState, snapshot: Callable[[], Snapshot | None]) -> None:
        # avoids an unused `_created` series for each counter
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._registry.register(_FromSnapshot(state, snapshot))
        self._seconds = {
            "kv": self._histogram(
                "triptych_kv_transfer_seconds", "From the first block to the last."
            ),
            "embed": self._histogram(
                "triptych_embed_transfer_seconds", "From request to last row."
            ),
        }
        self._bytes = {
            "kv": self._counter(
                "triptych_kv_transfer_bytes_total", "KV bytes pulled from prefill."
            ),
            "embed": self._counter(
                "triptych_embed_transfer_bytes_total", "Embedding bytes pulled."
            ),
        }
        self._media_seconds = self._histogram(
            "triptych_media_seconds", "From an image's bytes to its patches.", "part"
        )
        self._media_failures = self._counter(
            "triptych_media_failures_total", "Images that could not be used.", "reason"
        )
        # a rate does not contain the first increment of a series that did not exist
        for part in MEDIA_PARTS:
            self._media_seconds.labels(part)
        for code in REFUSALS:
            self._media_failures.labels(code)

    def observe(self, transfer: TransferStats) -> None:
        """Record a transfer that this worker pulled."""
        self._seconds[transfer.kind].observe(transfer.seconds)
        self._bytes[transfer.kind].inc(transfer.num_bytes)

    def image_prepared(self, times: MediaTimes) -> None:
        for part in MEDIA_PARTS:
            self._media_seconds.labels(part).observe(getattr(times, part))

    def image_refused(self, code: str) -> None:
        self._media_failures.labels(code).inc()

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        buckets = metrics.SECONDS_BUCKETS
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)


class _FromSnapshot(Collector):
    def __init__(self, state: WorkerState, snapshot: Callable[[], Snapshot | None]) -> None:
        self._state = state
        self._snapshot = snapshot

    def collect(self) -> Iterable[Family]:
        families = [metric.family(metric.value(self._state)) for metric in PROCESS_METRICS]
        if (identity := self._state.identity) is not None:
            families += [metric.family(metric.value(identity)) for metric in IDENTITY_METRICS]
        if (snapshot := self._snapshot()) is not None:
            families += [metric.family(metric.value(snapshot)) for metric in SNAPSHOT_METRICS]
            host, counters = snapshot.host_memory, snapshot.engine.counters
            families += [metric.family(metric.value(host)) for metric in HOST_MEMORY_METRICS]
            families += [
                metric.family(counters.get(metric.stats or metric.name)) for metric in COUNTERS
            ]
            families.append(_kv_request_bytes(snapshot.engine))
        return [family for family in families if family is not None]


def _kv_request_bytes(engine: EngineStats) -> Family:
    family = HistogramMetricFamily(
        "triptych_kv_request_bytes", "KV bytes of a sequence when it ended.", labels=["modality"]
    )
    for modality, buckets in engine.kv_request_bytes:
        family.add_metric([modality], buckets=list(buckets.cumulative), sum_value=buckets.total)
    return family


def _kv_by_state(kv: KVStats | None) -> dict[str, float] | None:
    states = ("running", "reserved", "cached", "free")
    return {state: getattr(kv, f"{state}_tokens") for state in states} if kv else None


def _evictions(kv: KVStats | None) -> dict[str, float] | None:
    return {"text": kv.text_evictions, "visual": kv.visual_evictions} if kv else None


def _by_tier(cache: EncoderCacheStats, field: str) -> dict[str, float]:
    """A field of each tier; the disk only if there is one."""
    tiers = {"hot": getattr(cache.hot, field), "cold": getattr(cache.cold, field)}
    return tiers | ({"disk": getattr(cache.disk, field)} if cache.disk.capacity_bytes else {})


def _session_pins(snapshot: Snapshot, field: str) -> Mapping[str, int] | None:
    pins = snapshot.engine.session_pins
    return getattr(pins, field) if pins else None


def _disk_failures(disk: DiskStats) -> dict[str, float] | None:
    if not disk.capacity_bytes:
        return None
    counts = {"dropped_write": disk.dropped_writes, "write": disk.write_errors}
    return {**counts, "read": disk.read_errors}


def _verified(found: Verification | None) -> dict[str, float] | None:
    return None if found is None else {found.attends.value: found.difference}


PROCESS_METRICS: Final[tuple[Metric[WorkerState], ...]] = (
    Metric(metrics.ACCEPTING, GAUGE, "1 while the process accepts new work.",
           lambda state: float(state.accepting)),
    Metric(metrics.HEARTBEAT_TIMESTAMP_SECONDS, GAUGE, "When the engine last reported.",
           lambda state: state.heartbeat),
    Metric(metrics.REQUESTS_TOTAL, COUNTER, "Calls by how they ended.",
           lambda state: {outcome.value: state.outcomes[outcome] for outcome in CallOutcome},
           label="outcome"),
    Metric("triptych_verified_logit_difference", GAUGE,
           "Difference of an unlisted family's logits to transformers', found at start.",
           lambda state: _verified(state.verification), label="attends"),
)  # fmt: skip
"""Metrics that exist before the model is loaded."""

LEASE_STATES: Final = ("held", "reserved", "quarantined")
IDLE: Final = BusyTime()

SNAPSHOT_METRICS: Final[tuple[Metric[Snapshot], ...]] = (
    Metric(metrics.INFLIGHT, GAUGE, "Requests in flight.", lambda s: s.engine.inflight),
    Metric("triptych_busy_seconds_total", COUNTER, "Time in which the device computed, by work.",
           lambda s: {kind.value: s.engine.busy.get(kind, IDLE).seconds for kind in WorkKind},
           label="kind"),
    Metric("triptych_batch_occupancy", GAUGE, "Running sequences divided by their maximum.",
           lambda s: s.engine.num_running / max(s.engine.queue.running_limit, 1)),
    Metric("triptych_queue_requests", GAUGE, "Waiting sequences.",
           lambda s: s.engine.queue.waiting, label="lane"),
    Metric("triptych_queue_images", GAUGE, "Images that wait for the encoder.",
           lambda s: s.engine.num_waiting_images),
    Metric("triptych_queue_oldest_seconds", GAUGE, "Age of the oldest waiting sequence.",
           lambda s: s.engine.queue.oldest_wait_seconds),
    Metric("triptych_admitted_total", COUNTER, "Sequences admitted, by rule.",
           lambda s: s.engine.queue.admitted, label="reason"),
    Metric("triptych_refused_total", COUNTER, "Requests refused, by limit.",
           lambda s: s.engine.queue.refused, label="bound"),
    Metric("triptych_max_running_requests", GAUGE, "Maximum of running sequences.",
           lambda s: s.engine.queue.running_limit),
    Metric("triptych_work_queued_seconds", GAUGE, "Predicted service time of the queued work.",
           lambda s: s.engine.work_queued_seconds),
    Metric("triptych_work_started_seconds_total", COUNTER, "Work that left the queue.",
           lambda s: s.engine.work_admitted_seconds_total),
    Metric("triptych_kv_capacity_tokens", GAUGE, "KV tokens that fit into the cache.",
           lambda s: s.engine.kv.capacity_tokens if s.engine.kv else None),
    Metric("triptych_kv_queued_tokens", GAUGE, "Tokens of waiting sequences.",
           lambda s: s.engine.kv.queued_tokens if s.engine.kv else None),
    Metric("triptych_kv_tokens", GAUGE, "KV tokens by state.",
           lambda s: _kv_by_state(s.engine.kv), label="state"),
    Metric("triptych_prefix_cache_evictions_total", COUNTER, "Cached blocks evicted.",
           lambda s: _evictions(s.engine.kv), label="kind"),
    Metric("triptych_leases", GAUGE, "Leases by state.",
           lambda s: {state: getattr(s.leases, state) for state in LEASE_STATES}, label="state"),
    Metric("triptych_leases_expired_total", COUNTER, "Leases that expired.",
           lambda s: s.leases.expired),
    Metric("triptych_transfers_refused_total", COUNTER, "Pulled transfers that were rejected.",
           lambda s: {refusal.value: s.refused_transfers.get(refusal, 0) for refusal in Refusal},
           label="reason"),
    Metric("triptych_exposed_bytes", GAUGE, "Memory that peers read directly.",
           lambda s: {"used": s.exposed_bytes, "lost": s.lost_bytes},
           label="state"),
    Metric("triptych_request_memory_bytes", GAUGE, "Bytes that requests hold.",
           lambda s: {kind: s.request_bytes.get(kind, 0) for kind in MemoryKind}, label="kind"),
    Metric("triptych_request_memory_limit_bytes", GAUGE, "Maximum of these bytes.",
           lambda s: {kind: s.request_limits.get(kind, 0) for kind in MemoryKind}, label="kind"),
    Metric("triptych_native_kernels_info", GAUGE,
           "Variant of the C++ kernels; none: torch computes, slower.",
           lambda s: {s.native_kernels: 1.0}, label="variant"),
    Metric("triptych_encoder_cache_bytes", GAUGE, "Bytes of cached embeddings.",
           lambda s: _by_tier(s.engine.encoder_cache, "bytes"), label="tier"),
    Metric("triptych_encoder_cache_hits_total", COUNTER, "Encoder cache hits.",
           lambda s: _by_tier(s.engine.encoder_cache, "hits"), label="tier"),
    Metric("triptych_encoder_cache_joins_total", COUNTER,
           "Lookups that found the image being encoded.", lambda s: s.engine.encoder_cache.joins),
    Metric("triptych_encoder_cache_misses_total", COUNTER, "Encoder cache misses.",
           lambda s: s.engine.encoder_cache.misses),
    Metric("triptych_encoder_cache_evictions_total", COUNTER, "Embeddings evicted from a tier.",
           lambda s: _by_tier(s.engine.encoder_cache, "evictions"), label="tier"),
    Metric("triptych_encoder_cache_moves_total", COUNTER, "Embeddings moved between the tiers.",
           lambda s: {"hot": s.engine.encoder_cache.promotions,
                      "cold": s.engine.encoder_cache.demotions}, label="to"),
    Metric("triptych_encoder_cache_expirations_total", COUNTER,
           "Embeddings unused for their time to live.",
           lambda s: s.engine.encoder_cache.expirations),
    Metric("triptych_session_pins", GAUGE, "Embeddings with a session pin.",
           lambda s: _session_pins(s, "entries"), label="tier"),
    Metric("triptych_session_pin_bytes", GAUGE, "Bytes of embeddings with a session pin.",
           lambda s: _session_pins(s, "bytes"), label="tier"),
    Metric("triptych_session_pins_dropped_total", COUNTER, "Session pins that ended, by reason.",
           lambda s: _session_pins(s, "dropped"), label="reason"),
    Metric("triptych_encoder_cache_disk_failures_total", COUNTER,
           "Embeddings that the disk tier did not store or return.",
           lambda s: _disk_failures(s.engine.encoder_cache.disk), label="kind"),
    Metric("triptych_invariant_violations_total", COUNTER,
           "Accounting mismatches; nonzero is a bug.", lambda s: s.engine.invariant_violations),
)  # fmt: skip


VERSION = 1


def stats_document(state: WorkerState, snapshot: Snapshot | None) -> dict[str, Any]:
    """The document of `/stats`. Without a snapshot, its values are zero or null."""
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
            **{metric.stats: engine.count(metric.stats) for metric in COUNTERS if metric.stats},
        },
        "rates": {
            "window_seconds": state.rates.window_seconds,
            **state.rates.per_second(time.monotonic(), growth_of(engine)),
        },
        "model": dataclasses.asdict(state.model) if state.model else None,
        "device": state.device,
        "busy": {kind.value: dataclasses.asdict(busy) for kind, busy in engine.busy.items()},
        "ttft": None,
        "gaps": None,
        "held_for": None,
        "wake": None,
        "config_hash": None,
    }
