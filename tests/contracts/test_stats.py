"""/stats conforms to docs/stats.schema.json in every phase and for every role."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from vlm_operator.scrape import parse_stats
from vlm_worker.core.measurements import BusyTime, WorkKind
from vlm_worker.engine.settings import EncoderCacheStats, EngineStats, KVStats
from vlm_worker.gateway.metrics import GatewayMetrics
from vlm_worker.server.metrics import stats_document
from vlm_worker.server.state import LeaseCounts, ModelFacts, Phase, Snapshot, WorkerState
from vlm_worker.settings import parse
from vlm_worker.types import Modality

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/stats.schema.json").read_text())
ENVIRONMENT = {
    "POD_NAME": "demo-decode-1",
    "POD_UID": "5f1b",
    "TRIPTYCH_SERVICE": "demo",
    "TRIPTYCH_REVISION": "1a2b3c4d",
    "TRIPTYCH_VARIANT": "default",
}


def state_of(role: str, environment: dict[str, str]) -> WorkerState:
    settings = parse([role, "--model=/models/model", "--served-name=m"], environment)
    return WorkerState(settings)  # type: ignore[arg-type]  # the role is a worker's


def snapshot(*, kv: bool) -> Snapshot:
    engine = EngineStats(inflight=3, work_queued_seconds=0.25, kv=KVStats(640) if kv else None)
    return Snapshot(engine, LeaseCounts(1, 2, 3), num_calls=4)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("role", ["encoder", "prefill", "decode"])
@pytest.mark.parametrize("loaded", [False, True])
def test_every_document_conforms_to_the_schema(role: str, phase: Phase, loaded: bool) -> None:
    state = state_of(role, ENVIRONMENT)
    state.enter(phase, "loading weights 62 %")
    state.model = ModelFacts(512, 256, 1276, 1 << 20, "int8") if loaded else None
    document = stats_document(state, snapshot(kv=role != "encoder") if loaded else None)
    jsonschema.validate(json.loads(json.dumps(document)), SCHEMA)


def test_the_operator_reads_the_device_of_a_worker() -> None:
    state = state_of("decode", ENVIRONMENT)
    for device, read in ((None, ""), ("cpu", "cpu"), ("cuda:0", "cuda:0")):
        state.device = device
        document = json.loads(json.dumps(stats_document(state, None)))
        jsonschema.validate(document, SCHEMA)
        assert parse_stats(document).device == read
        del document["device"]
        assert parse_stats(document).device == "", "an older image does not report it"


def test_the_operator_reads_the_busy_time_of_a_worker() -> None:
    busy = {
        WorkKind.PREFILL: BusyTime(1.5, 3, 2, 300, 4.5e6),
        WorkKind.ENCODE: BusyTime(0.25, 1, 2, 64, 2048.0),
    }
    told = Snapshot(EngineStats(busy=busy), LeaseCounts(), num_calls=0)
    document = stats_document(state_of("prefill", ENVIRONMENT), told)
    jsonschema.validate(document, SCHEMA)
    read = parse_stats(json.loads(json.dumps(document))).busy
    assert {name: dataclasses.astuple(item) for name, item in read.items()} == {
        kind.value: dataclasses.astuple(item) for kind, item in busy.items()
    }


def test_the_operator_reads_the_gaps_and_stages_of_a_gateway() -> None:
    meters = GatewayMetrics()
    meters.first_token(0.3, {"encode": 0.2, "other": 0.1}, Modality.IMAGE, 0.25)
    for seconds in (0.02, 0.02, 0.3):
        meters.next_token(seconds)
    document = stats_document(state_of("decode", ENVIRONMENT), None)
    document |= {
        "role": "gateway",
        "ttft": {modality: ttft.body for modality, ttft in meters.ttft.items()},
        "gaps": meters.gaps,
        "held_for": {"encoder": 2},
        "wake": {"idle_seconds": 12.5, "waiting_requests": 3},
    }
    jsonschema.validate(document, SCHEMA)
    sample = parse_stats(json.loads(json.dumps(document)))
    assert sample.held_for == {"encoder": 2}
    assert (sample.idle_seconds, sample.waiting_for_wake) == (12.5, 3)
    assert sample.gaps is not None
    assert (sample.gaps.count, sample.gaps.buckets[0.02], sample.gaps.buckets[0.25]) == (3, 2, 2)
    encode = sample.ttft["image"].stages["encode"]
    assert (encode.missed, encode.buckets[0.1], encode.buckets[0.25]) == (0.2, 0, 1)


def test_a_process_outside_a_cluster_has_a_document_too() -> None:
    jsonschema.validate(stats_document(state_of("decode", {}), None), SCHEMA)


def test_the_document_has_the_identity_that_the_operator_set() -> None:
    document = stats_document(state_of("decode", ENVIRONMENT), None)
    named = {k: document[k] for k in ("pod_name", "pod_uid", "service", "revision", "variant")}
    assert named == {
        "pod_name": "demo-decode-1",
        "pod_uid": "5f1b",
        "service": "demo",
        "revision": "1a2b3c4d",
        "variant": "default",
    }


def _required(part: str) -> set[str]:
    return set(SCHEMA["properties"][part]["required"])


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("kv", KVStats),
        ("encoder_cache", EncoderCacheStats),
        ("leases", LeaseCounts),
        ("model", ModelFacts),
    ],
)
def test_each_part_has_the_fields_that_the_schema_requires(part: str, source: Any) -> None:
    assert {field.name for field in dataclasses.fields(source)} == _required(part)


def test_a_document_without_a_required_part_is_invalid() -> None:
    document = stats_document(state_of("decode", ENVIRONMENT), None)
    del document["queue"]
    with pytest.raises(jsonschema.ValidationError, match="queue"):
        jsonschema.validate(document, SCHEMA)
