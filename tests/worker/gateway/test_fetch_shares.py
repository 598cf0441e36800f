"""Slow image servers and slow DNS: they delay their tenant, and no other work of the gateway."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from worker.gateway.test_image_fetcher import LOOPBACK, ToPort, parts

from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.fetching import fetcher as fetching
from vlm_worker.gateway.fetching import resolver as resolving
from vlm_worker.gateway.fetching.fetcher import ImageFetcher
from vlm_worker.gateway.fetching.resolver import LOOKUPS, TENANT, ThreadResolver
from vlm_worker.gateway.memory import Bound, FullError


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110  the state of threads and servers
            await asyncio.sleep(0.001)


class Dns:
    """`getaddrinfo` whose answers for names below `hang.example` wait until the end of the test."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.end = threading.Event()

    def __call__(self, host: str, port: int, **_: Any) -> Any:
        self.num_asked += 1
        if host.endswith("hang.example"):
            assert self.end.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("192.0.2.1", port))]


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dns]:
    made = Dns()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    yield made
    made.end.set()


MEDIA = type(LOOPBACK)(allowed_domains=["*.hang.example"], allow_http=True)


async def fetch(fetcher: ImageFetcher, url: str, tenant: str = "a", media: Any = MEDIA) -> Any:
    return await fetcher.fetch(parts(url), media, tenant=tenant, max_bytes=1000, hold=int)


async def test_look_ups_that_hang_delay_no_other_user_of_threads(dns: Dns) -> None:
    loop = asyncio.get_running_loop()
    with concurrent.futures.ThreadPoolExecutor(4) as default:
        loop.set_default_executor(default)
        fetcher = ImageFetcher()
        hanging = [
            asyncio.create_task(fetch(fetcher, f"http://{number}.hang.example/"))
            for number in range(12)
        ]
        await until(lambda: dns.num_asked >= 4)
        assert await asyncio.wait_for(asyncio.to_thread(sum, [1, 2]), 10) == 3
        dns.end.set()
        ends = await asyncio.gather(*hanging, return_exceptions=True)
        await fetcher.close()
    assert {str(one) for one in ends if isinstance(one, ApiError)} == {
        "The image could not be fetched: its host has no address. Send a data: URL, or try again."
    }


async def test_a_look_up_has_a_limit_of_time_and_its_thread_counts_until_it_ends(
    dns: Dns, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (resolving, fetching):
        monkeypatch.setattr(module, "RESOLVE_SECONDS", 0.05)
    outcomes: list[str] = []
    fetcher = ImageFetcher(lambda outcome, _: outcomes.append(outcome))
    with pytest.raises(ApiError, match=r"its host takes more than 0\.05 s to resolve") as failed:
        await fetch(fetcher, "http://a.hang.example/")
    assert (failed.value.code, outcomes) == ("image_fetch_failed", ["timeout"])
    resolver = fetcher._resolver
    assert isinstance(resolver, ThreadResolver)
    assert resolver._slots.num_free == LOOKUPS - 1
    dns.end.set()
    await until(lambda: resolver._slots.num_free == LOOKUPS)
    await fetcher.close()


async def test_hanging_look_ups_of_a_tenant_leave_threads_to_others(dns: Dns) -> None:
    resolver = ThreadResolver(lambda: True)

    async def resolve(tenant: str, host: str) -> Any:
        TENANT.set(tenant)
        return await resolver.resolve(host, 80)

    hanging = [asyncio.create_task(resolve("a", f"{i}.hang.example")) for i in range(LOOKUPS)]
    await until(lambda: dns.num_asked == LOOKUPS // 2)
    async with asyncio.timeout(10):
        (found,) = await asyncio.create_task(resolve("b", "images.example"))
    assert (found["host"], found["port"]) == ("192.0.2.1", 80)
    dns.end.set()
    ends = await asyncio.gather(*hanging, return_exceptions=True)
    assert {type(one) for one in ends} == {socket.gaierror}
    await resolver.close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNSPEC])
async def test_hosts_have_the_addresses_that_aiohttp_finds(family: socket.AddressFamily) -> None:
    resolver = ThreadResolver(lambda: False)
    theirs = aiohttp.ThreadedResolver()
    assert await resolver.resolve("localhost", 80, family) == await theirs.resolve(
        "localhost", 80, family
    )
    await resolver.close()


class Slow:
    """An image server whose `/slow` answers at the end of the test, and `/fast` at once."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.end = asyncio.Event()

    async def slow(self, _: web.Request) -> web.Response:
        self.num_asked += 1
        await self.end.wait()
        return web.Response(body=b"slow")

    async def fast(self, _: web.Request) -> web.Response:
        return web.Response(body=b"fast")


@contextlib.asynccontextmanager
async def serving(*, is_shared: bool) -> AsyncIterator[tuple[ImageFetcher, Slow]]:
    slow, app = Slow(), web.Application()
    app.router.add_get("/slow", slow.slow)
    app.router.add_get("/fast", slow.fast)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    resolver = ToPort(runner.addresses[0][1])
    fetcher = ImageFetcher(is_shared=lambda: is_shared, resolver=resolver)
    try:
        yield fetcher, slow
    finally:
        slow.end.set()
        await fetcher.close()
        await runner.cleanup()


SLOW, FAST = "http://images.example/slow", "http://images.example/fast"


async def test_slow_images_of_a_tenant_leave_half_of_the_fetches_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetching, "PER_GATEWAY", 4)
    async with serving(is_shared=True) as (fetcher, slow):
        many = [asyncio.create_task(fetch(fetcher, SLOW, "a", LOOPBACK)) for _ in range(6)]
        await until(lambda: slow.num_asked == 2 and fetcher._slots.num_waiting("a") == 4)
        async with asyncio.timeout(5):
            assert await fetch(fetcher, FAST, "b", LOOPBACK) == {0: b"fast"}
        slow.end.set()
        assert await asyncio.gather(*many) == [{0: b"slow"}] * 6


async def test_a_tenant_has_a_bound_on_fetches_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "PER_GATEWAY", 2)
    monkeypatch.setattr(fetching, "MAX_WAITING", 1)
    async with serving(is_shared=False) as (fetcher, slow):
        many = [asyncio.create_task(fetch(fetcher, SLOW, "a", LOOPBACK)) for _ in range(3)]
        await until(lambda: fetcher._slots.num_waiting("a") == 1)
        with pytest.raises(FullError, match="1 fetches of images of your requests wait") as full:
            await fetch(fetcher, FAST, "a", LOOPBACK)
        assert full.value.bound is Bound.TENANT_FETCHES
        slow.end.set()
        await asyncio.gather(*many)
