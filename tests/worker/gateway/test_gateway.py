"""The gateway as a server: keys, pages, stats, two of them, draining."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import jsonschema
import openai
import pytest
from worker.gateway.image_files import ask, png
from worker.gateway.stack import (
    EPD,
    Stack,
    gateway_settings,
    serving,
    stack,
    started,
)

from vlm_worker.gateway.gateway_server import NOTICE_SECONDS, running
from vlm_worker.types import STAGES, Role

SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "stats.schema.json").read_text())
TEXT = {"model": "shapes", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def api(url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


async def get(url: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.get(url, headers=headers)


async def until(ask_again: Callable[[], Awaitable[httpx.Response]], *, status: int) -> None:
    async with asyncio.timeout(60):
        while (await ask_again()).status_code != status:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


# ---- pages ---------------------------------------------------------------------------------------


async def test_the_models_are_listed_as_the_client_reads_them() -> None:
    async with serving(gateway_settings([])) as gateway, api(gateway.url) as client:
        (model,) = (await client.models.list()).data
        assert (model.id, model.object) == ("shapes", "model")
        assert model.model_extra["max_model_len"] == 4096
        assert (await client.models.retrieve("shapes")).id == "shapes"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.models.retrieve("gpt-4o")
        assert missing.value.code == "model_not_found"


async def until_ready(url: str, *, ready: bool) -> str:
    async with asyncio.timeout(60):
        while True:
            answer = await get(f"{url}/readyz")
            if (answer.status_code == 200) is ready:
                return answer.text
            await asyncio.sleep(0.05)


async def test_it_is_ready_when_every_stage_has_a_pod_and_stays_so_without_encoders() -> None:
    async with stack(*EPD, patience_seconds=0.5) as served:
        await until_ready(served.url, ready=True)
        (encoder,) = served.of(Role.ENCODER)
        await encoder.kill()
        registry = served.gateway.context.registry
        assert await registry.waiters.wait_until(
            lambda: len(registry.candidates()) == 2, timeout=60
        )
        assert await until_ready(served.url, ready=True) == "ok, but no ready pod for: encoder\n"
        async with api(served.url) as client:
            assert await client.chat.completions.create(**TEXT)
            with pytest.raises(openai.InternalServerError, match="encoder"):
                await client.chat.completions.create(**{**TEXT, "messages": [ask(png())]})
        (decode,) = served.of(Role.DECODE)
        await decode.kill()
        told = await until_ready(served.url, ready=False)
        assert told == "no ready pod for: encoder, decode\n"


@pytest.mark.parametrize("stage", [Role.ENCODER, Role.PREFILL, Role.DECODE])
async def test_before_it_is_ready_it_names_the_stage_without_a_pod(stage: Role) -> None:
    async with stack(*(plan for plan in EPD if plan[0] is not stage)) as served:
        told = await until_ready(served.url, ready=False)
        assert told == f"no ready pod for: {stage.value}\n"


async def test_a_worker_of_another_model_is_not_used_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with started(Role.DECODE) as decode:
        settings = gateway_settings([decode], served_name="other")
        async with running(settings) as gateway:
            registry = gateway.context.registry
            assert not await registry.waiters.wait_until(
                lambda: bool(registry.candidates()), timeout=1
            )
    assert any("it serves 'shapes', not 'other'" in str(vars(r)) for r in caplog.records)


async def test_stats_keep_to_their_schema_and_add_up(tmp_path: Path) -> None:
    config = tmp_path / "gateway.json"
    config.write_text('{"slo": {"ttft_ms": 30000, "overrides": {"image": 0.01}}}')
    async with stack(*EPD, config=config) as served:
        jsonschema.validate((await get(f"{served.gateway.admin_url}/stats")).json(), SCHEMA)
        async with api(served.url) as client:
            for _ in range(3):
                await client.chat.completions.create(**TEXT)
            answer = await client.chat.completions.create(**{**TEXT, "messages": [ask(png())]})
        stats = (await get(f"{served.gateway.admin_url}/stats")).json()
        metrics = (await get(f"{served.gateway.admin_url}/metrics")).text
    jsonschema.validate(stats, SCHEMA)
    text, image = stats["ttft"]["text"], stats["ttft"]["image"]
    assert (text["count"], text["missed"]) == (3, 0)
    assert (image["count"], image["missed"]) == (1, 1)
    assert text["buckets"]["30"] == 3
    assert image["buckets"]["1e-05"] == 0
    assert image["buckets"]["+Inf"] == 1
    for part in (text, image):
        stages = [one["met"] + one["missed"] for one in part["stages"].values()]
        assert sum(stages) == pytest.approx(part["sum_seconds"])
    timing = answer.model_extra["timing"]
    assert image["stages"]["encode"]["missed"] == pytest.approx(
        timing["stages"]["encode"] / 1000, abs=1e-3
    )
    assert stats["counters"]["visual_tokens"] == 12
    assert len(stats["config_hash"]) == 64
    assert 'triptych_requests_total{outcome="ok"} 4.0' in metrics
    assert 'triptych_slo_requests_total{modality="image",slo="missed"} 1.0' in metrics
    for stage in STAGES:
        assert (
            f'triptych_ttft_stage_seconds_total{{modality="text",slo="met",stage="{stage}"}}'
            in metrics
        )


async def test_settings_are_applied_while_it_runs_and_bad_ones_change_nothing(
    tmp_path: Path,
) -> None:
    config = tmp_path / "gateway.json"
    config.write_text('{"limits": {"images_per_request": 1}}')
    async with serving(gateway_settings([], config=config)) as gateway:

        async def two_images() -> httpx.Response:
            async with httpx.AsyncClient(base_url=gateway.url) as client:
                body = {**TEXT, "messages": [ask(png(), png())]}
                return await client.post("/v1/chat/completions", json=body)

        async def valid() -> float:
            async with httpx.AsyncClient(base_url=gateway.admin_url) as client:
                page = (await client.get("/metrics")).text
            return float(page.partition("\ntriptych_gateway_settings_valid ")[2].split()[0])

        assert (await two_images()).json()["error"]["code"] == "too_many_images"
        first = gateway.context.stats()["config_hash"]
        assert await valid() == 1
        for bad in ("{", '{"media": {"allowed_networks": ["10.0.0.0/33"]}}'):
            config.write_text(bad)
            gateway.context.config_watcher.reload()
            assert gateway.context.stats()["config_hash"] == first
            assert await valid() == 0
        config.write_text('{"limits": {"images_per_request": 2}}')
        await until(two_images, status=503)
        assert gateway.context.stats()["config_hash"] != first
        assert await valid() == 1


# ---- time ----------------------------------------------------------------------------------------

DELAY = 0.3
HOPS = [stage for stage in STAGES if stage != "other"]


@pytest.mark.parametrize("stage", [*HOPS, "kv_transfer"])
async def test_a_delay_at_one_hop_shows_in_that_stage_alone(stage: str) -> None:
    delays = {} if stage == "gateway" else {stage: DELAY}
    own = {"gateway": DELAY} if stage == "gateway" else {}
    async with stack(*EPD, worker_delays=delays, delays=own) as served, api(served.url) as client:
        times = []
        stream = await client.chat.completions.create(
            model="shapes", messages=[ask(png(), "What?")], max_tokens=3, stream=True
        )
        async for chunk in stream:
            times.append(asyncio.get_running_loop().time())
            timing = chunk.model_extra.get("timing", {})  # type: ignore[union-attr]
    shares = timing["stages"]
    if stage == "kv_transfer":
        assert max(shares.values()) < DELAY * 1000 * 0.8
        assert times[1] - times[0] > DELAY * 0.8
        return
    assert shares[stage] >= DELAY * 1000 * 0.8
    others = {name: share for name, share in shares.items() if name != stage}
    assert max(others.values()) < DELAY * 1000 * 0.5, shares
    assert timing["ttft_ms"] == pytest.approx(sum(shares.values()), abs=0.01)


# ---- several, and the end ------------------------------------------------------------------------


async def test_two_gateways_share_the_workers_and_nothing_else() -> None:
    async with stack(*EPD) as served, serving(gateway_settings(served.workers)) as second:
        body = {**TEXT, "messages": [ask(png(), "What?")], "max_tokens": 30, "temperature": 0}

        async def answer(url: str) -> str | None:
            async with api(url) as client:
                whole = await client.chat.completions.create(**body)
            return whole.choices[0].message.content

        urls = [served.url, second.url] * 3
        assert len(set(await asyncio.gather(*map(answer, urls)))) == 1
        await served.until_idle()


async def stream_slowly(served: Stack, seen: asyncio.Event) -> list[str]:
    for worker in served.of(Role.DECODE):
        worker.runner.faults.step_seconds = 0.02
    lines: list[str] = []
    async with (
        httpx.AsyncClient(base_url=served.url, timeout=60) as client,
        client.stream(
            "POST", "/v1/chat/completions", json={**TEXT, "max_tokens": 60, "stream": True}
        ) as response,
    ):
        async for line in response.aiter_lines():
            lines.append(line)
            seen.set()
    return [line for line in lines if line]


@dataclasses.dataclass
class Streaming:
    """A gateway that serves until `stop`, and a stream of which a line has come."""

    served: Stack
    stop: asyncio.Event
    serving: asyncio.Task[None]
    stream: asyncio.Task[list[str]]

    async def stopped(self) -> list[str]:
        """Tell the gateway to end; returns the stream's lines once both have ended."""
        self.stop.set()
        lines = await self.stream
        await self.serving
        return lines


