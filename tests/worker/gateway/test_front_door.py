"""Who gets in: keys, and HTTP as nobody should speak it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import openai
import pytest
from worker.gateway.image_files import ask
from worker.gateway.stack import P_D, gateway_settings, serving, stack

from vlm_worker.gateway import gateway_server

TEXT = {"model": "shapes", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def api(url: str, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


async def get(url: str, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.get(url, headers=headers)


async def raw(url: str, line: str, body: str = "", **headers: str) -> bytes:
    """What comes back on a connection of its own; nothing is tidied up on the way."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    fields = {"host": "x", "connection": "close", **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    writer.write(f"{line}\r\n{head}\r\n{body}".encode())
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    return answer


async def until(ask_again: Callable[[], Awaitable[httpx.Response]], *, status: int) -> None:
    async with asyncio.timeout(60):
        while (await ask_again()).status_code != status:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


# ---- keys ----------------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    directory = tmp_path / "keys"
    directory.mkdir()
    (directory / "alice").write_text("alice-key\n")
    (directory / "..data").mkdir()
    return directory


PATHS = ["/v1/models", "/v1/models/shapes", "/metrics", "/nothing", "//v1/models", "/healthz/",
         "/healthz%2f..%2fv1/models", "/v1/../healthz", "/",
         "http://x/v1/models", "/v1/models?/healthz"]  # fmt: skip
WRONG = [
    pytest.param({}, id="no key"),
    pytest.param({"authorization": "Bearer wrong"}, id="a wrong key"),
    pytest.param({"authorization": "Bearer "}, id="an empty key"),
    pytest.param({"authorization": "alice-key"}, id="no scheme"),
    pytest.param({"authorization": "Basic alice-key"}, id="another scheme"),
    pytest.param({"authorization": "Bearer alice-key2"}, id="a key and more"),
    pytest.param({"host": "a/?x=", "x-forwarded-path": "/healthz"}, id="a weird host"),
]


@pytest.mark.parametrize("headers", WRONG)
async def test_every_path_but_health_needs_a_key(keys: Path, headers: dict[str, str]) -> None:
    async with serving(gateway_settings([], api_keys_dir=keys)) as gateway:
        for path in PATHS:
            answer = await raw(gateway.url, f"GET {path} HTTP/1.1", **headers)
            assert b" 401 " in answer.splitlines()[0], path
            assert b'"invalid_api_key"' in answer
        answer = await raw(gateway.url, "POST /v1/chat/completions HTTP/1.1", **headers)
        assert b" 401 " in answer.splitlines()[0]
        assert (await get(f"{gateway.url}/healthz")).status_code == 200
        for path in ("/readyz", "/health"):
            assert (await get(f"{gateway.url}{path}")).status_code == 503
        models = await get(f"{gateway.url}/v1/models", authorization="bearer alice-key")
        assert models.status_code == 200


async def test_keys_come_and_go_while_it_runs(keys: Path) -> None:
    async with serving(gateway_settings([], api_keys_dir=keys)) as gateway:
        bob = {"authorization": "Bearer bob-key"}
        assert (await get(f"{gateway.url}/v1/models", **bob)).status_code == 401
        (keys / "bob").write_text("bob-key")
        (keys / "alice").unlink()
        await until(lambda: get(f"{gateway.url}/v1/models", **bob), status=200)
        alice = {"authorization": "Bearer alice-key"}
        assert (await get(f"{gateway.url}/v1/models", **alice)).status_code == 401


async def test_without_readable_keys_no_client_is_authorised(tmp_path: Path) -> None:
    settings = gateway_settings([], api_keys_dir=tmp_path / "missing")
    async with serving(settings) as gateway:
        answer = await raw(gateway.url, "GET /v1/models HTTP/1.1", authorization="Bearer ")
        assert b" 401 " in answer.splitlines()[0]


async def test_tenants_share_no_prefix(keys: Path) -> None:
    (keys / "bob").write_text("bob-key")
    messages = [ask("the same long beginning of a prompt that fills several blocks")]
    cached = []
    async with stack(*P_D, api_keys_dir=keys) as served:
        for key in ("alice-key", "bob-key", "alice-key"):
            async with api(served.url, key) as client:
                answer = await client.chat.completions.create(
                    model="shapes", messages=messages, max_tokens=2
                )
            cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == cached[1] == 0
    assert cached[2] > 0


