"""What the gateway adds to TTFT with one request in flight.

    python bench/gateway_overhead.py [--requests 200]

Encoder, prefill and decode are separate processes with a stub model. The same request alternates
between the gateway (HTTP, until the bytes of the first token) and the workers directly (Encode,
Reserve, Prefill over gRPC, until FirstToken). The difference is the overhead. One JSON line per
kind of request, with the stages `gateway` and `other` as the gateway reports them.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import statistics
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from workers import free_port

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "worker"))

from vlm_worker.client import WorkerClient  # noqa: E402
from vlm_worker.errors import WorkerError  # noqa: E402
from vlm_worker.gateway.api.parts import ImagePart, TextPart  # noqa: E402
from vlm_worker.gateway.api.requests import Message  # noqa: E402
from vlm_worker.gateway.config import Config  # noqa: E402
from vlm_worker.gateway.conversation import Conversation  # noqa: E402
from vlm_worker.gateway.images import read_images  # noqa: E402
from vlm_worker.gateway.prompts import PromptBuilder  # noqa: E402
from vlm_worker.gateway.turns import at_once  # noqa: E402
from vlm_worker.gateway.visual import VisualLimits, VisualPolicy  # noqa: E402
from vlm_worker.types import (  # noqa: E402
    ImageItem,
    Request,
    RequestKey,
    SamplingParams,
    Source,
)
from vlm_worker.wire import messages  # noqa: E402

MODEL = ROOT / "examples" / "shapes" / "model"
QUESTION = "What shape is in the image?"
START_SECONDS = 60.0


@contextlib.asynccontextmanager
async def process(*args: str) -> AsyncIterator[None]:
    """A `vlm-worker` process that is ended on exit."""
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "vlm_worker", *args, f"--model={MODEL}", "--served-name=shapes",
        "--bind=127.0.0.1", cwd=ROOT / "worker", stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        running.terminate()
        await running.wait()


class Workers:
    """One client per worker, with their identities."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self.addresses = addresses
        self.clients = {role: WorkerClient(address) for role, address in addresses.items()}
        self.hello: dict[str, messages.Hello] = {}

    async def connect(self) -> None:
        """Wait for every Hello."""
        async with asyncio.timeout(START_SECONDS):
            for role, client in self.clients.items():
                while role not in self.hello:
                    try:
                        self.hello[role] = await client.hello(timeout=1.0)
                    except WorkerError:
                        await asyncio.sleep(0.1)


class Direct:
    """The request as workers get it, prepared in advance."""

    def __init__(self, workers: Workers, image: bytes | None) -> None:
        self._workers = workers
        language = PromptBuilder(MODEL)
        parts: list[TextPart | ImagePart] = [TextPart(QUESTION)]
        if image is not None:
            parts.insert(0, ImagePart(data_url(image), "auto", ""))
        images = [part for part in parts if isinstance(part, ImagePart)]
        visual = VisualPolicy(VisualLimits(), language.family, tenant="", visual=None, messages=())
        self._images = at_once(read_images(images, Config(), language.family, visual=visual))
        counts = [p.num_tokens for p in self._images if p is not None]
        self._prompt = language.chat(Conversation([Message("user", tuple(parts))]), counts)

    async def ask(self) -> float:
        """Seconds to FirstToken; then free the resources."""
        key = RequestKey(uuid.uuid4().hex, 1)
        started = time.perf_counter()
        try:
            async with contextlib.AsyncExitStack() as stack:
                encoding = asyncio.create_task(self._encode(key, stack))
                reserve = messages.ReserveCall(key, len(self._prompt.token_ids) + 1)
                await self._workers.clients["decode"].reserve(reserve)
                await self._first_token(key, await encoding)
                return time.perf_counter() - started
        finally:
            for client in self._workers.clients.values():
                await client.cancel(key)

    async def _encode(
        self, key: RequestKey, stack: contextlib.AsyncExitStack
    ) -> tuple[messages.DecodedItem, ...]:
        images = [image for image in self._images if image is not None]
        if not images:
            return ()
        items = tuple(
            messages.EncodeItem(
                f"{key.request_id}.{i}", len(p.data), p.width, p.height, p.num_tokens, 0, p.format
            )
            for i, p in enumerate(images)
        )
        call = messages.EncodeCall(key, items, bytes(32))
        replies = self._workers.clients["encoder"].encode(
            call, [p.data for p in images], timeout=60
        )
        await stack.enter_async_context(aclosing(replies))
        event = (await anext(replies)).event
        assert isinstance(event, messages.Decoded)
        return event.items

    async def _first_token(self, key: RequestKey, items: tuple[messages.DecodedItem, ...]) -> None:
        prompt, hello = self._prompt, self._workers.hello["encoder"]
        request = Request(
            key=key,
            token_ids=prompt.token_ids,
            num_prompt_tokens=len(prompt.token_ids),
            sampling=SamplingParams(max_tokens=2),
            items=tuple(
                ImageItem(item.image_key, offset, item.num_tokens, item.grid_thw)
                for item, offset in zip(items, prompt.offsets, strict=True)
            ),
            cache_salt=bytes(32),
        )
        sources = tuple(
            Source(
                self._workers.addresses["encoder"],
                hello.boot_id,
                f"{key.request_id}.{i}",
                hello.embed_fingerprint,
            )
            for i in range(len(items))
        )
        call = messages.PrefillCall(request, f"{key.request_id}.kv", sources)
        async with aclosing(self._workers.clients["prefill"].prefill(call, timeout=60)) as replies:
            async for reply in replies:
                if isinstance(reply.event, messages.FirstToken):
                    return


