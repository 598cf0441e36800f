"""Pods come from the API server, and a bad day of its own does not take them away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import certifi
import pytest
from aiohttp import web
from worker.gateway.api_server import COMPAT, REPLICA_SET, ApiServer, pod

from vlm_worker.gateway import discovery
from vlm_worker.gateway.discovery import KEEP_SECONDS, DiscoveryError, KnownPod, PodWatch, known_pod


class Seen:
    """What the watch told last."""

    def __init__(self) -> None:
        self.pods: dict[str, KnownPod] = {}
        self.now = 0.0
        self.problems: list[str] = []
        self.gateways: list[int] = []
        self._changed = asyncio.Event()

    def __call__(self, pods: Sequence[KnownPod]) -> None:
        self.pods = {pod.name: pod for pod in pods}
        self._changed.set()

    async def until(self, condition: Callable[[dict[str, KnownPod]], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition(self.pods):
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    async with ApiServer() as server:
        yield server


@contextlib.asynccontextmanager
async def watching(api: ApiServer, **options: object) -> AsyncIterator[Seen]:
    seen = Seen()
    server = discovery.ApiServer(api.url, options.get("token"))  # type: ignore[arg-type]
    watch = PodWatch(
        server,
        namespace="ns",
        service="demo",
        compat=COMPAT,
        on_pods=seen,
        on_problem=seen.problems.append,
        on_gateways=seen.gateways.append,
        clock=lambda: seen.now,
    )
    task = asyncio.create_task(watch.run())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_denied_list_is_told_until_it_is_allowed(api: ApiServer) -> None:
    await api.put(pod("a"))
    api.refuse = [403]
    async with watching(api) as seen:
        await seen.until(lambda pods: set(pods) == {"a"})
    assert seen.problems[0].startswith("the API server denies the list of pods: 403")
    assert seen.problems[1] == "", "allowed again"


async def test_pods_come_change_and_go(api: ApiServer) -> None:
    await api.put(pod("a"))
    async with watching(api) as seen:
        await seen.until(lambda pods: set(pods) == {"a"})
        assert seen.pods["a"] == KnownPod("a", "127.0.0.5:9000")
        await api.put(pod("b", ready="False"))
        await seen.until(lambda pods: "b" in pods and not pods["b"].ready)
        await api.put(pod("b"))
        await seen.until(lambda pods: pods["b"].ready)
        await api.put(pod("b", accepting="False"))
        await seen.until(lambda pods: not pods["b"].accepting)
        await api.delete("a")
        await seen.until(lambda pods: set(pods) == {"b"})
    assert api.requests[0] == {"labelSelector": "triptych.dev/service=demo"}
    assert len(api.requests) == 2


async def test_the_gateways_that_are_ready_are_counted(api: ApiServer) -> None:
    def gateway(name: str, ready: str = "True", **more: object) -> dict[str, Any]:
        made = pod(name, role="gateway", compat="other", **more)  # type: ignore[arg-type]
        made["status"]["conditions"].append({"type": "Ready", "status": ready})
        return made

    await api.put(pod("a"))
    await api.put(gateway("g1"))
    async with watching(api) as seen:
        await seen.until(lambda pods: set(pods) == {"a"})
        for made, count in (
            (gateway("g2", "False"), 1),
            (gateway("g2"), 2),
            (gateway("by-hand", owner=None), 2),
            (gateway("g1", deleted=True), 1),
            (gateway("g1", "False"), 1),
        ):
            seen.gateways.clear()
            await api.put(made)
            async with asyncio.timeout(60):
                while not seen.gateways:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            assert seen.gateways[-1] == count, made
        assert set(seen.pods) == {"a"}, "a gateway is no worker"
        await api.delete("g2")
        async with asyncio.timeout(60):
            while seen.gateways[-1]:  # noqa: ASYNC110
                await asyncio.sleep(0)


async def test_a_watch_that_ends_goes_on_where_it_was(api: ApiServer) -> None:
    async with watching(api) as seen:
        await api.until(lambda: len(api.requests) == 2)
        await api.put(pod("a"))
        await seen.until(lambda pods: "a" in pods)
        await api.cut()
        await api.put(pod("b"))
        await seen.until(lambda pods: set(pods) == {"a", "b"})
    assert sum("watch" not in request for request in api.requests) == 1


@pytest.mark.parametrize(
    "last",
    [
        pytest.param(b'{"type":"ERROR","object":{"code":500}}\n', id="an error event"),
        pytest.param(b"no json\n", id="no JSON"),
        pytest.param(b'{"type":"MODIFIED","object":{"metadata":{}}}\n', id="no version"),
        pytest.param(b'{"type":"MODIF', id="cut inside an event"),
    ],
)
async def test_a_watch_that_ends_oddly_is_taken_up_again(api: ApiServer, last: bytes) -> None:
    await api.put(pod("a"))
    async with watching(api) as seen:
        await seen.until(lambda pods: "a" in pods)
        await api.cut(last)
        await api.put(pod("b"))
        await seen.until(lambda pods: set(pods) == {"a", "b"})


async def test_a_version_that_is_gone_is_listed_anew(api: ApiServer) -> None:
    await api.put(pod("a"))
    async with watching(api) as seen:
        await seen.until(lambda pods: "a" in pods)
        await api.delete("a")
        await seen.until(lambda pods: not pods)
        await api.put(pod("b"))
        await seen.until(lambda pods: "b" in pods)
        await api.compact()
        await api.cut()
        await api.put(pod("c"))
        await seen.until(lambda pods: set(pods) == {"b", "c"})
    assert sum("watch" not in request for request in api.requests) == 2


async def test_the_last_good_pods_stay_for_a_minute_without_news(api: ApiServer) -> None:
    await api.put(pod("a"))
    async with watching(api) as seen:
        await seen.until(lambda pods: "a" in pods)
        api.refuse = [500, 503]
        await api.cut()
        await api.until(lambda: len(api.refuse) < 2)
        seen.now = KEEP_SECONDS - 1
        assert "a" in seen.pods
        api.refuse = [500] * 8
        seen.now = KEEP_SECONDS + 1
        await seen.until(lambda pods: not pods)
        api.refuse = []
        await seen.until(lambda pods: "a" in pods)


async def test_the_token_is_read_anew_for_every_request(api: ApiServer, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("one\n")
    await api.put(pod("a"))
    async with watching(api, token=token) as seen:
        await seen.until(lambda pods: "a" in pods)
        token.write_text("two\n")
        await api.cut()
        await api.put(pod("b"))
        await seen.until(lambda pods: "b" in pods)
    assert api.tokens[0] == "Bearer one"
    assert api.tokens[-1] == "Bearer two"


async def test_outside_of_a_cluster_it_says_what_to_do() -> None:
    with pytest.raises(DiscoveryError, match="--worker"):
        discovery.ApiServer.in_cluster("")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param(pod("a", role="gateway"), None, id="a gateway"),
        pytest.param(pod("a", ip=None), None, id="no address yet"),
        pytest.param(pod("a", ip="fd00::1"), KnownPod("a", "[fd00::1]:9000"), id="IPv6"),
        pytest.param(
            pod("a", deleted=True), KnownPod("a", "127.0.0.5:9000", accepting=False), id="deleted"
        ),
        pytest.param(
            pod("a", accepting="False"),
            KnownPod("a", "127.0.0.5:9000", accepting=False),
            id="the gate is False",
        ),
        pytest.param(pod("a", accepting="True"), KnownPod("a", "127.0.0.5:9000"), id="gate True"),
        pytest.param(
            pod("a", ready="Unknown"), KnownPod("a", "127.0.0.5:9000", ready=False), id="unknown"
        ),
        pytest.param(pod("a"), KnownPod("a", "127.0.0.5:9000"), id="a worker"),
        pytest.param(pod("a", compat="x"), None, id="another compat set"),
        pytest.param(pod("a", compat=None), None, id="no compat label"),
        pytest.param(pod("a", compat=""), None, id="an empty compat label"),
        pytest.param(pod("a", owner=None), None, id="made by hand"),
        pytest.param(
            pod("a", owner={**REPLICA_SET, "controller": False}), None, id="owned, not controlled"
        ),
        pytest.param(pod("a", owner={**REPLICA_SET, "kind": "Job"}), None, id="of a Job"),
        pytest.param(
            pod("a", owner={**REPLICA_SET, "apiVersion": "x.dev/v1"}), None, id="of another API"
        ),
        pytest.param({}, None, id="nothing"),
        pytest.param({"metadata": [], "status": 5}, None, id="nonsense"),
    ],
)
def test_a_pod_is_read_as_what_it_may_do(
    value: dict[str, object], expected: KnownPod | None
) -> None:
    assert known_pod(value, compat=COMPAT) == expected


class Closing(ApiServer):
    """Ends every watch at once, without an event."""

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        return response


async def test_a_watch_that_ends_at_once_is_taken_up_less_and_less_often() -> None:
    delays: list[float] = []
    enough = asyncio.Event()

    async def sleep(seconds: float) -> None:
        delays.append(seconds)
        if len(delays) == 12:
            enough.set()
            await asyncio.get_running_loop().create_future()

    async with Closing() as api:
        server = discovery.ApiServer(api.url)
        watch = PodWatch(
            server, namespace="ns", service="demo", compat=COMPAT, on_pods=Seen(), sleep=sleep
        )
        task = asyncio.create_task(watch.run())
        async with asyncio.timeout(60):
            await enough.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert sum("watch" in request for request in api.requests) == len(delays)
    assert all(delay >= discovery.FIRST_DELAY_SECONDS / 2 for delay in delays)
    assert all(delay >= discovery.MAX_DELAY_SECONDS / 2 for delay in delays[6:])
    assert len(set(delays[6:])) > 1, "gateways do not come back together"


def test_trust_is_made_once_for_each_certificate(tmp_path: Path) -> None:
    ours = Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----")
    first = tmp_path / "ca.crt"
    first.write_text("".join(ours[:2]))
    server = discovery.ApiServer("", ca_file=first)
    made = server.tls
    assert made is server.tls
    first.write_text("".join(ours))
    assert server.tls is not made
    assert discovery.ApiServer("").tls is True
