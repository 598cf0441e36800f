"""`vlm top`: two reads of /stats become rates; pods without an answer keep their row."""

from __future__ import annotations

import datetime
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_cli.output import CliError, console
from vlm_cli.top.command import table, top
from vlm_cli.top.rows import PodReading, Row, Snapshot, quantile, read_stats, rows
from vlm_operator.observe import pod_states

BOOT = "0" * 32
SERVICE: dict[str, Any] = {
    "metadata": {"name": "demo", "namespace": "vision"},
    "spec": {
        "slo": {
            "ttftP95Milliseconds": 1000,
            "overrides": [{"modality": "Image", "ttftP95Milliseconds": 2000}],
        }
    },
}


def stats(role: str, *, tokens: int = 0, images: int = 0, **more: Any) -> dict[str, Any]:
    """A `/stats` of docs/stats.schema.json."""
    return {
        "version": 1, "role": role, "stages": [], "service": "demo", "revision": "", "compat": "",
        "variant": "", "pod_name": role, "pod_uid": role, "boot_id": BOOT, "uptime_seconds": 1.0,
        "phase": "ready", "message": "", "accepting": True, "inflight": 0,
        "queue": {"requests": 0, "work_seconds": 0.0, "started_work_seconds_total": 0.0},
        "kv": None, "encoder_cache": None, "leases": None,
        "counters": {"requests": 0, "images": images, "visual_tokens": 0, "output_tokens": tokens,
                     "preemptions": 0},
        "rates": {}, "model": None, "ttft": None, "config_hash": None, **more,
    }  # fmt: skip


def kv(used: int, capacity: int = 1000) -> dict[str, int]:
    return {
        "capacity_tokens": capacity, "running_tokens": used, "reserved_tokens": 0,
        "cached_tokens": 0, "free_tokens": capacity - used, "queued_tokens": 0,
    }  # fmt: skip


def cache(hits: int, misses: int) -> dict[str, Any]:
    tier = dict.fromkeys(("entries", "bytes", "capacity_bytes", "hits", "evictions"), 0)
    names = ("entries", "bytes", "joins", "evictions", "expirations", "demotions", "promotions")
    return {
        **dict.fromkeys(names, 0), "hits": hits, "misses": misses, "hot": tier, "cold": tier,
    }  # fmt: skip


def ttft(fast: int, slow: int) -> dict[str, Any]:
    """TTFT of `fast` requests within 0.5 s and of `slow` more within 4 s."""
    return {
        "count": fast + slow, "missed": 0, "sum_seconds": 0.0, "stages": {},
        "buckets": {"0.5": fast, "4": fast + slow, "+Inf": fast + slow},
    }  # fmt: skip


def manifest(role: str, number: int = 0, *, ready: bool = True, **status: Any) -> dict[str, Any]:
    name = f"demo-{role}-{number}"
    created = datetime.datetime(2026, 11, 21, 10, tzinfo=datetime.UTC).isoformat()
    labels = {
        "app.kubernetes.io/name": "triptych",
        "triptych.dev/service": "demo",
        "triptych.dev/role": role,
        "triptych.dev/variant": "default",
    }
    metadata = {"name": name, "namespace": "vision", "uid": name, "labels": labels}
    return {
        "metadata": {**metadata, "creationTimestamp": created},
        "spec": {"nodeName": "n1"},
        "status": {
            "phase": "Running",
            "conditions": [
                {"type": "Ready", "status": str(ready), "lastTransitionTime": created},
            ],
            **status,
        },
    }


def reading(role: str, value: dict[str, Any] | None, *, at: float, number: int = 0) -> PodReading:
    (pod,) = pod_states([manifest(role, number)])
    found = None if value is None else read_stats(value, at=at)
    return PodReading("vision", "demo", pod, found, "" if found else "no answer")


def between(*pods: tuple[str, dict[str, Any] | None, dict[str, Any] | None]) -> dict[str, Row]:
    """The rows by pod ("" for the service) of pods of one role each, read with 2 s between."""
    before = Snapshot([SERVICE], [reading(role, old, at=10) for role, old, _ in pods])
    after = Snapshot([SERVICE], [reading(role, new, at=12) for role, _, new in pods])
    return {row.role: row for row in rows(before, after)}


def test_rates_are_the_growth_of_counters_per_second():
    found = between(
        ("decode", stats("decode", tokens=100), stats("decode", tokens=150)),
        ("encoder", stats("encoder", images=7), stats("encoder", images=10)),
        ("gateway", stats("gateway", tokens=90), stats("gateway", tokens=130)),
    )
    assert found["decode"].tokens_per_second == 25
    assert found["encoder"].images_per_second == 1.5
    assert found[""].tokens_per_second == 20  # what clients got, not what workers sampled


def test_a_restarted_process_has_no_rate_but_its_state():
    again = stats("decode", tokens=3, kv=kv(200), boot_id="1" * 32)
    found = between(("decode", stats("decode", tokens=100), again))["decode"]
    assert found.tokens_per_second is None
    assert (found.kv_used, found.kv_capacity) == (200, 1000)


def test_a_pod_that_does_not_answer_keeps_its_row_with_the_reason():
    found = between(
        ("decode", stats("decode"), None), ("gateway", stats("gateway"), stats("gateway"))
    )
    assert found["decode"].problem == "no answer"
    assert found["decode"].inflight is None
    assert found[""].ready == "2/2"