@contextlib.asynccontextmanager
async def streaming(
    *, notice_seconds: float = NOTICE_SECONDS, **settings: float
) -> AsyncIterator[Streaming]:
    async with started(Role.PREFILL) as prefill, started(Role.DECODE) as decode:
        stop, seen = asyncio.Event(), asyncio.Event()
        async with running(gateway_settings([prefill, decode], **settings)) as gateway:
            registry = gateway.context.registry
            await registry.waiters.wait_until(lambda: len(registry.candidates()) == 2, timeout=60)
            serving = asyncio.create_task(gateway.serve(stop, notice_seconds=notice_seconds))
            served = Stack([prefill, decode], gateway)
            stream = asyncio.create_task(stream_slowly(served, seen))
            await seen.wait()
            yield Streaming(served, stop, serving, stream)
        await served.until_idle()


async def test_a_stream_is_finished_before_the_gateway_ends() -> None:
    async with streaming(notice_seconds=0.1) as running_stream:
        lines = await running_stream.stopped()
        assert lines[-1] == "data: [DONE]"


async def test_a_stream_that_outlasts_the_drain_ends_in_an_error_event() -> None:
    async with streaming(notice_seconds=0.1, drain_timeout_seconds=0.2) as running_stream:
        lines = await running_stream.stopped()
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
        assert error["code"] == "service_unavailable"
        assert "data: [DONE]" not in lines


async def test_a_gateway_whose_worker_failed_for_good_says_so_and_ends_at_once() -> None:
    """As `vlm-worker serve`, where the engine is in the gateway's own process."""
    async with streaming(drain_timeout_seconds=600.0) as running_stream:
        gateway = running_stream.served.gateway
        gateway.context.fail("the engine cannot go on: the device is lost")
        for path in ("/healthz", "/readyz", "/health"):
            answer = await get(f"{gateway.url}{path}")
            assert (answer.status_code, "device is lost" in answer.text) == (503, True)
        async with api(gateway.url) as client:
            with pytest.raises(openai.InternalServerError, match="shutting down"):
                await client.chat.completions.create(**TEXT)
        error = json.loads((await running_stream.stream)[-1].removeprefix("data: "))["error"]
        assert (error["code"], "has failed" in error["message"]) == ("service_unavailable", True)
        running_stream.stop.set()
        async with asyncio.timeout(30):  # of 600 s to drain, and 2 s of notice
            await running_stream.serving
