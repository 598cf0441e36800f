"""Two real HTTP servers: an OpenAI API with SSE, and the part of an API server that `vlm` uses."""

import asyncio
import dataclasses
import datetime
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import WSMsgType, web
from aiohttp.test_utils import TestServer

STAGES = {"gateway": 2.0, "media": 5.5, "encode": 12.5, "prefill": 20.0}


@dataclasses.dataclass
class OpenAi:
    """A gateway as its clients see it. Tests set its next answer and read the requests."""

    url: str = ""
    pieces: tuple[str, ...] = ("a red", " circle")
    timing: bool = True
    pause: float = 0.0
    status: int = 200
    error: Any = None
    break_off: bool = False
    refuse_every: int = 0
    bodies: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    keys: list[str | None] = dataclasses.field(default_factory=list)
    num_open: int = 0
    num_cancelled: int = 0

    async def models(self, request: web.Request) -> web.Response:
        if self.status == 401:
            return web.json_response({"error": {"message": "no key"}}, status=401)
        return web.json_response({"object": "list", "data": [{"id": "shapes"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.keys.append(request.headers.get("Authorization"))
        self.bodies.append(await request.json())
        refused = self.refuse_every and len(self.bodies) % self.refuse_every == 0
        if self.status != 200 or refused:
            error = self.error or {"message": "busy", "type": "overloaded", "code": "overloaded"}
            return web.json_response({"error": error}, status=429 if refused else self.status)
        self.num_open += 1
        try:
            return await self._stream(request)
        except (asyncio.CancelledError, ConnectionError):
            self.num_cancelled += 1
            raise
        finally:
            self.num_open -= 1

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)

        async def send(event: dict[str, Any]) -> None:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        await response.write(b": ping\n\n")
        await send({"choices": [{"delta": {"role": "assistant"}, "index": 0}], "usage": None})
        for piece in self.pieces:
            if self.pause:
                await asyncio.sleep(self.pause)
            await send({"choices": [{"delta": {"content": piece}, "index": 0}], "usage": None})
        if self.break_off:
            if self.error:
                await send({"error": self.error})
            return response
        await send({"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": None})
        usage = {
            "prompt_tokens": 60,
            "completion_tokens": len(self.pieces),
            "prompt_tokens_details": {"image_tokens": 36, "text_tokens": 24, "cached_tokens": 0},
        }
        last: dict[str, Any] = {"choices": [], "usage": usage}
        if self.timing:
            last["timing"] = {"ttft_ms": sum(STAGES.values()), "stages": STAGES}
        await send(last)
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
async def openai() -> AsyncIterator[OpenAi]:
    served = OpenAi()
    app = web.Application(client_max_size=64 << 20, handler_args={"handler_cancellation": True})
    app.router.add_get("/v1/models", served.models)
    app.router.add_post("/v1/chat/completions", served.chat)
    server = TestServer(app)
    await server.start_server()
    served.url = str(server.make_url("")).rstrip("/")
    yield served
    await server.close()


@dataclasses.dataclass
class ApiServer:
    """Objects by URL of their collection, and port-forward to a local port for every pod."""

    url: str = ""
    objects: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    target_port: int = 0
    target_ports: dict[str, int] = dataclasses.field(default_factory=dict)
    forwarded: list[str] = dataclasses.field(default_factory=list)
    forward_status: int = 101
    token: str = "secret"
    status: int = 200
    # lines by pod/container, or pod/container/previous
    logs: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    log_queries: list[dict[str, str]] = dataclasses.field(default_factory=list)
    paths: list[str] = dataclasses.field(default_factory=list)

    def add(self, path: str, manifest: dict[str, Any]) -> None:
        self.objects.setdefault(path, []).append(manifest)

    async def read(self, request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {self.token}"
        if self.status != 200:
            body = {"kind": "Status", "reason": "Forbidden", "message": "pods is forbidden"}
            return web.json_response(body, status=self.status)
        path = request.path
        self.paths.append(path)
        if path == "/version":
            return web.json_response({"gitVersion": "v1.34.2"})
        if path in self.objects:
            wanted = dict(
                pair.split("=")
                for pair in request.query.get("labelSelector", "").split(",")
                if pair
            )
            items = [
                item
                for item in self.objects[path]
                if wanted.items() <= item["metadata"].get("labels", {}).items()
            ]
            return web.json_response({"items": items})
        collection, _, name = path.rpartition("/")
        for item in self.objects.get(collection, []):
            if item["metadata"]["name"] == name:
                return web.json_response(item)
        if path.endswith(("/pods", "/vlmservices")):
            return web.json_response({"items": []})
        body = {"kind": "Status", "reason": "NotFound", "message": f"{name} not found"}
        return web.json_response(body, status=404)

    async def review(self, request: web.Request) -> web.Response:
        """Allow everything."""
        return web.json_response({**await request.json(), "status": {"allowed": True}}, status=201)

    async def log(self, request: web.Request) -> web.StreamResponse:
        """As a kubelet does it: whole seconds of `sinceTime`; `follow` waits for new lines."""
        assert request.headers["Authorization"] == f"Bearer {self.token}"
        query = dict(request.query)
        self.log_queries.append(query)
        key = f"{request.match_info['pod']}/{query['container']}"
        key += "/previous" if query.get("previous") else ""
        if key not in self.logs:
            body = {"kind": "Status", "reason": "BadRequest", "message": f"{key} has no log"}
            return web.json_response(body, status=400)
        since = query.get("sinceTime", "")
        response = web.StreamResponse()
        await response.prepare(request)
        num_sent = 0
        while True:
            lines = self.logs[key]
            for line in lines[num_sent:]:
                if line[:19] >= since[:19]:
                    await response.write(f"{line}\n".encode())
            num_sent = len(lines)
            if not query.get("follow"):
                return response
            await asyncio.sleep(0.01)

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """As a kubelet does it: two channels, each opening with the port."""
        assert request.headers["Authorization"] == f"Bearer {self.token}"
        if self.forward_status != 101:
            return web.Response(status=self.forward_status)
        self.forwarded.append(f"{request.match_info['pod']}:{request.query['ports']}")
        channel = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await channel.prepare(request)
        port = int(request.query["ports"]).to_bytes(2, "little")
        for number in (0, 1):
            await channel.send_bytes(bytes([number]) + port)
        try:
            target = self.target_ports.get(request.match_info["pod"], self.target_port)
            reader, writer = await asyncio.open_connection("127.0.0.1", target)
        except OSError as error:
            await channel.send_bytes(b"\x01" + str(error).encode())
            await channel.close()
            return channel

        async def down() -> None:
            while data := await reader.read(65536):
                await channel.send_bytes(b"\x00" + data)
            await channel.close()

        task = asyncio.create_task(down())
        try:
            async for message in channel:
                if message.type is WSMsgType.BINARY and message.data[0] == 0:
                    writer.write(message.data[1:])
                    await writer.drain()
        finally:
            writer.close()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return channel


@pytest.fixture
async def api() -> AsyncIterator[ApiServer]:
    served = ApiServer()
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/{ns}/pods/{pod}/portforward", served.forward)
    app.router.add_get("/api/v1/namespaces/{ns}/pods/{pod}/log", served.log)
    app.router.add_post("/apis/authorization.k8s.io/v1/{kind}", served.review)
    app.router.add_get("/{path:.*}", served.read)
    server = TestServer(app)
    await server.start_server()
    served.url = str(server.make_url("")).rstrip("/")
    yield served
    await server.close()


@pytest.fixture
def kubeconfig(api: ApiServer, tmp_path: Path) -> str:
    path = tmp_path / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": api.url}}],
        "users": [{"name": "u", "user": {"token": api.token}}],
        "contexts": [
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "vision"}},
            {"name": "there", "context": {"cluster": "c", "user": "u", "namespace": "speech"}},
        ],
    }
    path.write_text(yaml.safe_dump(config))
    return str(path)


VLM = "/apis/triptych.dev/v1alpha1"


@pytest.fixture
def add_service(api: ApiServer) -> Callable[..., dict[str, Any]]:
    """Adds a VLMService to the API server, by default a ready one."""

    def add(
        name: str = "demo",
        *,
        namespace: str = "vision",
        conditions: list[dict[str, Any]] | None = None,
        **status: Any,
    ) -> dict[str, Any]:
        if conditions is None:
            conditions = [{"type": "Ready", "status": "True", "reason": "AllReady", "message": ""}]
        half_an_hour_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=30)
        service = {
            "apiVersion": "triptych.dev/v1alpha1",
            "kind": "VLMService",
            "metadata": {
                "name": name,
                "namespace": namespace,
                "creationTimestamp": half_an_hour_ago.isoformat(),
            },
            "spec": {"model": {"uri": "pvc://shapes", "servedName": "shapes"}},
            "status": {"conditions": conditions, **status},
        }
        api.add(f"{VLM}/namespaces/{namespace}/vlmservices", service)
        api.add(f"{VLM}/vlmservices", service)
        return service

    return add


@pytest.fixture
def add_gateway(api: ApiServer) -> Callable[..., None]:
    """Adds a gateway pod of a service."""

    def add(pod: str, *, service: str = "demo", ready: bool = True, deleting: bool = False) -> None:
        metadata: dict[str, Any] = {
            "name": pod,
            "namespace": "vision",
            "labels": {"triptych.dev/service": service, "triptych.dev/role": "gateway"},
        }
        if deleting:
            metadata["deletionTimestamp"] = "2026-11-21T10:00:00Z"
        state = {"type": "Ready", "status": str(ready)}
        api.add(
            "/api/v1/namespaces/vision/pods",
            {"metadata": metadata, "status": {"conditions": [state]}},
        )

    return add


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Any]]:
    """Starts servers that answer /stats with the next of some values, then with the last."""
    servers: list[TestServer] = []

    async def start(*values: Any) -> int:
        left = list(values)

        async def answer(request: web.Request) -> web.Response:
            return web.json_response(left.pop(0) if len(left) > 1 else left[0])

        app = web.Application()
        app.router.add_get("/stats", answer)
        servers.append(TestServer(app))
        await servers[-1].start_server()
        return int(servers[-1].port or 0)

    yield start
    for server in servers:
        await server.close()
