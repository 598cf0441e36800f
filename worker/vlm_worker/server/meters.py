"""`/metrics` of a worker: the engine's own counts, read when asked, and what took how long."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vlm_worker import metrics
from vlm_worker.media.spec import REFUSALS, MediaTimes
from vlm_worker.roles.host import Transfer
from vlm_worker.server.families import process_families, snapshot_families
from vlm_worker.server.state import Snapshot, WorkerState

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Meters:
    """The registry of one process. Label values come from closed sets alone."""

    def __init__(self, state: WorkerState, snapshot: Callable[[], Snapshot | None]) -> None:
        # a second series for each counter, which nobody reads
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
            metrics.MEDIA_SECONDS, "From a picture's bytes to its patches.", "part"
        )
        self._media_failures = self._counter(
            metrics.MEDIA_FAILURES_TOTAL, "Pictures that could not be used.", "reason"
        )
        for code in REFUSALS:
            self._media_failures.labels(code)

    def observe(self, transfer: Transfer) -> None:
        """Note a transfer that this worker pulled."""
        self._seconds[transfer.kind].observe(transfer.seconds)
        self._bytes[transfer.kind].inc(transfer.num_bytes)

    def picture_prepared(self, times: MediaTimes) -> None:
        """See `media.spec.MediaObserver`."""
        for part in ("queue", "decode", "prepare", "key"):
            self._media_seconds.labels(part).observe(getattr(times, part))

    def picture_refused(self, code: str) -> None:
        """See `media.spec.MediaObserver`."""
        self._media_failures.labels(code).inc()

    def exposition(self) -> bytes:
        """Prometheus' text."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        buckets = metrics.SECONDS_BUCKETS
        return Histogram(name, text, labels, buckets=buckets, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self._registry)


class _FromSnapshot(Collector):
    """Everything that is counted elsewhere already."""

    def __init__(self, state: WorkerState, snapshot: Callable[[], Snapshot | None]) -> None:
        self._state = state
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        """One family after the other."""
        state = self._state
        yield from process_families(
            accepting=state.accepting, heartbeat=state.heartbeat, outcomes=state.outcomes
        )
        snapshot = self._snapshot()
        if snapshot is not None:
            yield from snapshot_families(snapshot, max_requests=state.settings.max_requests)