# ---- HTTP as nobody should speak it --------------------------------------------------------------

BODY = json.dumps(TEXT)


@pytest.mark.parametrize(
    ("line", "headers", "body", "status"),
    [
        pytest.param(
            "POST /v1/chat/completions HTTP/1.1",
            {"content-length": "5", "transfer-encoding": "chunked"},
            "0\r\n\r\nGET /x HTTP/1.1\r\n\r\n",
            b"400",
            id="two lengths",
        ),
        pytest.param("nonsense", {}, "", b"400", id="nonsense"),
        pytest.param(
            "GET /healthz HTTP/1.1", {"x": "y" * 100_000}, "", b"400", id="100 KB of header"
        ),
        pytest.param("GET http://evil/healthz HTTP/1.1", {}, "", b"200", id="an absolute form"),
        pytest.param("GET /healthz HTTP/1.0", {}, "", b"200", id="HTTP 1.0"),
        pytest.param(
            "POST /v1/chat/completions HTTP/1.1",
            {"content-type": "application/json", "content-length": "99999999999"},
            "",
            b"413",
            id="an endless body",
        ),
        pytest.param(
            "POST /v1/chat/completions HTTP/1.1",
            {
                "content-type": "application/json",
                "content-length": str(len(BODY)),
                "expect": "100-continue",
            },
            BODY,
            b"100",
            id="100-continue",
        ),
    ],
)
async def test_odd_requests_are_answered(
    line: str, headers: dict[str, str], body: str, status: bytes
) -> None:
    async with serving(gateway_settings([])) as gateway:
        answer = await raw(gateway.url, line, body, **headers)
        assert answer.split()[1] == status
        assert (await get(f"{gateway.url}/healthz")).status_code == 200


OFFER = {
    "connection": "upgrade, http2-settings",
    "upgrade": "h2c",
    "http2-settings": "AAMAAABkAARAAAAAAAIAAAAA",
}
"""As Java's client and `curl --http2` make to whoever has no TLS."""


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("apart", [False, True], ids=["at once", "byte by byte"])
async def test_an_offer_to_upgrade_is_declined_and_its_request_served(
    chunked: bool, apart: bool
) -> None:
    framing = {"transfer-encoding": "chunked"} if chunked else {"content-length": f"{len(BODY)}"}
    body = f"{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n" if chunked else BODY
    fields = {"host": "x", "content-type": "application/json", **OFFER, **framing}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    with_body = f"POST /v1/chat/completions HTTP/1.1\r\n{head}\r\n{body}"
    without = f"GET /v1/models HTTP/1.1\r\nhost: x\r\n{offer_lines()}\r\n"
    last = "GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    said = (without + with_body + without + last).encode()
    async with stack(*P_D) as served:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for piece in [bytes([byte]) for byte in said] if apart else [said]:
            writer.write(piece)
            await asyncio.sleep(0)
        async with asyncio.timeout(30):
            answer = await reader.read()
        writer.close()
    assert answer.count(b"HTTP/1.1 200") == 4, answer
    assert answer.count(b'"finish_reason":') == 1
    assert answer.endswith(b"ok\n")


def offer_lines() -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in OFFER.items())


async def test_headers_that_do_not_come_end_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_server, "HEADER_SECONDS", 0.2)
    async with serving(gateway_settings([])) as gateway:
        assert await raw(gateway.url, "GET /healthz HTTP/1.1\r\nx: ", "") != b""
        host, port = gateway.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\nx: ")
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()


async def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vlm_worker.gateway.body.BODY_SILENCE_SECONDS", 0.2)
    headers = {"content-type": "application/json", "content-length": "50"}
    async with serving(gateway_settings([])) as gateway:
        answer = await raw(gateway.url, "POST /v1/chat/completions HTTP/1.1", "{", **headers)
    assert b" 408 " in answer.splitlines()[0]


async def test_a_request_beyond_the_limit_is_refused_before_its_body_is_read() -> None:
    headers = {"content-type": "application/json", "content-length": "50"}
    async with serving(gateway_settings([], max_waiting=0)) as gateway:
        answer = await raw(gateway.url, "POST /v1/chat/completions HTTP/1.1", "{", **headers)
    assert b" 429 " in answer.splitlines()[0]
    assert b"retry-after: " in answer
