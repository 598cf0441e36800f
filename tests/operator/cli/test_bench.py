"""`vlm bench`: open loop, exact counts, results that can be checked by hand."""

import asyncio
import contextlib
import itertools
import json
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_cli.bench.command import NUM_SEEDS, Load, bench, new_seed, run
from vlm_cli.bench.load import Arrival, Outcome, Result, make_image, poisson, run_load
from vlm_cli.bench.report import percentile, summarise
from vlm_cli.client import Answer, ApiError
from vlm_cli.output import CliError, Format
from vlm_cli.target import Options


def load(**changes: Any) -> Load:
    fields: dict[str, Any] = {
        "rate": 100,
        "duration": 0.3,
        "image_share": 0.5,
        "images": [],
        "distinct": 0,
        "width": 28,
        "height": 28,
        "question": None,
        "max_tokens": 4,
        "seed": 1,
        "timeout": 10.0,
        "drain": 10.0,
    }
    return Load(**(fields | changes))


async def report(openai: Any, capsys: pytest.CaptureFixture[str], **changes: Any) -> dict[str, Any]:
    options = Options(None, openai.url, None, None, None, None)
    with contextlib.suppress(CliError):  # no request was answered; the report has that, too
        await run(options, load(**changes), output=Format.JSON)
    return dict(json.loads(capsys.readouterr().out))


def adds_up(group: dict[str, Any]) -> bool:
    return bool(group["sent"] == sum(group[outcome.value] for outcome in Outcome))


