"""Images while no encoder runs: encoded inline, held until one comes, or refused, as is set."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from worker.gateway.image_files import ask, png
from worker.gateway.stack import D, E, P, Stack, stack, started

from vlm_worker.gateway.pod_registry import static_pods
from vlm_worker.types import Role

WITHOUT_ENCODERS = ((Role.PREFILL, (P,)), (Role.DECODE, (D,)))
LENDS_ITS_ENCODER = ((Role.PREFILL, (E, P)), (Role.DECODE, (D,)))


def settings_file(folder: Path, on_demand: str, **admission: Any) -> Path:
    path = folder / "gateway.json"
    path.write_text(json.dumps({"on_demand": on_demand, "admission": admission}))
    return path


async def say(served: Stack, *content: object, stream: bool = False) -> httpx.Response:
    body = {"model": "shapes", "messages": [ask(*content)], "max_tokens": 4, "stream": stream}
    async with httpx.AsyncClient(timeout=30) as client:
        return await client.post(f"{served.url}/v1/chat/completions", json=body)


async def stats(served: Stack) -> dict[str, Any]:
    async with httpx.AsyncClient() as client:
        found: dict[str, Any] = (await client.get(f"{served.gateway.admin_url}/stats")).json()
    return found


async def until_held(served: Stack, count: int) -> None:
    """So many requests wait for an encoder, as `/stats` tells it."""
    wanted = {"encoder": count} if count else {}
    async with asyncio.timeout(60):
        while (await stats(served))["held_for"] != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def encoder_comes(served: Stack, address: str) -> None:
    addresses = [*served.gateway.context.settings.workers, address]
    served.gateway.context.registry.apply(static_pods(addresses))


@pytest.mark.parametrize("plan", [WITHOUT_ENCODERS, LENDS_ITS_ENCODER])
async def test_a_held_image_is_answered_as_soon_as_an_encoder_is_there(
    tmp_path: Path, plan: Any
) -> None:
    async with stack(*plan, config=settings_file(tmp_path, "Queue")) as served:
        held = [asyncio.create_task(say(served, png(), "What is this?")) for _ in range(3)]
        await until_held(served, 3)
        seen_held = time.monotonic()
        assert (await say(served, "Only text.")).status_code == 200  # passes them
        async with started(Role.ENCODER, (E,)) as encoder:
            held_ms = 1e3 * (time.monotonic() - seen_held)
            await encoder_comes(served, encoder.address)
            answers = await asyncio.gather(*held)
            await until_held(served, 0)
            assert encoder.components.engine.stats().count("images") == 1  # encoded there, once
            await served.until_idle()
    assert [answer.status_code for answer in answers] == [200] * 3
    for timing in (answer.json()["timing"] for answer in answers):
        assert timing["stages"]["encoder_queue"] >= held_ms
        assert timing["ttft_ms"] == pytest.approx(sum(timing["stages"].values()), abs=0.01)


async def test_no_request_is_held_longer_than_the_settings_allow(tmp_path: Path) -> None:
    config = settings_file(tmp_path, "Queue", max_queue_seconds=0.2)
    async with stack(*WITHOUT_ENCODERS, config=config) as served:
        answer = await say(served, png(), "What is this?")
        await until_held(served, 0)
    assert answer.status_code == 503
    assert "none came within the 0.2 seconds" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_client_that_leaves_is_held_no_more(tmp_path: Path) -> None:
    async with stack(*WITHOUT_ENCODERS, config=settings_file(tmp_path, "Queue")) as served:
        held = asyncio.create_task(say(served, png(), "What is this?"))
        await until_held(served, 1)
        held.cancel()
        await until_held(served, 0)
        context = served.gateway.context
        async with asyncio.timeout(60):
            await context.idle.wait()
        assert context.retry_policy.request_limit.num_waiting == 0


@pytest.mark.parametrize("plan", [WITHOUT_ENCODERS, LENDS_ITS_ENCODER])
async def test_where_images_are_refused_the_answer_says_why_and_text_is_served(
    tmp_path: Path, plan: Any
) -> None:
    async with stack(*plan, config=settings_file(tmp_path, "Reject")) as served:
        refused = await say(served, png(), "What is this?")
        assert (await say(served, "Only text.")).status_code == 200
        async with httpx.AsyncClient() as client:
            ready = await client.get(f"{served.url}/readyz")
    assert refused.status_code == 503
    error = refused.json()["error"]
    assert error["type"] == "server_error"
    assert error["message"].startswith("No encoder runs now, and this service takes no images")
    assert int(refused.headers["retry-after"]) == 10
    assert ready.status_code == 200  # text is served all the same


async def test_an_encoder_lost_a_moment_ago_is_waited_for_where_images_are_refused(
    tmp_path: Path,
) -> None:
    """A crash is no pool at zero: it has the patience of every lost pool."""
    async with stack(*WITHOUT_ENCODERS, config=settings_file(tmp_path, "Reject")) as served:
        async with started(Role.ENCODER, (E,)) as lost:
            await encoder_comes(served, lost.address)
            async with asyncio.timeout(60):
                while (await say(served, png(), "What is this?")).status_code != 200:
                    pass
        waiting = asyncio.create_task(say(served, png(), "What is this now?"))
        await until_held(served, 1)
        async with started(Role.ENCODER, (E,)) as encoder:
            await encoder_comes(served, encoder.address)
            assert (await waiting).status_code == 200
            await served.until_idle()


async def test_inline_the_next_role_that_has_the_stage_encodes(tmp_path: Path) -> None:
    config = settings_file(tmp_path, "InlineAtPrefill")
    async with stack(*LENDS_ITS_ENCODER, config=config) as served:
        assert (await say(served, png(), "What is this?")).status_code == 200
        (prefill,) = served.of(Role.PREFILL)
        busy = prefill.components.engine.stats().busy
        assert busy["encode"].items == 1  # what it encoded inline is told apart
        assert busy["prefill"].items == 1
        assert (await stats(served))["held_for"] == {}
