"""`vlm advise` finds what a synthetic service does: its step line, idle encoders, best lever."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_cli.advise.command import advise, read_service
from vlm_cli.advise.levers import Service, levers, report
from vlm_cli.advise.profile import Profile, Snapshot, StepPoint, fit, profile
from vlm_cli.output import CliError, Format
from vlm_cli.sections import NoteSection
from vlm_operator.names import Role
from vlm_operator.scrape import parse_stats

BOOT = "0" * 32


def work(seconds: float, calls: int, items: int, units: int) -> dict[str, Any]:
    return {
        "seconds": seconds, "calls": calls, "items": items, "units": units, "squares": 0.0,
    }  # fmt: skip


def stats(role: str, *, boot_id: str = BOOT, **more: Any) -> dict[str, Any]:
    """A `/stats` of docs/stats.schema.json."""
    return {
        "version": 1, "role": role, "stages": [], "service": "demo", "revision": "", "compat": "",
        "variant": "", "pod_name": role, "pod_uid": role, "boot_id": boot_id,
        "uptime_seconds": 1.0, "phase": "ready", "message": "", "accepting": True, "inflight": 0,
        "queue": {"requests": 0, "work_seconds": 0.0, "started_work_seconds_total": 0.0},
        "kv": None, "encoder_cache": None, "leases": None,
        "counters": {"requests": 0, "images": 0, "visual_tokens": 0, "output_tokens": 0,
                     "preemptions": 0},
        "rates": {}, "model": None, "ttft": None, "config_hash": None, **more,
    }  # fmt: skip


def snapshot(pod: str, at: float, value: dict[str, Any]) -> Snapshot:
    return Snapshot(pod, at, parse_stats(value), value["counters"])


class Decoder:
    """The counters of a decode pod whose steps take `base + slope · KV + square · KV²` seconds."""

    def __init__(self, *, base: float, slope: float, square: float = 0.0) -> None:
        self.line = base, slope, square
        self.sums = work(0.0, 0, 0, 0)

    def run(self, *, steps: int, sequences: int, kv: int) -> dict[str, Any]:
        base, slope, square = self.line
        self.sums = work(
            self.sums["seconds"] + steps * (base + slope * kv + square * kv**2),
            self.sums["calls"] + steps,
            self.sums["items"] + steps * sequences,
            self.sums["units"] + steps * kv,
        )
        kv_tokens = {
            "capacity_tokens": 20_000, "running_tokens": kv, "reserved_tokens": 0,
            "cached_tokens": 0, "free_tokens": 20_000 - kv, "queued_tokens": 0,
        }  # fmt: skip
        return stats("decode", busy={"decode": dict(self.sums)}, kv=kv_tokens)


def gateway(*, requests: int, visual: int, itl: float, stages: dict[str, float]) -> dict[str, Any]:
    counters = {
        "requests": requests, "images": requests, "visual_tokens": visual, "output_tokens": 0,
        "preemptions": 0,
    }  # fmt: skip
    met = {name: {"met": seconds, "missed": 0.0} for name, seconds in stages.items()}
    ttft = {
        "count": requests, "missed": 0, "sum_seconds": sum(stages.values()),
        "buckets": {"+Inf": requests}, "stages": met,
    }  # fmt: skip
    gaps = {
        "count": requests,
        "buckets": {"0.01": 0, str(itl): requests, "+Inf": requests},
    }
    return stats("gateway", counters=counters, ttft={"image": ttft}, gaps=gaps)


def measured(
    *, square: float = 0.0, encode: float = 0.0, rounds: int = 13, itl: float = 0.05
) -> list[Snapshot]:
    """Snapshots of an encoder, a decode pod and a gateway, under a load that varies."""
    decoder = Decoder(base=0.01, slope=2e-6, square=square)
    found = []
    for number in range(rounds):
        at = 5.0 * number
        sequences = 4 + number
        value = decoder.run(steps=100, sequences=sequences, kv=1000 * sequences)
        found.append(snapshot("d", at, value))
        busy = {"encode": work(encode * at, number, number, 0)}
        found.append(snapshot("e", at, stats("encoder", busy=busy)))
        found.append(
            snapshot(
                "g",
                at,
                gateway(
                    requests=10 * number,
                    visual=5000 * number,
                    itl=itl,
                    stages={"encode": 0.2 * number, "prefill_queue": 0.8 * number},
                ),
            )
        )
    return found


def service(**more: Any) -> Service:
    return dataclasses.replace(
        Service(
            name="demo",
            replicas={Role.ENCODER: 1, Role.DECODE: 1},
            price={Role.ENCODER: 1.0, Role.DECODE: 3.0},
            has_int8_kv=False,
            has_rounded_weights=False,
            ttft_goal=1.5,
            itl_goal=0.04,
        ),
        **more,
    )


def findings(found: Profile, of: Service) -> str:
    (notes,) = (section for section in report(found, of) if isinstance(section, NoteSection))
    return "\n".join(notes.rows)


def test_the_line_of_the_steps_is_found():
    found = profile(measured())
    assert found.fit is not None
    assert found.fit.base == pytest.approx(0.01)
    assert found.fit.slope == pytest.approx(2e-6)
    assert found.fit.growth == pytest.approx(1.0)
    assert found.visual_tokens == 500
    assert found.fit.explained == pytest.approx(1.0)
    assert "Steps do not grow faster than their KV tokens." in findings(found, service())


@given(
    base=st.floats(0.001, 0.1),
    slope=st.floats(1e-8, 1e-5),
    loads=st.lists(st.integers(100, 100_000), min_size=8, max_size=30, unique=True),
)
def test_any_line_is_found(base: float, slope: float, loads: list[int]):
    points = [StepPoint(kv, 4, base + slope * kv, 100 + kv % 7) for kv in loads]
    found = fit(points)
    assert found is not None
    assert found.slope == pytest.approx(slope, rel=1e-3, abs=1e-10)
    assert found.base == pytest.approx(base, rel=1e-2, abs=1e-4)


def test_super_linear_steps_are_called_so():
    found = profile(measured(square=1e-9))
    assert found.fit is not None
    assert found.fit.growth is not None
    assert found.fit.growth > 1.3
    assert "Steps grow super-linearly" in findings(found, service())


def test_a_line_that_explains_little_is_called_uncertain():
    decoder, other = Decoder(base=0.01, slope=1e-9), Decoder(base=0.03, slope=1e-9)
    noisy = [
        snapshot(pod, 5.0 * n, one.run(steps=100, sequences=n, kv=1000 * (4 + (7 * n) % 13)))
        for n in range(13)
        for pod, one in (("a", decoder), ("b", other))
    ]
    found = profile(noisy)
    assert found.fit is not None
    assert found.fit.explained < 0.5
    assert "are uncertain" in findings(found, service())


def test_few_steps_give_no_slope():
    found = profile(measured(rounds=5))
    assert found.fit is None
    assert "Too few steps of decode for a slope" in findings(found, service())
    assert all(lever.metric != "ITL" for lever in levers(found, service()))


def test_a_load_that_does_not_vary_says_nothing_about_growth():
    decoder = Decoder(base=0.01, slope=2e-6)
    steady = [
        snapshot("d", 5.0 * n, decoder.run(steps=100, sequences=8, kv=8000 + n)) for n in range(13)
    ]
    found = profile(steady)
    assert found.fit is not None
    assert found.fit.growth is None
    assert "did not vary enough" in findings(found, service())


def test_an_interval_with_a_restart_is_left_out():
    decoder = Decoder(base=0.01, slope=2e-6)
    first = [decoder.run(steps=100, sequences=n, kv=1000 * n) for n in range(4, 14)]
    again = Decoder(base=0.01, slope=2e-6)
    second = [
        {**again.run(steps=100, sequences=n, kv=1000 * n), "boot_id": "1" * 32}
        for n in range(4, 14)
    ]
    taken = [snapshot("d", float(n), value) for n, value in enumerate((*first, *second))]
    found = profile(taken)
    assert found.fit is not None
    assert found.fit.num_points == 18
    assert found.fit.slope == pytest.approx(2e-6)


def test_idle_encoders_are_a_lever_that_saves_their_price():
    idle, busy = profile(measured(encode=0.05)), profile(measured(encode=0.5))
    assert idle.roles[Role.ENCODER].busy == pytest.approx(0.05)
    assert "Encoders are idle: busy for 5% of the time." in findings(idle, service())
    (saving,) = (one for one in levers(idle, service()) if one.metric == "cost")
    assert saving.price == -1.0
    assert saving.gain == pytest.approx(1 / 4)
    assert all(one.metric != "cost" for one in levers(busy, service()))


def test_levers_for_a_missed_goal_come_first_by_gain():
    found = profile(measured())
    listed = levers(found, service())
    assert [one.is_goal_missed for one in listed] == sorted(
        (one.is_goal_missed for one in listed), reverse=True
    )
    missed = [one for one in listed if one.is_goal_missed]
    assert missed
    assert {one.metric for one in missed} == {"ITL"}
    assert [one.gain for one in missed] == sorted((one.gain for one in missed), reverse=True)
    met = levers(found, service(itl_goal=0.1))
    assert not any(one.is_goal_missed for one in met)


def test_a_lever_in_use_is_not_listed_again():
    found = profile(measured())
    names = {one.name for one in levers(found, service())}
    used = {one.name for one in levers(found, service(has_int8_kv=True, has_rounded_weights=True))}
    assert names - used == {"model.kvCacheDtype: Int8", "engine.extraArgs: [--weights=int8]"}


def test_the_page_lists_every_lever():
    page = (Path(__file__).parents[3] / "docs" / "advise.md").read_text()
    rows = [row.split("|")[1] for row in page.splitlines() if row.startswith("| ")]
    listed = [row.replace("`", "").strip() for row in rows]
    found = profile(measured())
    unsplit = service(replicas={Role.DECODE: 1})
    names = {one.name for of in (service(), unsplit) for one in levers(found, of)}
    assert len(names) >= 5
    assert "one more pod of a role" in listed
    assert not [name for name in names if name not in listed and not name.startswith("one more")]


def test_gains_are_those_of_the_line():
    found = profile(measured())
    assert found.fit is not None
    share = found.fit.slope * found.fit.kv_tokens / found.fit.seconds
    gains = {(one.name, one.metric): one.gain for one in levers(found, service())}
    assert gains["model.kvCacheDtype: Int8", "ITL"] == pytest.approx(0.48 * share)
    assert gains["one more decode pod", "ITL"] == pytest.approx(share / 2)
    assert gains["clients send detail: low", "ITL"] == pytest.approx(share * 0.5 * 0.75)
    assert gains["one more decode pod", "TTFT"] == pytest.approx(0.8 / 2)


def test_a_manifest_gives_replicas_prices_goals_and_levers_in_use():
    manifest = {
        "metadata": {"name": "demo"},
        "spec": {
            "model": {"kvCacheDtype": "Int8"},
            "slo": {"ttftP95Milliseconds": 1500},
            "pools": {"decode": {"engine": {"extraArgs": ["--weights=int8"]}}},
        },
        "status": {
            "pools": {
                "decode": {
                    "replicas": 2,
                    "variants": [{"name": "a", "replicas": 2, "costPerHour": "5.00"}],
                }
            }
        },
    }
    found = read_service(manifest)
    assert found == Service(
        name="demo",
        replicas={Role.DECODE: 2},
        price={Role.DECODE: 2.5},
        has_int8_kv=True,
        has_rounded_weights=True,
        ttft_goal=1.5,
        itl_goal=None,
    )


@pytest.mark.parametrize(
    ("model", "arguments", "rounds"),
    [
        ({}, [], False),
        ({"weights": {"layers": "Int8"}}, [], True),
        ({"weights": {"encoder": "Int8"}}, [], False),
        ({}, ["--weights=encoder=int8,layers=int4"], True),
        ({}, ["--weights=encoder=int8"], False),
    ],
)
def test_only_the_layers_of_the_language_model_are_a_lever_of_a_step(model, arguments, rounds):
    pools = {"decode": {"engine": {"extraArgs": arguments}}}
    found = read_service(
        {"metadata": {"name": "demo"}, "spec": {"model": model, "slo": {}, "pools": pools}}
    )
    assert found.has_rounded_weights is rounds


def add_pod(api, name: str, role: str) -> None:
    labels = {"triptych.dev/service": "demo", "triptych.dev/role": role}
    metadata = {"name": name, "namespace": "vision", "labels": labels}
    status = {"conditions": [{"type": "Ready", "status": "True"}]}
    api.add("/api/v1/namespaces/vision/pods", {"metadata": metadata, "status": status})


async def test_the_pods_of_a_service_are_read(api, kubeconfig, add_service, serve, capsys):
    service = add_service()
    service["spec"]["pools"] = {"decode": {}}
    decoder = Decoder(base=0.01, slope=2e-6)
    values = [decoder.run(steps=100, sequences=n, kv=1000 * n) for n in range(4, 16)]
    for pod, role, answers in (
        ("demo-decode-0", "decode", values),
        ("demo-gateway-0", "gateway", [gateway(requests=5, visual=0, itl=0.05, stages={})]),
    ):
        add_pod(api, pod, role)
        api.target_ports[pod] = await serve(*answers)
    await advise(
        "demo", seconds=1.1, interval=0.1, kubeconfig=kubeconfig, output=Format.JSON, explain=True
    )
    found = json.loads(capsys.readouterr().out)
    assert found["steps"]["slopePer1000KvTokens"]["value"] == pytest.approx(0.002)
    assert [row["pool"] for row in found["phases"]] == ["decode"]
    assert {row["lever"] for row in found["levers"]} >= {"one more decode pod"}
    assert all(row["by"]["formula"] for row in found["levers"])


async def test_the_text_has_phases_findings_and_levers(api, kubeconfig, add_service, serve, capsys):
    add_service()["spec"]["pools"] = {"decode": {}}
    add_pod(api, "demo-decode-0", "decode")
    decoder = Decoder(base=0.01, slope=2e-6)
    values = [decoder.run(steps=100, sequences=n, kv=1000 * n) for n in range(4, 16)]
    api.target_ports["demo-decode-0"] = await serve(*values)
    await advise("demo", seconds=1.1, interval=0.1, kubeconfig=kubeconfig)
    text = capsys.readouterr().out
    for title in ("Time of pods by phase", "Steps of decode", "Findings", "Levers, the largest"):
        assert title in text
    assert "No request reached a gateway in the window." in text


async def test_an_answer_that_is_no_stats_names_its_pod(api, kubeconfig, add_service, serve):
    add_service()
    add_pod(api, "demo-decode-0", "decode")
    api.target_ports["demo-decode-0"] = await serve({"version": 1})
    with pytest.raises(CliError) as refused:
        await advise("demo", seconds=1.0, interval=1.0, kubeconfig=kubeconfig)
    assert "/stats of pod demo-decode-0 is not valid" in refused.value.problem


async def test_without_a_ready_pod_there_is_no_advice(kubeconfig, add_service):
    add_service()
    with pytest.raises(CliError) as refused:
        await advise("demo", kubeconfig=kubeconfig)
    assert refused.value.problem == "no pod of demo is ready"
