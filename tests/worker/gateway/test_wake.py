"""A service at zero: requests are held until pods are there, or refused if they come too late."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from worker.gateway.image_files import ask, png
from worker.gateway.stack import COLOCATED, D, E, P, Stack, gateway_settings, serving, started

from vlm_worker.gateway.gateway_server import Gateway
from vlm_worker.gateway.pod_registry import static_pods
from vlm_worker.types import Role


def settings_file(folder: Path, wake: float | None, **more: Any) -> Path:
    path = folder / "gateway.json"
    path.write_text(json.dumps({"wake_timeout_seconds": wake, **more}))
    return path


def asleep(folder: Path, wake: float | None = 60.0, **changes: Any) -> Any:
    """A gateway that knows no pod, of a service that may scale to zero."""
    return serving(gateway_settings((), config=settings_file(folder, wake), **changes))


async def say(gateway: Gateway, *content: object, **more: Any) -> httpx.Response:
    headers = more.pop("headers", {})
    body = {"model": "shapes", "messages": [ask(*content)], "max_tokens": 4, **more}
    async with httpx.AsyncClient(timeout=60) as client:
        url = f"{gateway.url}/v1/chat/completions"
        return await client.post(url, json=body, headers=headers)


async def page(gateway: Gateway, path: str, *, admin: bool = False) -> httpx.Response:
    base = gateway.admin_url if admin else gateway.url
    async with httpx.AsyncClient() as client:
        return await client.get(base + path)


async def wake(gateway: Gateway) -> dict[str, Any]:
    found: dict[str, Any] = (await page(gateway, "/stats", admin=True)).json()["wake"]
    return found


async def until_waiting(gateway: Gateway, count: int) -> None:
    """Wait until `/stats` reports that `count` requests wait for the service."""
    async with asyncio.timeout(60):
        while (await wake(gateway))["waiting_requests"] != count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_held_requests_get_the_answer_of_a_service_that_never_slept(tmp_path: Path) -> None:
    async with asleep(tmp_path) as gateway, started(Role.DECODE, (E, P, D)) as worker:
        held = [asyncio.create_task(say(gateway, png(), "What is this?")) for _ in range(3)]
        held += [asyncio.create_task(say(gateway, "Only text.", stream=True))]
        await until_waiting(gateway, 4)
        gateway.context.registry.apply(static_pods([worker.address]))
        answers = await asyncio.gather(*held)
        warm = await say(gateway, png(), "What is this?")
        await until_waiting(gateway, 0)
        metrics = (await page(gateway, "/metrics", admin=True)).text
        await Stack([worker], gateway).until_idle()
    assert [answer.status_code for answer in answers] == [200] * 4
    texts = {answer.json()["choices"][0]["message"]["content"] for answer in answers[:3]}
    assert texts == {warm.json()["choices"][0]["message"]["content"]}
    assert "[DONE]" in answers[3].text
    assert "triptych_wake_wait_seconds_count 4.0" in metrics, "the warm request did not wait"


async def test_all_stages_of_a_request_come_before_it_goes_on(tmp_path: Path) -> None:
    """Pools become ready one after another; a held image waits for its encoder, too."""
    async with (
        asleep(tmp_path) as gateway,
        started(Role.DECODE, (D,)) as decode,
        started(Role.PREFILL, (P,)) as prefill,
        started(Role.ENCODER, (E,)) as encoder,
    ):
        image = asyncio.create_task(say(gateway, png(), "What is this?"))
        await until_waiting(gateway, 1)
        registry, known = gateway.context.registry, list[str]()
        for worker in (decode, prefill):
            known.append(worker.address)
            registry.apply(static_pods(known))
            assert await registry.waiters.wait_until(
                lambda: len(registry.candidates()) == len(known), timeout=30
            )
            assert (await wake(gateway))["waiting_requests"] == 1
        late = asyncio.create_task(say(gateway, png(), "What is that?"))
        await until_waiting(gateway, 2)
        assert (await say(gateway, "Only text.")).status_code == 200  # needs no encoder
        registry.apply(static_pods([*known, encoder.address]))
        assert [(await one).status_code for one in (image, late)] == [200] * 2


async def test_the_wait_is_no_time_to_first_token(tmp_path: Path) -> None:
    """Else one start from zero would look like an overload of whichever stage."""
    async with asleep(tmp_path) as gateway, started(Role.DECODE, (E, P, D)) as worker:
        held = asyncio.create_task(say(gateway, "Only text."))
        await until_waiting(gateway, 1)
        began = gateway.context.clock()
        await asyncio.sleep(0.05)
        waited_ms = 1e3 * (gateway.context.clock() - began)
        gateway.context.registry.apply(static_pods([worker.address]))
        timing = (await held).json()["timing"]
    assert timing["ttft_ms"] == pytest.approx(sum(timing["stages"].values()), abs=0.01)
    (ttft,) = [one for one in gateway.context.meters.ttft.values() if sum(one.buckets.counts)]
    assert ttft.buckets.total * 1e3 == pytest.approx(timing["ttft_ms"], abs=0.1)
    waits = gateway.context.meters._wakes.buckets
    assert sum(waits.counts) == 1
    assert waits.total * 1e3 >= waited_ms


async def test_a_start_that_takes_too_long_is_a_503_that_says_so(tmp_path: Path) -> None:
    async with asleep(tmp_path, wake=0.2) as gateway:
        answer = await say(gateway, "Only text.")
        await until_waiting(gateway, 0)
    assert answer.status_code == 503
    assert "service is starting" in answer.json()["error"]["message"]
    assert "0.2 seconds" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) == 10


async def test_the_clients_own_deadline_ends_the_wait_with_the_same_answer(tmp_path: Path) -> None:
    async with asleep(tmp_path) as gateway:
        answer = await say(gateway, "Only text.", headers={"x-request-timeout": "0.3"})
        await until_waiting(gateway, 0)
    assert answer.status_code == 503
    assert "service is starting" in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) == 10


async def test_held_requests_are_bounded_like_all_that_wait(tmp_path: Path) -> None:
    async with asleep(tmp_path, max_waiting=2) as gateway:
        held = [asyncio.create_task(say(gateway, "Only text.")) for _ in range(2)]
        await until_waiting(gateway, 2)
        refused = await say(gateway, "One too many.")
        for one in held:
            one.cancel()
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1


async def test_a_client_that_leaves_gives_its_place_back(tmp_path: Path) -> None:
    async with asleep(tmp_path, max_waiting=1) as gateway:
        held = asyncio.create_task(say(gateway, "Only text."))
        await until_waiting(gateway, 1)
        held.cancel()
        await until_waiting(gateway, 0)
        async with asyncio.timeout(60):
            await gateway.context.idle.wait()
        assert gateway.context.retry_policy.request_limit.num_waiting == 0
        assert gateway.context.memory.used_in_all == 0
        again = asyncio.create_task(say(gateway, "Only text."))
        await until_waiting(gateway, 1)
        again.cancel()


async def test_without_the_setting_nothing_is_held(tmp_path: Path) -> None:
    async with asleep(tmp_path, wake=None) as gateway:
        answer = await say(gateway, "Only text.")
        ready = await page(gateway, "/readyz")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "No worker is ready for the stage 'decode'."
    assert ready.status_code == 503


async def test_a_gateway_without_pods_is_ready_and_names_its_model(tmp_path: Path) -> None:
    async with asleep(tmp_path) as gateway:
        ready, models = await page(gateway, "/readyz"), await page(gateway, "/v1/models")
        stats = (await page(gateway, "/stats", admin=True)).json()
    assert (ready.status_code, ready.text) == (
        200,
        "ok, but no ready pod for: encoder, prefill, decode\n",
    )
    assert models.json()["data"][0]["id"] == "shapes"
    assert (stats["phase"], stats["message"]) == ("ready", "")


async def test_a_gateway_is_not_ready_before_the_first_list_of_pods(tmp_path: Path) -> None:
    async with asleep(tmp_path) as gateway:
        context = gateway.context
        context.registry.synced = False
        assert context.not_ready_because() == "the pods are not listed yet"
        context.note_discovery("the API server denies the list of pods: 403 Forbidden")
        assert "403" in (context.not_ready_because() or "")
        context.note_discovery("")
        context.registry.apply([])
        assert context.not_ready_because() is None
        context.note_discovery("the watch ended")  # it still holds requests
        assert context.not_ready_because() is None


async def test_idle_time_grows_only_without_requests(tmp_path: Path) -> None:
    async with asleep(tmp_path) as gateway:
        context, times = gateway.context, [100.0]
        context.clock, context._last_active = lambda: times[0], 100.0
        times[0] += 30
        assert context.idle_seconds == 30
        context.enter()
        times[0] += 30
        assert context.idle_seconds == 0, "a request is in flight"
        context.leave("cancelled")
        times[0] += 5
        assert context.idle_seconds == 5
        context.enter()
        context.leave("invalid")
        assert context.idle_seconds == 5, "a broken probe does not keep the service awake"


async def test_requests_and_pages_without_a_generation_are_no_activity(tmp_path: Path) -> None:
    async with asleep(tmp_path) as gateway:
        before = await wake(gateway)
        await page(gateway, "/v1/models")
        assert (await say(gateway, "Hi.", max_tokens=-1)).status_code == 400
        after = await wake(gateway)
    assert after["idle_seconds"] > before["idle_seconds"]


async def test_pods_that_are_lost_are_waited_for(tmp_path: Path) -> None:
    """A pod that ends while the service goes to sleep costs no request."""
    config = settings_file(tmp_path, 60.0)
    async with started(Role.DECODE, (E, P, D)) as first:
        settings = gateway_settings([first], config=config, patience_seconds=0.0)
        async with serving(settings) as gateway:
            assert (await say(gateway, "Only text.")).status_code == 200
            gateway.context.registry.apply([])
            held = asyncio.create_task(say(gateway, "Only text."))
            await until_waiting(gateway, 1)
            async with started(*COLOCATED[0]) as second:
                gateway.context.registry.apply(static_pods([second.address]))
                assert (await held).status_code == 200
