"""Reading pods: only what is well-formed, of the right pod, and in time."""

import dataclasses
import json
import pathlib
from typing import Any

import jsonschema
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from support.world import World
from vlm_operator.metrics import REGISTRY
from vlm_operator.scrape import MAX_BYTES, MAX_COUNT, MAX_SECONDS, HttpScraper, parse_stats
from vlm_operator.state import WorkCounters

ROOT = pathlib.Path(__file__).parents[3]
SCHEMA = json.loads((ROOT / "docs" / "stats.schema.json").read_text())
TEXT = (ROOT / "docs" / "contract.md").read_text()
EXAMPLE: dict[str, Any] = json.loads(
    TEXT.partition("## /stats")[2].partition("```json")[2].partition("```")[0]
) | {"boot_id": "0" * 32, "phase": "ready", "pod_uid": "uid-1"}


def test_the_contracts_example_is_read():
    jsonschema.validate(EXAMPLE, SCHEMA)
    found = parse_stats(EXAMPLE)
    assert (found.role.value, found.pod_uid) == ("decode", "uid-1")
    assert found.kv is not None
    assert list(found.ttft["text"].buckets) == [0.1, float("inf")]


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.just([]),
    st.just({}),
)


@given(st.sampled_from(sorted(EXAMPLE)), junk)
def test_what_the_schema_refuses_is_refused_and_nothing_else_breaks(key: str, value: Any):
    changed = {**EXAMPLE, key: value}
    try:
        jsonschema.validate(changed, SCHEMA)
        valid = value == value and not (key == "inflight" and value > MAX_COUNT)
    except jsonschema.ValidationError:
        valid = False
    try:
        found = parse_stats(changed)
    except (ValueError, KeyError, TypeError, AttributeError):
        assert not valid
        return
    assert found.inflight >= 0
    assert found.queued_work_seconds >= 0


@given(st.sampled_from(["work_seconds", "started_work_seconds_total"]), st.floats())
def test_seconds_are_finite_and_not_negative(key: str, value: float):
    queue = {**EXAMPLE["queue"], key: value}
    if 0 <= value <= MAX_SECONDS:
        parse_stats({**EXAMPLE, "queue": queue})
    else:
        with pytest.raises((ValueError, TypeError)):
            parse_stats({**EXAMPLE, "queue": queue})


def test_pods_of_version_0_1_report_started_work_under_its_old_name():
    queue = {**EXAMPLE["queue"]}
    queue["admitted_work_seconds_total"] = queue.pop("started_work_seconds_total") + 2.5
    found = parse_stats({**EXAMPLE, "queue": queue})
    assert found.started_work_seconds == queue["admitted_work_seconds_total"]


BUSY = {"seconds": 1.5, "calls": 3, "items": 2, "units": 900, "squares": 2.5e5}
WORKER = {**EXAMPLE, "busy": {"decode": BUSY}}
GATEWAY = {
    **EXAMPLE,
    "role": "gateway",
    "gaps": {"count": 7, "buckets": {"0.05": 4, "+Inf": 7}},
    "held_for": {"encoder": 2},
    "wake": {"idle_seconds": 12.5, "waiting_requests": 3},
}


def test_work_gaps_and_held_requests_are_read_where_an_image_reports_them():
    assert parse_stats(WORKER).busy == {"decode": WorkCounters(1.5, 3, 2, 900, 2.5e5)}
    gateway = parse_stats(GATEWAY)
    assert gateway.gaps is not None
    assert gateway.gaps.buckets == {0.05: 4, float("inf"): 7}
    assert gateway.held_for == {"encoder": 2}
    assert (gateway.idle_seconds, gateway.waiting_for_wake) == (12.5, 3)
    left_out = ("busy", "gaps", "held_for", "wake")
    old = parse_stats({key: item for key, item in EXAMPLE.items() if key not in left_out})
    assert (old.busy, old.gaps, old.held_for) == ({}, None, {})
    assert (old.idle_seconds, old.waiting_for_wake) == (None, 0), "unknown is not idle"


def test_buckets_of_a_stage_are_read_beside_its_seconds():
    ttft = json.loads(json.dumps(EXAMPLE["ttft"]))
    ttft["text"]["stages"]["prefill"] |= {"buckets": {"0.1": 1, "+Inf": 3}}
    stage = parse_stats({**EXAMPLE, "ttft": ttft}).ttft["text"].stages["prefill"]
    assert stage.buckets == {0.1: 1, float("inf"): 3}


