"""What clients can make a gateway hold: bytes of bodies, and connections."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
from worker.gateway.image_files import ask, png
from worker.gateway.stack import COLOCATED, gateway_settings, serving, stack

from vlm_worker.gateway.echo import LISTED_BYTES, RANKED_BYTES
from vlm_worker.gateway.gateway_server import MAX_HEADERS, MAX_PIPELINED, Gateway
from vlm_worker.gateway.memory import CONNECTION_BYTES, COPIES, Bound, Kind

MIB = 2**20
CHAT = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
WAIT = 60


async def until(condition: Callable[[], bool], what: str) -> None:

    async with asyncio.timeout(WAIT):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert condition(), what


class Connection:
    """One client that says what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def say(self, text: str | bytes) -> None:
        self.writer.write(text if isinstance(text, bytes) else text.encode())
        await self.writer.drain()

    async def status(self) -> bytes:
        async with asyncio.timeout(WAIT):
            return (await self.reader.readline()).split()[1]

    async def rest(self) -> bytes:
        """Until the other side closes."""
        async with asyncio.timeout(WAIT):
            with contextlib.suppress(ConnectionError):
                return await self.reader.read()
        return b""


@contextlib.asynccontextmanager
async def connections(gateway: Gateway, count: int) -> AsyncIterator[list[Connection]]:
    host, port = gateway.url.removeprefix("http://").split(":")
    made = [Connection(*await asyncio.open_connection(host, int(port))) for _ in range(count)]
    try:
        yield made
    finally:
        for one in made:
            one.writer.close()


def used(gateway: Gateway, kind: Kind = Kind.BODY) -> int:
    return gateway.context.memory.used(kind)


# ---- bytes ---------------------------------------------------------------------------------------


async def test_slow_uploads_hold_what_they_announced_and_no_more_than_the_budget() -> None:
    settings = gateway_settings([], memory_bytes=128 * MIB)
    async with serving(settings) as gateway, connections(gateway, 8) as clients:
        for client in clients[:4]:
            await client.say(f"{CHAT}content-length: {16 * MIB}\r\n\r\n{{")
        await until(lambda: used(gateway) == 4 * COPIES * 16 * MIB, "four are admitted")
        for client in clients[4:]:
            await client.say(f"{CHAT}content-length: {16 * MIB}\r\n\r\n{{")
            assert await client.status() == b"429"
        assert used(gateway) == 128 * MIB
        for client in clients[:4]:
            client.writer.close()
        await until(lambda: used(gateway) == 0, "all comes back")
        async with httpx.AsyncClient(base_url=gateway.admin_url) as admin:
            metrics = (await admin.get("/metrics")).text
    assert 'triptych_gateway_refused_total{bound="memory"} 4.0' in metrics
    assert "triptych_gateway_memory_limit_bytes 1.34217728e+08" in metrics


async def test_a_refusal_has_a_retry_time() -> None:
    settings = gateway_settings([], memory_bytes=MIB)
    async with serving(settings) as gateway, connections(gateway, 1) as (client,):
        await client.say(f"{CHAT}content-length: {MIB}\r\n\r\n{{")
        assert await client.status() == b"429"
        async with asyncio.timeout(WAIT):
            headers = await client.reader.readuntil(b"\r\n\r\n")
    assert b"retry-after: " in headers


async def test_a_chunked_body_is_admitted_as_it_grows() -> None:
    settings = gateway_settings([], memory_bytes=4 * MIB)
    chunk = b"%x\r\n%s\r\n" % (MIB, b" " * MIB)
    async with serving(settings) as gateway, connections(gateway, 1) as (client,):
        await client.say(f"{CHAT}transfer-encoding: chunked\r\n\r\n")
        await client.say(chunk)
        await until(lambda: used(gateway) == COPIES * MIB, "the first chunk")
        await client.say(chunk + chunk)
        assert await client.status() == b"429"
        await until(lambda: used(gateway) == 0, "it comes back")


