"""Requests that name images by URL, from the client through real workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from worker.gateway.image_files import data_url, png
from worker.gateway.stack import COLOCATED, Stack, stack
from worker.gateway.test_image_fetcher import ToPort

from vlm_worker.gateway.fetching.fetcher import ImageFetcher

MEDIA = {"allowed_domains": ["*.example"], "allow_http": True, "allowed_networks": ["127.0.0.0/8"]}


class Images:
    """A server of images: `/image.png`, `/text`, and `/never`, which does not answer."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.closed = asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.set()
        if request.path == "/never":
            try:
                await asyncio.Event().wait()
            finally:
                self.closed.set()
        return web.Response(body=png() if request.path == "/image.png" else b"no image")


@pytest.fixture
async def images() -> AsyncIterator[tuple[Images, int]]:
    handler = Images()
    runner = web.AppRunner(
        app := web.Application(), shutdown_timeout=0.1, handler_cancellation=True
    )
    app.router.add_get("/{path}", handler.answer)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield handler, runner.addresses[0][1]
    await runner.cleanup()


@pytest.fixture
async def served(tmp_path: Path, images: tuple[Images, int]) -> AsyncIterator[Stack]:
    config = tmp_path / "gateway.json"
    config.write_text(json.dumps({"media": MEDIA, "limits": {"images_per_request": 8}}))
    async with stack(*COLOCATED, config=config) as one:
        context = one.gateway.context
        fetcher = ImageFetcher(context.meters.fetched, resolver=ToPort(images[1]))
        object.__setattr__(context.preparer, "fetcher", fetcher)
        yield one
        await fetcher.close()


async def post(served: Stack, *urls: str, timeout: float = 60.0) -> httpx.Response:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What is this?"}]
    parts += [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {"model": "shapes", "max_tokens": 8, "messages": [{"role": "user", "content": parts}]}
    async with httpx.AsyncClient() as client:
        url = f"{served.url}/v1/chat/completions"
        return await client.post(url, json=body, timeout=timeout)


async def test_an_image_by_url_has_the_answer_of_its_data_url(served: Stack) -> None:
    by_url = (await post(served, "http://a.example/image.png")).json()
    by_data = (await post(served, data_url(png()))).json()
    assert by_url["choices"] == by_data["choices"]
    assert by_url["usage"]["prompt_tokens"] == by_data["usage"]["prompt_tokens"]
    assert by_data["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_both_kinds_keep_their_order(served: Stack) -> None:
    url, data = "http://a.example/image.png", data_url(png(size=(56, 56)))
    mixed = (await post(served, data, url, data)).json()
    plain = (await post(served, data, data_url(png()), data)).json()
    assert mixed["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("http://a.example/text", "unsupported_image_format"),
        ("http://other.test/image.png", "image_url_not_allowed"),
        ("ftp://a.example/image.png", "invalid_image_url"),
    ],
)
async def test_what_is_no_image_is_a_400_with_its_path(served: Stack, url: str, code: str) -> None:
    reply = await post(served, "http://a.example/image.png", url)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, code)
    assert error["param"].startswith("messages[0].content[2].image_url")


async def test_a_client_that_leaves_ends_its_fetch(
    served: Stack, images: tuple[Images, int]
) -> None:
    sent = asyncio.ensure_future(post(served, "http://a.example/never"))
    async with asyncio.timeout(10):
        await images[0].asked.wait()
        sent.cancel()
        await images[0].closed.wait()
        await served.gateway.context.idle.wait()
    assert served.gateway.context.memory.used_in_all == 0
    assert served.gateway.context.meters.fetches["cancelled"] == 1


async def test_a_request_that_fetches_does_not_count_as_waiting_for_a_worker(
    served: Stack, images: tuple[Images, int]
) -> None:
    limit = served.gateway.context.retry_policy.request_limit
    sent = asyncio.ensure_future(post(served, "http://a.example/never"))
    async with asyncio.timeout(10):
        await images[0].asked.wait()
        assert limit.num_waiting == 0
        sent.cancel()
        await images[0].closed.wait()
        await served.gateway.context.idle.wait()
