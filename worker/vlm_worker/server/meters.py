"""`/metrics` of a worker: the engine's own counts, read when asked, and what transfers took."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vlm_worker import metrics
from vlm_worker.roles.host import Transfer
from vlm_worker.server.state import Outcome, Snapshot, WorkerState

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Meters:
    """The registry of one process."""

    def __init__(self, state: WorkerState, snapshot: Callable[[], Snapshot | None]) -> None:
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

    def observe(self, transfer: Transfer) -> None:
        """Note a transfer that this worker pulled."""
        self._seconds[transfer.kind].observe(transfer.seconds)
        self._bytes[transfer.kind].inc(transfer.num_bytes)

    def exposition(self) -> bytes:
        """Prometheus' text."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(name, text, buckets=metrics.SECONDS_BUCKETS, registry=self._registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self._registry)


class _FromSnapshot(Collector):
    """Everything that is counted elsewhere already."""

    def __init__(self, state: WorkerState, snapshot: Callable[[], Snapshot | None]) -> None:
        self._state = state
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        """One family after the other."""
        state = self._state
        yield _gauge(metrics.ACCEPTING, "1 while new work is taken.", float(state.accepting))
        outcomes = CounterMetricFamily(
            metrics.REQUESTS_TOTAL, "Calls by how they ended.", labels=["outcome"]
        )
        for outcome in Outcome:
            outcomes.add_metric([outcome.value], state.outcomes[outcome])
        yield outcomes
        snapshot = self._snapshot()
        if snapshot is None:
            return
        yield from _engine_families(snapshot)


def _engine_families(snapshot: Snapshot) -> Iterable[Metric]:
    engine, leases, cache = snapshot.engine, snapshot.leases, snapshot.engine.encoder_cache
    yield _gauge(metrics.INFLIGHT, "Requests in any state.", engine.inflight)
    yield _gauge(metrics.WORK_QUEUED_SECONDS, "Service time queued.", engine.work_queued_seconds)
    if engine.kv is not None:
        kv = engine.kv
        yield _gauge(metrics.KV_CAPACITY_TOKENS, "KV tokens there are.", kv.capacity_tokens)
        states = {
            "running": kv.running_tokens,
            "reserved": kv.reserved_tokens,
            "cached": kv.cached_tokens,
            "free": kv.free_tokens,
            "queued": kv.queued_tokens,
        }
        yield _states(metrics.KV_TOKENS, "KV tokens by state.", states)
    held = {
        "held": leases.held,
        "reserved": leases.reserved,
        "quarantined": leases.quarantined,
    }
    yield _states(metrics.LEASES, "Leases by state.", held)
    yield _gauge(metrics.ENCODER_CACHE_BYTES, "Bytes of cached embeddings.", cache.bytes)
    for name, text, value in (
        (metrics.WORK_ADMITTED_SECONDS_TOTAL, "Work taken.", engine.work_admitted_seconds_total),
        (metrics.IMAGES_TOTAL, "Pictures encoded.", engine.images),
        (metrics.VISUAL_TOKENS_TOTAL, "Visual tokens encoded.", engine.visual_tokens),
        (metrics.PREEMPTIONS_TOTAL, "Sequences preempted.", engine.preemptions),
        (metrics.PREFIX_CACHE_QUERIES, "Prompt tokens looked up.", engine.prefix_cache_queries),
        (metrics.PREFIX_CACHE_HITS, "Prompt tokens found.", engine.prefix_cache_hits),
        (metrics.ENCODER_CACHE_HITS, "Pictures found encoded.", cache.hits),
        (metrics.ENCODER_CACHE_MISSES, "Pictures not found encoded.", cache.misses),
        (metrics.ENCODER_CACHE_EVICTIONS, "Embeddings evicted.", cache.evictions),
        (metrics.INVARIANT_VIOLATIONS_TOTAL, "Broken promises.", engine.invariant_violations),
    ):
        yield CounterMetricFamily(name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _states(name: str, text: str, values: dict[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["state"])
    for state, value in values.items():
        family.add_metric([state], value)
    return family