async def test_what_repeats_a_run_is_said(openai: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = Options(None, openai.url, None, None, None, None)
    await run(options, load(seed=7), output=Format.JSON)
    assert "--seed=7 repeats them" in " ".join(capsys.readouterr().err.split())


def test_two_runs_without_a_seed_send_other_images() -> None:
    seeds = {new_seed() for _ in range(8)}
    assert len(seeds) > 1
    assert all(0 <= seed < NUM_SEEDS for seed in seeds)
    # `make_image` marks it with 48 bits of the run's seed and the request's number
    assert (NUM_SEEDS - 1) * 1_000_003 + 1_000_003 < 1 << 48


async def test_every_request_is_sent_and_counted_once(
    openai: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    openai.refuse_every = 3
    found = await report(openai, capsys)
    arrivals = poisson(100, 0.3, 0.5, 1)
    groups = found["requests"]
    assert groups["all"]["sent"] == len(arrivals) == len(openai.bodies)
    assert groups["all"]["rejected"] == len(arrivals) // 3 > 0
    assert groups["all"]["ok"] == len(arrivals) - len(arrivals) // 3
    assert groups["image"]["sent"] == sum(a.image for a in arrivals)
    assert groups["image"]["sent"] + groups["text"]["sent"] == groups["all"]["sent"]
    assert all(adds_up(group) for group in groups.values())
    assert found["errors"] == {"overloaded": len(arrivals) // 3}
    assert found["stages"]["image"]["encode"]["sharePercent"] == 31.2
    assert found["stages"]["text"]["prefill"] == {
        "mean": 20.0, "p50": 20.0, "p95": 20.0, "sharePercent": 50.0
    }  # fmt: skip


async def test_a_slow_server_does_not_slow_its_load_down(
    openai: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A closed loop of one would take 30 times as long; here all are under way together."""
    openai.pieces, openai.pause = ("a",), 0.5
    found = await report(openai, capsys)
    assert found["requests"]["all"]["ok"] == found["requests"]["all"]["sent"]
    assert found["elapsedSeconds"] < 0.5 * found["requests"]["all"]["sent"] / 3
    assert found["requests"]["all"]["ttftMilliseconds"]["p50"] >= 500


async def test_requests_that_outlast_the_drain_are_cancelled_and_counted(
    openai: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    openai.pause = 60
    found = await report(openai, capsys, drain=0.2)
    group = found["requests"]["all"]
    assert group["cancelled"] == group["sent"] == len(openai.bodies)
    async with asyncio.timeout(15):
        while openai.num_open:  # noqa: ASYNC110 - the server notices on its own
            await asyncio.sleep(0.01)
    assert openai.num_cancelled == group["sent"]


async def test_timeouts_and_broken_streams_are_failures_by_kind(
    openai: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    openai.pause = 60
    found = await report(openai, capsys, timeout=0.2)
    assert found["errors"] == {"timeout": found["requests"]["all"]["failed"]}
    openai.pause, openai.break_off = 0, True
    found = await report(openai, capsys)
    assert found["errors"] == {"cut_off": found["requests"]["all"]["sent"]}


async def test_an_interrupted_run_still_reports(
    openai: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    openai.pause = 60
    task = asyncio.create_task(report(openai, capsys, duration=100.0))
    async with asyncio.timeout(15):
        while openai.num_open < 5:  # noqa: ASYNC110 - the server's own count
            await asyncio.sleep(0.01)
    task.cancel()
    group = (await task)["requests"]["all"]
    assert group["cancelled"] == group["sent"] >= 5
    assert adds_up(group)


async def test_a_run_without_an_answer_fails_after_its_report(
    openai: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    openai.status = 500
    options = Options(None, openai.url, None, None, None, "m")
    with pytest.raises(CliError, match=r"none of \d+ requests was answered"):
        await run(options, load(), output=Format.TABLE)
    out = capsys.readouterr().out
    assert "overloaded" in out
    assert "ok" in out.lower()


async def test_people_get_tables(openai: Any, capsys: pytest.CaptureFixture[str]) -> None:
    await run(Options(None, openai.url, None, None, None, None), load(), output=Format.TABLE)
    captured = capsys.readouterr()
    heads = captured.out.splitlines()[0].split()
    assert heads[:6] == ["REQUESTS", "SENT", "OK", "REJECTED", "FAILED", "CANCELLED"]
    assert "STAGE OF TTFT" in captured.out
    assert "tokens a second" in captured.out
    assert "requests in 0.3 s" in captured.err


async def test_own_images_take_turns(
    openai: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    paths = []
    for i in range(2):
        path = tmp_path / f"{i}.png"
        path.write_bytes(make_image(i, width=30, height=20))
        paths.append(path)
    await report(openai, capsys, images=paths, image_share=1.0, question="And now?")
    urls = {body["messages"][0]["content"][0]["image_url"]["url"] for body in openai.bodies}
    assert len(urls) == 2
    assert {body["messages"][0]["content"][1]["text"] for body in openai.bodies} == {"And now?"}


@pytest.mark.parametrize("distinct", [0, 3])
async def test_made_images_are_as_many_as_asked_for(
    openai: Any, capsys: pytest.CaptureFixture[str], distinct: int
) -> None:
    await report(openai, capsys, image_share=1.0, distinct=distinct)
    urls = [body["messages"][0]["content"][0]["image_url"]["url"] for body in openai.bodies]
    assert len(urls) > 10
    assert len(set(urls)) == (distinct or len(urls))


async def test_without_a_name_or_an_address_nothing_is_sent() -> None:
    with pytest.raises(CliError, match="no service is named"):
        await bench()


async def test_no_arrivals_are_an_error_in_words() -> None:
    options = Options(None, "http://127.0.0.1:1", None, None, None, "m")
    with pytest.raises(CliError, match="no request falls into"):
        await run(options, load(rate=0.001), output=Format.TABLE)


@given(rate=st.floats(1, 500), duration=st.floats(0.1, 20), seed=st.integers(0, 99))
def test_arrivals_are_ordered_within_the_duration_and_repeatable(
    rate: float, duration: float, seed: int
) -> None:
    arrivals = poisson(rate, duration, 0.3, seed)
    assert arrivals == poisson(rate, duration, 0.3, seed)
    times = [arrival.at for arrival in arrivals]
    assert times == sorted(times)
    assert all(0 < at < duration for at in times)
    assert [arrival.number for arrival in arrivals] == list(range(len(arrivals)))


def test_arrivals_are_poisson() -> None:
    """Mean rate and the variance of the gaps, which is what makes bursts."""
    arrivals = poisson(50, 400, 0.25, 3)
    gaps = [b.at - a.at for a, b in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert 0.019 < mean < 0.021
    assert 0.85 < variance / mean**2 < 1.15
    assert 0.23 < sum(a.image for a in arrivals) / len(arrivals) < 0.27


async def test_every_way_to_end_is_one_outcome() -> None:
    ends: list[Any] = [
        Answer("x", 0.1, 0.2, (0.1,), {}, {}, None, "stop"),
        ApiError(429, "rate", "later"),
        ApiError(503, "overloaded", "later"),
        ApiError(400, "invalid", "never"),
        TimeoutError(),
        aiohttp.ClientConnectionError("gone"),
        OSError("gone"),
    ]

    async def ask(arrival: Arrival) -> Answer:
        end = ends[arrival.number]
        if isinstance(end, Exception):
            raise end
        return end  # type: ignore[no-any-return]

    arrivals = [Arrival(0.0, i, False) for i in range(len(ends))]
    results = await run_load(arrivals, ask, drain_seconds=10)
    found = {r.arrival.number: (r.outcome.value, r.error) for r in results}
    assert found == {
        0: ("ok", ""),
        1: ("rejected", "rate"),
        2: ("rejected", "overloaded"),
        3: ("failed", "invalid"),
        4: ("failed", "timeout"),
        5: ("failed", "connection_lost"),
        6: ("failed", "connection_lost"),
    }


outcomes = st.sampled_from(list(Outcome))


@given(st.lists(st.tuples(outcomes, st.booleans()), max_size=40))
def test_counts_always_add_up(ends: list[tuple[Outcome, bool]]) -> None:
    answer = Answer("x", 0.1, 0.2, (0.1, 0.15), {"completion_tokens": 2}, {"encode": 5}, 5, "stop")
    results = [
        Result(Arrival(0, i, image), end, 0.0, "" if end is Outcome.OK else "e",
               answer if end is Outcome.OK else None)
        for i, (end, image) in enumerate(ends)
    ]  # fmt: skip
    found = summarise(results, elapsed=2.0)
    assert all(adds_up(group) for group in found["requests"].values())
    num_ok = sum(end is Outcome.OK for end, _ in ends)
    assert sum(found["errors"].values()) == len(ends) - num_ok
    assert found["answersPerSecond"] == num_ok / 2
    assert found["outputTokensPerSecond"] == num_ok


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from([1, 50, 95, 99, 100]))
def test_a_percentile_is_a_value_that_that_many_do_not_exceed(
    values: list[float], percent: int
) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(v <= found for v in values) >= percent / 100 * len(values) - 1e-9
    assert sum(v < found for v in values) < percent / 100 * len(values) + 1e-9


def test_a_made_image_is_a_valid_png_and_unlike_others() -> None:
    rng = random.Random(1)
    seen = set()
    for seed in range(200):
        width, height = rng.randint(8, 60), rng.randint(8, 60)
        data = make_image(seed, width=width, height=height)
        assert data == make_image(seed, width=width, height=height)
        assert struct.unpack(">II", data[16:24]) == (width, height)
        at = data.index(b"IDAT")
        (length,) = struct.unpack(">I", data[at - 4 : at])
        rows = zlib.decompress(data[at + 4 : at + 4 + length])
        assert len(rows) == height * (1 + 3 * width)
        assert set(rows[:: 1 + 3 * width]) == {0}
        seen.add(rows)
    assert len(seen) == 200
