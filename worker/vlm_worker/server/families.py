"""One snapshot of a worker -> the families of its `/metrics` that are counted elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from vlm_worker import metrics
from vlm_worker.core.memory import MemoryKind
from vlm_worker.engine.settings import EncoderCacheStats, EngineStats, KVStats
from vlm_worker.errors import Refusal
from vlm_worker.server.state import LeaseCounts, Outcome, Snapshot, TransferCounts

Word = TypeVar("Word", bound=str)


def process_families(
    *, accepting: bool, heartbeat: float | None, outcomes: Mapping[Outcome, int]
) -> Iterable[Metric]:
    """What is known before the model is loaded; `heartbeat` is in seconds since 1970."""
    yield gauge(metrics.ACCEPTING, "1 while new work is taken.", float(accepting))
    if heartbeat is not None:
        yield gauge(
            metrics.HEARTBEAT_TIMESTAMP_SECONDS, "When the engine was last seen well.", heartbeat
        )
    ended = {outcome.value: outcomes[outcome] for outcome in Outcome}
    yield labelled_counter(metrics.REQUESTS_TOTAL, "Calls by how they ended.", "outcome", ended)


def snapshot_families(snapshot: Snapshot, *, max_requests: int) -> Iterable[Metric]:
    """What the engine and the leases say; `max_requests` may compute at the same time."""
    engine = snapshot.engine
    yield gauge(metrics.INFLIGHT, "Requests in any state.", engine.inflight)
    yield gauge(
        metrics.BATCH_OCCUPANCY,
        "Running sequences of those that may run.",
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
    yield gauge(metrics.QUEUE_IMAGES, "Waiting pictures.", engine.num_waiting_images)
    yield gauge(
        metrics.QUEUE_OLDEST_SECONDS, "Age of the oldest that waits.", queue.oldest_wait_seconds
    )
    yield labelled_counter(
        metrics.ADMITTED_TOTAL,
        "Sequences let in, by why it was their turn.",
        "reason",
        queue.admitted,
    )
    yield labelled_counter(
        metrics.REFUSED_TOTAL, "Requests refused, by what was full.", "bound", queue.refused
    )
    yield gauge(metrics.RUNNING_LIMIT, "Sequences that may run at once.", queue.running_limit)
    yield gauge(metrics.WORK_QUEUED_SECONDS, "Service time queued.", engine.work_queued_seconds)
    yield counter(
        metrics.WORK_ADMITTED_SECONDS_TOTAL, "Work taken.", engine.work_admitted_seconds_total
    )


def _kv(kv: KVStats) -> Iterable[Metric]:
    yield gauge(metrics.KV_CAPACITY_TOKENS, "KV tokens there are.", kv.capacity_tokens)
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
        metrics.KV_REQUEST_BYTES, "KV of an answer when it ended here.", labels=["modality"]
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
    yield counter(
        metrics.LEASES_EXPIRED_TOTAL, "Leases that ended by their deadline.", leases.expired
    )


def _transfers(transfers: TransferCounts) -> Iterable[Metric]:
    refused = {refusal.value: transfers.refused.get(refusal, 0) for refusal in Refusal}
    yield labelled_counter(
        metrics.TRANSFERS_REFUSED_TOTAL, "Pulled transfers that were void.", "reason", refused
    )
    exposed = {"used": transfers.exposed_bytes, "lost": transfers.lost_bytes}
    yield labelled_gauge(metrics.EXPOSED_BYTES, "Memory that peers read.", "state", exposed)


def _memory(snapshot: Snapshot) -> Iterable[Metric]:
    memory = snapshot.memory
    for name, text, values in (
        (metrics.REQUEST_MEMORY_BYTES, "Bytes that requests hold.", memory.used),
        (metrics.REQUEST_MEMORY_LIMIT_BYTES, "Bytes that they may hold.", memory.limits),
    ):
        by_kind = {kind: values.get(kind, 0) for kind in MemoryKind}
        yield labelled_gauge(name, text, "kind", by_kind)
    variant = {snapshot.native_kernels: 1.0}
    text = "The variant of the kernels in C++; none: torch computes, slower."
    yield labelled_gauge(metrics.NATIVE_KERNELS_INFO, text, "variant", variant)


def _encoder_cache(cache: EncoderCacheStats) -> Iterable[Metric]:
    tiers = {"hot": cache.hot, "cold": cache.cold}
    size = {name: tier.bytes for name, tier in tiers.items()}
    hits = {name: tier.hits for name, tier in tiers.items()}
    evictions = {name: tier.evictions for name, tier in tiers.items()}
    moves = {"hot": cache.promotions, "cold": cache.demotions}
    yield labelled_gauge(metrics.ENCODER_CACHE_BYTES, "Bytes of cached embeddings.", "tier", size)
    yield labelled_counter(metrics.ENCODER_CACHE_HITS, "Pictures found encoded.", "tier", hits)
    yield counter(metrics.ENCODER_CACHE_JOINS, "Pictures found being encoded.", cache.joins)
    yield counter(metrics.ENCODER_CACHE_MISSES, "Pictures not found encoded.", cache.misses)
    yield labelled_counter(
        metrics.ENCODER_CACHE_EVICTIONS, "Embeddings that left a tier.", "tier", evictions
    )
    yield labelled_counter(
        metrics.ENCODER_CACHE_MOVES, "Embeddings moved between the tiers.", "to", moves
    )
    yield counter(
        metrics.ENCODER_CACHE_EXPIRATIONS, "Embeddings unused for too long.", cache.expirations
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
        (metrics.IMAGES_TOTAL, "Pictures encoded.", engine.images),
        (metrics.PATCHES_TOTAL, "Patches encoded.", engine.patches),
        (metrics.VISUAL_TOKENS_TOTAL, "Visual tokens encoded.", engine.visual_tokens),
        (metrics.OUTPUT_TOKENS_TOTAL, "Tokens sampled.", engine.output_tokens),
        (metrics.PREEMPTIONS_TOTAL, "Sequences preempted.", engine.preemptions),
        (metrics.OUT_OF_MEMORY_TOTAL, "Calls that ran out of memory.", engine.out_of_memory),
        (metrics.PREFIX_CACHE_EVICTIONS, "Blocks evicted.", engine.prefix_cache_evictions),
        (metrics.INVARIANT_VIOLATIONS_TOTAL, "Broken promises.", engine.invariant_violations),
    ):
        yield counter(name, text, value)


def gauge(name: str, text: str, value: float) -> Metric:
    """One value that goes up and down."""
    return GaugeMetricFamily(name, text, value=value)


def counter(name: str, text: str, value: float) -> Metric:
    """One value that grows."""
    return CounterMetricFamily(name, text, value=value)


def labelled_gauge(name: str, text: str, label: str, values: Mapping[Word, float]) -> Metric:
    """One value for each word of a closed set."""
    family = GaugeMetricFamily(name, text, labels=[label])
    for word, value in values.items():
        family.add_metric([word], value)
    return family


def labelled_counter(name: str, text: str, label: str, values: Mapping[Word, float]) -> Metric:
    """One growing value for each word of a closed set."""
    family = CounterMetricFamily(name, text, labels=[label])
    for word, value in values.items():
        family.add_metric([word], value)
    return family