async def ask_gateway(client: httpx.AsyncClient, body: bytes) -> tuple[float, dict[str, float]]:
    """Seconds to the bytes of the first token, and the stages that the gateway reports."""
    timing: dict[str, Any] = {}
    seconds = 0.0
    headers = {"content-type": "application/json"}
    started = time.perf_counter()
    async with client.stream(
        "POST", "/v1/chat/completions", content=body, headers=headers
    ) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            seconds = seconds or time.perf_counter() - started
            timing = json.loads(line[len("data: ") :]).get("timing", timing)
    return seconds, timing["stages"]


def data_url(image: bytes) -> str:
    """An image as clients send it."""
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def body_of(image: bytes | None) -> bytes:
    """A streamed chat request of two tokens."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": QUESTION}]
    if image is not None:
        parts.insert(0, {"type": "image_url", "image_url": {"url": data_url(image)}})
    return json.dumps(
        {
            "model": "shapes",
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": 2,
            "stream": True,
        }
    ).encode()


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Median and 95th percentile."""
    ordered = sorted(seconds)
    p95 = ordered[round(0.95 * (len(ordered) - 1))]
    return {"p50_ms": round(statistics.median(ordered) * 1e3, 3), "p95_ms": round(p95 * 1e3, 3)}


async def measure(workers: Workers, url: str, num_requests: int) -> None:
    """Alternate between both ways, for text and for an image; print the figures."""
    buffer = io.BytesIO()
    Image.new("RGB", (224, 224), (200, 30, 30)).save(buffer, "PNG")
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for kind, image in (("text", None), ("image", buffer.getvalue())):
            direct, body = Direct(workers, image), body_of(image)
            ours: list[float] = []
            bare: list[float] = []
            stages: list[dict[str, float]] = []
            for turn in range(num_requests + 10):
                seconds, account = await ask_gateway(client, body)
                alone = await direct.ask()
                if turn >= 10:  # the first ones warm every cache on both ways
                    ours.append(seconds)
                    bare.append(alone)
                    stages.append(account)
            figure = {
                "bench": "gateway_overhead",
                "kind": kind,
                "requests": num_requests,
                "through_gateway": quantiles(ours),
                "straight": quantiles(bare),
                "added_p50_ms": round((statistics.median(ours) - statistics.median(bare)) * 1e3, 3),
                "stage_gateway": quantiles([one["gateway"] / 1e3 for one in stages]),
                "stage_other": quantiles([one["other"] / 1e3 for one in stages]),
            }
            print(json.dumps(figure), flush=True)


async def main() -> None:
    """Start everything, measure, stop everything."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=200)
    options = parser.parse_args()
    ports = {role: free_port() for role in ("encoder", "prefill", "decode")}
    workers = Workers({role: f"127.0.0.1:{port}" for role, port in ports.items()})
    public = free_port()
    async with contextlib.AsyncExitStack() as stack:
        for role, port in ports.items():
            flags = (f"--grpc-port={port}", "--http-port=0", "--runner=checksum")
            await stack.enter_async_context(process(role, *flags))
        static = [f"--worker={address}" for address in workers.addresses.values()]
        gateway = process("gateway", f"--http-port={public}", "--admin-port=0", *static)
        await stack.enter_async_context(gateway)
        await workers.connect()
        url = f"http://127.0.0.1:{public}"
        await until_ready(url)
        await measure(workers, url, options.requests)
        for client in workers.clients.values():
            await client.close()


async def until_ready(url: str) -> None:
    """Wait for the gateway."""
    async with asyncio.timeout(START_SECONDS), httpx.AsyncClient(base_url=url) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get("/readyz")).status_code == 200:
                    return
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    asyncio.run(main())
