"""docs/metrics.md lists exactly the exposed metrics, with type and labels."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families
from worker.authority import Authority

from vlm_operator import metrics as operator_metrics
from vlm_worker import metrics as worker_metrics
from vlm_worker.attends import Attends
from vlm_worker.core.measurements import Histogram
from vlm_worker.core.probe import Verification
from vlm_worker.engine.settings import (
    DiskStats,
    EncoderCacheStats,
    EngineStats,
    KVStats,
    SessionPinStats,
)
from vlm_worker.engine.state import COUNTERS
from vlm_worker.gateway.metrics import GatewayMetrics
from vlm_worker.gateway.rate_limits import Account
from vlm_worker.gateway.session_prefetch import OUTCOMES
from vlm_worker.media.pool import REFUSALS, MediaTimes
from vlm_worker.roles.context import TransferStats
from vlm_worker.server.metrics import WorkerMetrics
from vlm_worker.server.state import LeaseCounts, Snapshot, WorkerState
from vlm_worker.settings import parse
from vlm_worker.types import STAGES, Modality, Role
from vlm_worker.wire.identity_store import IdentityStore

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
ROW = re.compile(r"^\| `((?:vlm|triptych)_\w+)` \| (\w+) \| (.*?) \|", re.MULTILINE)
OPERATOR, WORKER = (ROW.findall(part) for part in PAGE.split("## Gateway and workers"))


def test_the_operators_metrics_are_listed_with_type_and_labels() -> None:
    found = []
    for family in operator_metrics.REGISTRY.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        collector = operator_metrics.REGISTRY._names_to_collectors[family.name]
        labels = ", ".join(f"`{label}`" for label in collector._labelnames) or "none"
        found.append((name, family.type, labels))
    assert sorted(OPERATOR) == sorted(found)


def worker_exposition() -> str:
    """The metrics of a worker with every counter used."""
    settings = parse(["decode", "--model=/m", "--served-name=m"], {})
    state = WorkerState(settings)  # type: ignore[arg-type]  # the role is a worker's
    sizes = Histogram([1e6]).buckets
    counters = {
        metric.stats or metric.name: {"text": 1} if metric.label else 1 for metric in COUNTERS
    }
    state.verification = Verification(Attends.CAUSAL, 1e-6)
    engine = EngineStats(
        encoder_cache=EncoderCacheStats(disk=DiskStats(capacity_bytes=1)),
        session_pins=SessionPinStats({"memory": 1}, {"memory": 1}, {"expired": 1}),
        kv=KVStats(640),
        kv_request_bytes=((Modality.IMAGE, sizes),),
        counters=counters,
    )
    state.record_heartbeat(engine)
    meters = WorkerMetrics(state, lambda: Snapshot(engine, LeaseCounts(), num_calls=0))
    meters.observe(TransferStats("kv", 0.1, 10))
    meters.observe(TransferStats("embed", 0.1, 10))
    meters.image_prepared(MediaTimes(0.0, 0.1, 0.1, 0.1))
    meters.image_refused(REFUSALS[0])
    return meters.exposition().decode()


def gateway_exposition(identity: IdentityStore | None = None) -> str:
    """The metrics of a gateway that has answered a request."""
    meters = GatewayMetrics()
    meters.identity = identity
    meters.prefetches.update(dict.fromkeys(OUTCOMES, 0))
    meters.first_token(1.0, dict.fromkeys(STAGES, 0.1), Modality.IMAGE, 0.5)
    meters.next_token(0.1)
    meters.record_images(["native"], 64)
    meters.request("ok")
    meters.accounts = {"team-a": Account()}
    return meters.exposition(num_inflight=0, accepting=True).decode()


def families(text: str) -> Iterable[tuple[str, str, str]]:
    """Name, type and labels; a counter has the name of its samples on the wire."""
    for family in text_string_to_metric_families(text):
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        name = family.name
        if family.type == "counter":
            (name,) = {one.name for one in family.samples if not one.name.endswith("_created")}
        yield name, family.type, ", ".join(f"`{label}`" for label in sorted(labels)) or "none"


SHARED_NAMES = {
    value for key, value in vars(worker_metrics).items() if key.isupper() and isinstance(value, str)
}


def test_the_workers_metrics_are_listed_with_type_and_labels(
    tmp_path: pathlib.Path,
) -> None:
    directory = Authority(tmp_path / "ca").pair("gateway")
    identity = IdentityStore(directory, Role.GATEWAY)
    found = {*families(worker_exposition()), *families(gateway_exposition(identity))}
    listed = {(name, kind, ", ".join(sorted(labels.split(", ")))) for name, kind, labels in WORKER}
    assert len(listed) == len(WORKER)
    assert listed == found
    assert {name for name, _, _ in found} >= SHARED_NAMES


def test_a_worker_without_a_disk_tier_has_no_series_of_one() -> None:
    engine = EngineStats()
    state = WorkerState(parse(["decode", "--model=/m", "--served-name=m"], {}))  # type: ignore[arg-type]
    meters = WorkerMetrics(state, lambda: Snapshot(engine, LeaseCounts(), num_calls=0))
    assert "disk" not in meters.exposition().decode()
    assert 'hits_total{tier="disk"}' in worker_exposition()
