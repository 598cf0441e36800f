"""Images by URL: no forbidden address is dialled, and no server costs more than the limits."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web
from confined import confined, refused
from worker.gateway import fetch_attacks

from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.api.parts import ImagePart
from vlm_worker.gateway.config import ConfigWatcher
from vlm_worker.gateway.fetching import fetcher as module
from vlm_worker.gateway.fetching.fetcher import ImageFetcher
from vlm_worker.gateway.fetching.urls import (
    Media,
    NotAllowedError,
    check_address,
    check_url,
    is_allowed,
    problem_of,
)
from vlm_worker.gateway.memory import FullError, MemoryBudget

HERE = Path(__file__).parent
LOOPBACK = Media(
    allowed_domains=["images.example"], allow_http=True, allowed_networks=["127.0.0.0/8"]
)
TWO_ADDRESSES = {"dns, before a public one", "dns, after a public one", "rebinding"}


def test_no_attack_reaches_an_address_that_is_not_public() -> None:
    if problem := refused(addresses=fetch_attacks.ADDRESSES):
        pytest.skip(f"this machine allows no network namespace: {problem}")
    script = str(HERE / "fetch_attacks.py")
    command = confined(sys.executable, script, addresses=fetch_attacks.ADDRESSES)
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["tries"] >= 500
    assert len(said["open"]) >= 40, "the canaries can be reached"
    assert set(said["reached"]) == {fetch_attacks.PUBLIC}
    for kind, outcomes in said["outcomes"].items():
        allowed = {"fetched"} if kind in TWO_ADDRESSES else set()
        assert set(outcomes) <= {"400 image_url_not_allowed", "400 image_fetch_failed", *allowed}
    assert set(said["outcomes"]["dns, twice"]) == {"400 image_url_not_allowed"}


@pytest.mark.parametrize("address", fetch_attacks.FORBIDDEN)
def test_special_addresses_are_refused_unless_their_network_is_allowed(address: str) -> None:
    with pytest.raises(NotAllowedError, match="not public"):
        check_address(address, ())
    check_address(address, (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0")))


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "::ffff:8.8.8.8", "64:ff9b::808:808", "2606:4700::1111", "172.32.0.1"]
)
def test_public_addresses_are_dialled(address: str) -> None:
    check_address(address, ())


@pytest.mark.parametrize(
    ("host", "domains", "allowed"),
    [
        ("images.example", ["images.example"], True),
        ("IMAGES.example", ["Images.Example"], True),
        ("a.images.example", ["images.example"], False),
        ("a.images.example", ["*.images.example"], True),
        ("images.example", ["*.images.example"], False),
        ("evilimages.example", ["*.images.example"], False),
        ("images.example.evil", ["images.example", "*.images.example"], False),
        ("images.example.", ["images.example"], False),
        ("images.example", [], False),
    ],
)
def test_a_host_is_allowed_by_its_whole_name(
    host: str, domains: list[str], *, allowed: bool
) -> None:
    assert is_allowed(host, domains) is allowed


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://images.example/a b", "printable ASCII"),
        ("https://images.example/" + "a" * 8200, "8192"),
        ("https://other.example/", "gateway.media.allowedDomains"),
        ("https://images.example:444/", "port must be that of https, 443"),
        ("https://u@images.example/", "no user"),
        ("https://:p@images.example/", "no user"),
        ("https://images.example:x/", "malformed"),
        ("https://[::1/", "malformed"),
        ("https:///a.png", "https:// and a host"),
        ("http://images.example/", "https only"),
    ],
)
def test_a_url_that_is_not_allowed_says_why(url: str, says: str) -> None:
    with pytest.raises(NotAllowedError, match=says):
        check_url(url, Media(allowed_domains=["images.example"]))


def test_wrong_settings_name_their_field() -> None:
    assert problem_of(Media()) == ""
    assert "media.allowed_networks" in problem_of(Media(allowed_networks=["10.0.0.1/40"]))
    assert "media.max_redirects: 4" in problem_of(Media(max_redirects=4))


@pytest.mark.parametrize("network", ["10.0.0.0/33", "300.1.2.3/8", "images.example/8"])
def test_an_impossible_network_leaves_the_last_settings_and_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, network: str
) -> None:
    path = tmp_path / "gateway.json"
    path.write_text('{"media": {"max_redirects": 1, "allowed_networks": ["10.1.2.3/8"]}}')
    watcher = ConfigWatcher(path, None, images_per_request=4)
    first = watcher.now
    assert (first.config.media.max_redirects, watcher.problem) == (1, "")
    path.write_text(json.dumps({"media": {"allowed_networks": [network]}}))
    watcher.reload()
    watcher.reload()
    assert watcher.now == first
    assert watcher.problem.startswith(f"gateway.json: media.allowed_networks: '{network}' ")
    (warning,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert warning.getMessage() == "the last good settings stay"
    assert warning.__dict__["reason"] == watcher.problem
    assert ConfigWatcher(path, None, images_per_request=4).now.config.media == Media()
    assert caplog.records[-1].getMessage() == "the default settings stay"


class ToPort(aiohttp.abc.AbstractResolver):
    """A DNS that sends every name to a port of this machine."""

    def __init__(self, port: int) -> None:
        self.port = port

    async def resolve(
        self, host: str, port: int = 0, family: int = 0
    ) -> list[aiohttp.abc.ResolveResult]:
        return [
            aiohttp.abc.ResolveResult(
                hostname=host, host="127.0.0.1", port=self.port, family=2, proto=6, flags=4
            )
        ]

    async def close(self) -> None:
        """Nothing is open."""


Handler = Callable[[web.Request], object]


@contextlib.asynccontextmanager
async def serving(
    *handlers: Handler, tls: ssl.SSLContext | None = None, trust: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[ImageFetcher, list[str]]]:
    """A fetcher that finds a server with paths /0, /1, ... at every name; and its outcomes."""
    app = web.Application()
    for number, handler in enumerate(handlers):
        app.router.add_get(f"/{number}", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    port = runner.addresses[0][1]
    ends: list[str] = []
    fetcher = ImageFetcher(
        lambda outcome, _: ends.append(outcome), resolver=ToPort(port), context=trust
    )
    try:
        yield fetcher, ends
    finally:
        await fetcher.close()
        await runner.cleanup()


def parts(*urls: str) -> list[ImagePart]:
    return [ImagePart(url, "auto", f"messages[0].content[{i}]") for i, url in enumerate(urls)]


async def failure(fetcher: ImageFetcher, url: str, media: Media = LOOPBACK) -> ApiError:
    with pytest.raises(ApiError) as found:
        await fetcher.fetch(parts(url), media, tenant="t", max_bytes=1000, hold=int)
    assert found.value.status == 400
    assert (found.value.param or "").startswith("messages[0].content[0]")
    return found.value


async def body(request: web.Request) -> web.Response:
    assert request.headers["Accept-Encoding"] == "identity"
    assert "Cookie" not in request.headers
    return web.Response(body=b"x" * 1000, headers={"Set-Cookie": "a=b"})


async def test_images_keep_their_positions_and_are_counted_before_they_are_kept() -> None:
    async with serving(body, body) as (fetcher, ends):
        held: list[int] = []
        urls = ("http://images.example/0", "data:image/png;base64,", "http://images.example/1")
        found = await fetcher.fetch(
            parts(*urls), LOOPBACK, tenant="t", max_bytes=1000, hold=held.append
        )
        assert {index: len(data) for index, data in found.items()} == {0: 1000, 2: 1000}
        assert sum(held) == 2000
        assert ends == ["ok", "ok"]


async def test_one_url_that_is_not_allowed_stops_all_fetches() -> None:
    asked = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(request.path)
        return await body(request)

    async with serving(handler) as (fetcher, _):
        with pytest.raises(ApiError) as found:
            await fetcher.fetch(
                parts("http://images.example/0", "http://other.example/0"),
                LOOPBACK,
                tenant="t",
                max_bytes=1000,
                hold=int,
            )
        assert found.value.param == "messages[0].content[1].url"
        assert asked == []


async def test_an_address_outside_the_allowed_networks_is_not_dialled() -> None:
    async with serving(body) as (fetcher, ends):
        media = Media(allowed_domains=["images.example"], allow_http=True)
        error = await failure(fetcher, "http://images.example/0", media)
        assert error.code == "image_url_not_allowed"
        assert ends == ["not_allowed"]


async def test_a_server_that_sends_too_much_is_cut_off() -> None:
    ended = asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        try:
            while True:
                await reply.write(b"x" * 100)
        finally:
            ended.set()

    async def announced(request: web.Request) -> web.Response:
        return web.Response(body=b"x" * 1001)

    async with serving(endless, announced) as (fetcher, ends):
        for path in ("0", "1"):
            error = await failure(fetcher, f"http://images.example/{path}")
            assert error.code == "image_too_large"
            assert "more than 1000 bytes" in error.message
        assert ends == ["too_large", "too_large"]
        async with asyncio.timeout(10):
            await ended.wait()


async def test_a_slow_server_costs_no_more_than_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_SECONDS", 0.2)
    monkeypatch.setattr(module, "TOTAL_SECONDS", 0.6)
    left = asyncio.Event()

    async def silent(_: web.Request) -> web.Response:
        await left.wait()
        return web.Response()

    async def dripping(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        with contextlib.suppress(ConnectionError):
            while not left.is_set():
                await reply.write(b"x")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(left.wait(), 0.05)
        return reply

    async with serving(silent, dripping) as (fetcher, ends):
        for path in ("0", "1"):
            error = await failure(fetcher, f"http://images.example/{path}")
            assert error.code == "image_fetch_failed"
            assert "0.6 s in all" in error.message
        left.set()
        assert ends == ["timeout", "timeout"]


async def test_a_server_that_breaks_its_word_is_an_error() -> None:
    async def short(request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Length": "100"})
        await reply.prepare(request)
        await reply.write(b"x" * 50)
        assert request.transport is not None
        request.transport.close()
        return reply

    async def packed(_: web.Request) -> web.Response:
        return web.Response(body=b"x", headers={"Content-Encoding": "gzip"})

    async def missing(_: web.Request) -> web.Response:
        return web.Response(status=404)

    async with serving(short, packed, missing) as (fetcher, ends):
        says = ("broke off", "compresses", "answers 404")
        for path, text in enumerate(says):
            error = await failure(fetcher, f"http://images.example/{path}")
            assert error.code == "image_fetch_failed"
            assert text in error.message
        assert ends == ["failed"] * 3


async def test_redirects_are_followed_only_as_far_as_allowed() -> None:
    async def to_next(request: web.Request) -> web.Response:
        number = int(request.path[1:])
        return web.Response(status=302, headers={"Location": f"/{number + 1}"})

    async def away(_: web.Request) -> web.Response:
        return web.Response(status=302, headers={"Location": "http://other.example/3"})

    async with serving(to_next, to_next, to_next, body, away) as (fetcher, _):
        three = msgspec.structs.replace(LOOPBACK, max_redirects=3)
        two = msgspec.structs.replace(LOOPBACK, max_redirects=2)
        found = await fetcher.fetch(
            parts("http://images.example/0"), three, tenant="t", max_bytes=1000, hold=int
        )
        assert len(found[0]) == 1000
        assert "more than 2" in (await failure(fetcher, "http://images.example/0", two)).message
        assert "follows no" in (await failure(fetcher, "http://images.example/0")).message
        error = await failure(fetcher, "http://images.example/4", three)
        assert error.code == "image_url_not_allowed"


def certificate(folder: Path, host: str) -> tuple[Path, Path]:
    """A certificate of `host` that signs itself, and its key."""
    file, key = folder / "tls.crt", folder / "tls.key"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=x "
        f"-addext subjectAltName=DNS:{host} -keyout {key} -out {file}"
    )
    subprocess.run(command.split(), check=True, capture_output=True)
    return file, key


async def test_a_certificate_must_be_valid_for_the_host(tmp_path: Path) -> None:
    pem, key = certificate(tmp_path, "images.example")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pem, key)
    trust = ssl.create_default_context(cafile=str(pem))
    async with serving(body, tls=tls, trust=trust) as (fetcher, _):
        media = msgspec.structs.replace(LOOPBACK, allowed_domains=["*.example"])
        found = await fetcher.fetch(
            parts("https://images.example/0"), media, tenant="t", max_bytes=1000, hold=int
        )
        assert len(found[0]) == 1000
        error = await failure(fetcher, "https://wrong.example/0", media)
        assert "certificate" in error.message


async def test_without_memory_nothing_is_kept() -> None:
    async with serving(body) as (fetcher, ends):
        held = MemoryBudget(500).hold("t", shared=False)
        with pytest.raises(FullError):
            await fetcher.fetch(
                parts("http://images.example/0"),
                LOOPBACK,
                tenant="t",
                max_bytes=1000,
                hold=held.fetch,
            )
        assert held.num_bytes == 0
        assert ends == ["failed"] or ends == ["cancelled"]


async def test_fetches_end_with_the_request() -> None:
    asked = asyncio.Event()
    left = asyncio.Event()

    async def silent(_: web.Request) -> web.Response:
        asked.set()
        await left.wait()
        return web.Response()

    async with serving(silent) as (fetcher, ends):
        task = asyncio.ensure_future(
            fetcher.fetch(
                parts("http://images.example/0"), LOOPBACK, tenant="t", max_bytes=1000, hold=int
            )
        )
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        left.set()
        assert ends == ["cancelled"]