async def test_a_tenant_holds_its_share_and_leaves_the_rest(tmp_path: Path) -> None:
    for name in ("alice", "bob"):
        (tmp_path / name).write_text(f"{name}-key")
    settings = gateway_settings([], memory_bytes=128 * MIB, api_keys_dir=tmp_path)

    def post(name: str) -> str:
        key = f"authorization: Bearer {name}-key\r\n"
        return f"{CHAT}{key}content-length: {24 * MIB}\r\n\r\n{{"

    async with serving(settings) as gateway, connections(gateway, 3) as clients:
        await clients[0].say(post("alice"))
        await until(lambda: used(gateway) > 0, "the first is admitted")
        await clients[1].say(post("alice"))
        assert await clients[1].status() == b"429"
        await clients[2].say(post("bob"))
        await until(lambda: used(gateway) == 2 * COPIES * 24 * MIB, "the other tenant is admitted")


async def test_a_running_request_holds_its_images_and_not_its_body() -> None:
    image = png(size=(224, 224))
    body = {"model": "shapes", "messages": [ask("what is this", image)], "max_tokens": 1000,
            "stream": True, "ignore_eos": True}  # fmt: skip
    async with stack(*COLOCATED) as served:
        async with (
            httpx.AsyncClient(base_url=served.url, timeout=60) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            assert answer.status_code == 200
            await anext(answer.aiter_lines())
            assert used(served.gateway, Kind.BODY) == 0
            assert used(served.gateway, Kind.PROMPT) == len(image) + len("what is this")
        await until(lambda: used(served.gateway, Kind.PROMPT) == 0, "it comes back")


async def test_a_running_request_holds_the_log_probabilities_that_it_shows() -> None:
    """Before its workers compute them, and for each choice."""
    body = {"model": "shapes", "prompt": ["two", "a red circle"], "echo": True, "n": 2,
            "temperature": 1, "logprobs": 20, "prompt_logprobs": 3, "max_tokens": 2}  # fmt: skip
    async with stack(*COLOCATED) as served, httpx.AsyncClient(timeout=60) as client:
        (worker,) = served.workers
        worker.runner.faults.step_seconds = 0.2
        prompts = [served.gateway.context.prompt_builder.completion(one) for one in body["prompt"]]
        num_tokens = sum(len(prompt.token_ids) + 1 for prompt in prompts)
        num_bytes = 2 * num_tokens * (21 * LISTED_BYTES + 4 * RANKED_BYTES)
        asking = asyncio.create_task(client.post(f"{served.url}/v1/completions", json=body))
        await until(lambda: used(served.gateway, Kind.PROMPT) > 0, "it runs")
        texts = sum(map(len, body["prompt"]))
        assert used(served.gateway, Kind.PROMPT) == num_bytes + texts
        assert (await asking).status_code == 200
        await until(lambda: used(served.gateway, Kind.PROMPT) == 0, "it comes back")


async def test_log_probabilities_that_do_not_fit_are_refused_before_a_worker_is_called() -> None:
    body = {"model": "shapes", "prompt": "a red circle " * 40, "echo": True, "max_tokens": 0}
    async with stack(*COLOCATED, memory_bytes=128 * 1024) as served:
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            fits = await client.post("/v1/completions", json={**body, "logprobs": 1})
            refused = await client.post("/v1/completions", json={**body, "logprobs": 20})
        assert (fits.status_code, refused.status_code) == (200, 429)
        assert refused.headers["retry-after"]
        assert served.gateway.context.meters.refusals[Bound.MEMORY] == 1
        await until(lambda: used(served.gateway) == 0, "it comes back")


# ---- connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("POST /v1/chat/completions", b"401"),
        ("POST /nowhere", b"401"),
        ("POST /healthz", b"405"),
        ("GET /healthz", b"200"),
    ],
)
async def test_a_body_without_end_does_not_outlive_its_answer(
    line: str, status: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vlm_worker.gateway.gateway_server.LINGER_SECONDS", 0.2)
    settings = gateway_settings([], api_keys_dir=tmp_path)
    async with serving(settings) as gateway, connections(gateway, 1) as (client,):
        await client.say(
            f"{line} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n"
        )
        assert await client.status() == status
        await client.rest()
        assert client.reader.at_eof()


async def test_a_connection_goes_on_when_the_rest_of_a_refused_body_comes(tmp_path: Path) -> None:
    settings = gateway_settings([], api_keys_dir=tmp_path)
    async with serving(settings) as gateway, connections(gateway, 1) as (client,):
        await client.say(f"{CHAT}content-length: 4\r\n\r\n12")
        assert await client.status() == b"401"
        await client.say("34GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b"HTTP/1.1 200 OK" in await client.rest()


async def test_beyond_the_bound_of_connections_probes_alone_are_served() -> None:
    settings = gateway_settings([], max_connections=3)
    async with serving(settings) as gateway, connections(gateway, 3) as idle:
        await until(
            lambda: len(gateway._servers[0].server_state.connections) == len(idle), "all are open"
        )
        async with connections(gateway, 2) as (probe, client):
            await probe.say("GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await probe.status() == b"200"
            await client.say("GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await client.status() == b"503"
            answer = await client.rest()
        headers, _, text = answer.partition(b"\r\n\r\n")
        assert b"retry-after: " in headers
        assert "3 connections" in json.loads(text)["error"]["message"]
        await idle[0].say("GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await idle[0].status() == b"200"


async def test_metrics_are_told_on_the_admin_port_alone() -> None:
    async with serving(gateway_settings([])) as gateway, httpx.AsyncClient() as client:
        assert (await client.get(f"{gateway.url}/metrics")).status_code == 404
        assert (await client.get(f"{gateway.admin_url}/metrics")).status_code == 200


async def test_the_flag_for_images_holds_without_a_gateway_json() -> None:
    message = ask("what is this", png(), png())
    body = {"model": "shapes", "messages": [message], "max_tokens": 1}
    for limit, status in ((1, 400), (2, 503)):
        settings = gateway_settings([], images_per_request=limit)
        async with serving(settings) as gateway, httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(f"{gateway.url}/v1/chat/completions", json=body)
            assert answer.status_code == status, answer.text


async def test_values_that_find_no_memory_are_refused_before_they_are_decoded() -> None:
    settings = gateway_settings([], memory_bytes=MIB)
    body = b'{"value":[' + b",".join([b"[]"] * 4096) + b"]}"
    head = f"{CHAT}content-length: {len(body)}\r\n\r\n"
    async with serving(settings) as gateway, connections(gateway, 1) as (client,):
        await client.say(head.encode() + body)
        assert await client.status() == b"429"
        await until(lambda: used(gateway) == 0, "it comes back")


async def test_a_connection_has_no_more_headers_than_a_client_needs() -> None:
    async with serving(gateway_settings([])) as gateway, connections(gateway, 2) as clients:
        for client, count, status in (
            (clients[0], MAX_HEADERS, b"200"),
            (clients[1], 4000, b"400"),
        ):
            await client.say("GET /healthz HTTP/1.1\r\n" + "a:\r\n" * count + "\r\n")
            assert await client.status() == status
        assert not (await clients[1].rest()).startswith(b"HTTP/1.1")


async def test_a_connection_has_no_more_requests_waiting_than_it_should() -> None:
    one = "GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"
    async with serving(gateway_settings([])) as gateway, connections(gateway, 2) as clients:
        await clients[0].say(one * (MAX_PIPELINED + 1))
        for _ in range(MAX_PIPELINED + 1):
            assert await clients[0].status() == b"200"
            await clients[0].reader.readuntil(b"ok\n")
        await clients[1].say(one * 1000)
        said = await clients[1].rest()
    assert said.count(b"HTTP/1.1 400") == 1
    assert said.count(b"HTTP/1.1 200") <= MAX_PIPELINED + 1


async def test_a_connection_and_its_request_take_no_more_than_is_declared_for_them() -> None:
    """A long head, a request that runs, and as long a head behind it."""
    count = 10
    body = json.dumps({"model": "shapes", "messages": [ask("what is this")], "max_tokens": 300,
                       "stream": True, "ignore_eos": True}).encode()  # fmt: skip
    filler = "".join(f"x-{n}: {'y' * 500}\r\n" for n in range(100))
    head = f"{CHAT}{filler}content-length: {len(body)}\r\n\r\n".encode()

    async with stack(*COLOCATED) as served, contextlib.AsyncExitStack() as open_ones:

        async def begin() -> None:
            (client,) = await open_ones.enter_async_context(connections(served.gateway, 1))
            await client.say(head + body)
            assert await client.status() == b"200"
            await client.say(head)

        await begin()  # with all that a first request makes
        tracemalloc.start()
        try:
            for _ in range(count):
                await begin()
            gc.collect()
            grown, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    # its workers and clients are in this process too
    assert count * len(head) < grown < count * CONNECTION_BYTES