def test_a_service_adds_its_pods():
    queue = {"requests": 3, "work_seconds": 1.5, "started_work_seconds_total": 0.0}
    found = between(
        ("prefill", stats("prefill"), stats("prefill", queue=queue, kv=kv(100))),
        (
            "decode",
            stats("decode"),
            stats("decode", queue={**queue, "work_seconds": 0.5}, kv=kv(300)),
        ),
        ("gateway", stats("gateway"), stats("gateway", inflight=9)),
    )[""]
    assert (found.inflight, found.queued, found.queued_seconds) == (9, 6, 1.5)
    assert (found.kv_used, found.kv_capacity) == (400, 2000)


def test_a_service_at_zero_is_asleep():
    ready = {"type": "Ready", "status": "True", "reason": "ScaledToZero", "message": ""}
    service = {**SERVICE, "status": {"conditions": [ready]}}
    snapshots = [
        Snapshot([service], [reading("gateway", stats("gateway"), at=at)]) for at in (1, 3)
    ]
    assert [row.ready for row in rows(*snapshots) if not row.role] == ["1/1 asleep"]


def test_the_hit_rate_is_of_the_interval():
    old, new = cache(hits=100, misses=0), cache(hits=103, misses=1)
    values = stats("encoder", encoder_cache=old), stats("encoder", encoder_cache=new)
    assert between(("encoder", *values))["encoder"].cache_hit == 0.75
    assert between(("encoder", values[0], values[0]))["encoder"].cache_hit is None


def test_ttft_is_that_of_the_modality_nearest_to_its_goal():
    old = {"text": ttft(10, 0), "image": ttft(10, 0)}
    new = {"text": ttft(30, 0), "image": ttft(10, 20)}
    values = stats("gateway", ttft=old), stats("gateway", ttft=new)
    level = between(("gateway", *values))[""].ttft
    assert level is not None
    assert (level.modality, level.goal) == ("image", 2.0)
    assert level.seconds == pytest.approx(0.5 + 3.5 * 0.95)
    assert level.ratio > 1


def test_without_requests_only_the_goal_is_known():
    level = between(("gateway", stats("gateway"), stats("gateway")))[""].ttft
    assert level is not None
    assert (level.seconds, level.goal) == (None, 1.0)


@given(st.lists(st.integers(0, 50), min_size=3, max_size=3), st.floats(0.01, 1))
def test_a_quantile_is_in_the_bucket_that_has_it(counts: list[int], share: float):
    bounds = (1.0, 2.0, 4.0)
    total = list(itertools.accumulate(counts))
    found = quantile(dict(zip(bounds, total, strict=True)), share)
    if not total[-1]:
        assert found is None
        return
    index = next(i for i, count in enumerate(total) if count >= share * total[-1])
    assert found is not None
    assert (0.0, *bounds)[index] <= found <= bounds[index]


def test_beyond_the_largest_bucket_a_quantile_is_its_bound():
    assert quantile({1.0: 1, float("inf"): 100}, 0.95) == 1.0


PODS = "/api/v1/namespaces/vision/pods"


async def test_the_command_reads_every_pod_twice(api, kubeconfig, add_service, serve, capsys):
    add_service()["spec"]["slo"] = {"ttftP95Milliseconds": 1000}
    for role, values in (
        ("gateway", (stats("gateway"), stats("gateway", ttft={"text": ttft(0, 5)}))),
        ("decode", (stats("decode"), stats("decode", tokens=50, kv=kv(250), inflight=3))),
    ):
        api.add(PODS, manifest(role))
        api.target_ports[f"demo-{role}-0"] = await serve(*values)
    api.add(PODS, manifest("prefill"))
    api.target_ports["demo-prefill-0"] = 1  # refuses connections
    waiting = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    blocked = manifest("encoder", ready=False, phase="Pending", containerStatuses=[waiting])
    api.add(PODS, blocked)
    await top("demo", interval=0.1, once=True, kubeconfig=kubeconfig)
    lines = capsys.readouterr().out.splitlines()
    named = {line.split()[0]: line for line in lines}
    assert lines[0].split()[-1] == "PROBLEM"
    assert "3825/1000 ms" in named["demo"]
    assert " 3/4 " in named["demo"]
    assert "250/1000 25%" in named["demo-decode-0"]
    assert "/stats has no answer" in named["demo-prefill-0"]
    assert "ImagePullBackOff" in named["demo-encoder-0"]


async def test_an_invalid_answer_is_the_reason_of_its_row(
    api, kubeconfig, add_service, serve, capsys
):
    add_service()
    api.add(PODS, manifest("decode"))
    api.target_ports["demo-decode-0"] = await serve({"version": 2})
    await top("demo", interval=0.1, once=True, kubeconfig=kubeconfig)
    assert "/stats is not valid" in capsys.readouterr().out


async def test_without_a_service_there_is_nothing_to_show(kubeconfig):
    with pytest.raises(CliError) as refused:
        await top(interval=0.1, once=True, kubeconfig=kubeconfig)
    assert "there is no VLMService in namespace 'vision'" in refused.value.problem


def test_the_column_of_problems_is_absent_without_problems(capsys):
    row = Row("vision", "demo", ready="1/1", tokens_per_second=12.34)
    console().print(table([row], everywhere=True))
    text = capsys.readouterr().out
    assert "PROBLEM" not in text
    assert text.startswith("NAMESPACE")
    assert "12.3" in text