wrong_numbers = st.one_of(
    st.floats(max_value=-1e-300),
    st.floats(min_value=1e25, allow_infinity=True),
    st.just(float("nan")),
    st.integers(max_value=-1),
    st.integers(min_value=10**25),
    st.none(),
    st.booleans(),
    st.text(max_size=2),
)


@given(st.sampled_from(sorted(BUSY)), wrong_numbers)
def test_absurd_work_drops_the_whole_sample(key: str, value: Any):
    with pytest.raises((ValueError, TypeError)):
        parse_stats({**WORKER, "busy": {"decode": {**BUSY, key: value}}})


@given(wrong_numbers)
def test_absurd_gaps_and_absurd_held_counts_drop_the_whole_sample(value: Any):
    for changed in (
        {"gaps": {"count": value, "buckets": {}}},
        {"gaps": {"count": 1, "buckets": {"0.1": value}}},
        {"held_for": {"encoder": value}},
        {"wake": {"idle_seconds": value, "waiting_requests": 0}},
        {"wake": {"idle_seconds": 0.0, "waiting_requests": value}},
    ):
        with pytest.raises((ValueError, TypeError)):
            parse_stats({**GATEWAY, **changed})


def test_buckets_that_are_not_cumulative_drop_the_whole_sample():
    with pytest.raises(ValueError, match="cumulative"):
        parse_stats({**GATEWAY, "gaps": {"count": 1, "buckets": {"0.1": 2, "+Inf": 1}}})


def some_pod():
    world = World()
    world.converge()
    pod = world.loop._seen.pods[0]
    return dataclasses.replace(pod, uid="uid-1", ip="127.0.0.1")


def bad(reason: str) -> float:
    labels = {"reason": reason}
    return REGISTRY.get_sample_value("triptych_operator_bad_samples_total", labels) or 0.0


@pytest.fixture(scope="module")
def pod():
    return some_pod()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param(json.dumps(EXAMPLE), None, id="well-formed"),
        pytest.param(json.dumps({**EXAMPLE, "pod_uid": "uid-2"}), "another pod", id="another pod"),
        pytest.param(json.dumps({**EXAMPLE, "version": 2}), "malformed", id="another version"),
        pytest.param("{", "malformed", id="cut short"),
        pytest.param("[]", "malformed", id="no object"),
        pytest.param(json.dumps({**EXAMPLE, "ttft": "x"}), "malformed", id="text for a map"),
        pytest.param("x" * (MAX_BYTES + 1), "too long", id="too long"),
        pytest.param(json.dumps(EXAMPLE).replace("12.5", "NaN"), None, id="NaN where unread"),
    ],
)
async def test_an_answer_is_taken_or_counted(pod, body: str, reason: str | None):
    async def stats(_: web.Request) -> web.Response:
        return web.Response(text=body)

    async with serving(stats) as port:
        scraper = HttpScraper(port=port)
        before = bad(reason or "")
        found = await scraper.scrape([pod])
        await scraper.close()
    assert set(found) == (set() if reason else {"uid-1"})
    assert bad(reason or "") == before + (1 if reason else 0)


async def test_an_error_and_a_closed_port_yield_nothing(pod):
    async def stats(_: web.Request) -> web.Response:
        return web.Response(status=500)

    async with serving(stats) as port:
        scraper = HttpScraper(port=port)
        assert await scraper.scrape([pod]) == {}
    before = bad("unreachable")
    assert await scraper.scrape([pod]) == {}
    assert bad("unreachable") == before + 1
    assert await scraper.scrape([dataclasses.replace(pod, containers_ready=False)]) == {}
    assert bad("unreachable") == before + 1  # one that is starting is no bad sample
    assert await scraper.scrape([dataclasses.replace(pod, ip=None)]) == {}
    await scraper.close()


class serving:  # noqa: N801
    """A pod's HTTP server on a free port."""

    def __init__(self, stats: Any) -> None:
        self._app = web.Application()
        self._app.router.add_get("/stats", stats)
        self._runner = web.AppRunner(self._app)

    async def __aenter__(self) -> int:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
