"""Text throughput and TTFT of images, with an encoder that answers text and with one that does not.

    python bench/run.py stealing     python bench/stealing.py [--rounds 3]

Both services have one encoder and one worker that prefills and decodes, each with one thread on a
core of its own (`taskset`), behind a gateway. They take turns: a round sends the same requests to
each, first to one, then to the other.

    off       the encoder encodes
    lending   the same, and up to `MAX_LENT` text-only requests at once (`--max-lent-requests`)

In a round, `CLIENTS` clients ask `TEXTS` text questions each, one after another, and new images
arrive at fixed times until all texts are answered. The decode worker runs `MAX_RUNNING` at once, so
that requests wait, images among them. Texts are different, so no prefix is cached. The goals are
1.25 times the text tokens per second, and at most 1.05 times the p95 of the images' TTFT.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
from gateway_overhead import MODEL
from PIL import Image
from workers import ROOT, free_port

CLIENTS, TEXTS, TEXT_TOKENS, WORDS = 24, 3, 96, 120
MAX_RUNNING, MAX_LENT = 8, 4
IMAGE_SECONDS, IMAGE_SIDE = 0.5, 224
START_SECONDS = 90.0
LEAST_GAIN, MOST_TTFT = 1.25, 1.05
ENCODERS = {
    "off": ("encoder", ()),
    "lending": ("encoder,prefill,decode", (f"--max-lent-requests={MAX_LENT}",)),
}


class Service:
    """A gateway's address, and what was measured of it."""

    def __init__(self, url: str, admin: str) -> None:
        self.url, self.admin = url, admin
        self.rates: list[float] = []
        self.ttfts: list[float] = []

    async def lent(self, client: httpx.AsyncClient) -> float:
        """Attempts on the encoder."""
        page = (await client.get(f"{self.admin}/metrics")).text
        (line,) = (row for row in page.splitlines() if row.startswith("triptych_lent_requests_tot"))
        return float(line.split()[1])

    async def round(self, client: httpx.AsyncClient, seed: int, *, counted: bool) -> None:
        """Answer all texts while images arrive."""
        rng = random.Random(seed)
        stop = asyncio.Event()
        images = asyncio.create_task(
            self._images(client, rng.randrange(1 << 30), stop, counted=counted)
        )
        began = time.perf_counter()
        counts = await asyncio.gather(
            *(self._client(client, random.Random(rng.random())) for _ in range(CLIENTS))
        )
        if counted:
            self.rates.append(sum(counts) / (time.perf_counter() - began))
        stop.set()
        await images

    async def _client(self, client: httpx.AsyncClient, rng: random.Random) -> int:
        """Output tokens of one client, which asks its questions one after another."""
        prompts = (" ".join(f"w{rng.randrange(10**6)}" for _ in range(WORDS)) for _ in range(TEXTS))
        return sum([await self._text(client, prompt) for prompt in prompts])

    async def _text(self, client: httpx.AsyncClient, prompt: str) -> int:
        """Output tokens of one answer."""
        body = question([{"type": "text", "text": prompt}], TEXT_TOKENS)
        reply = await client.post(f"{self.url}/v1/chat/completions", json=body)
        reply.raise_for_status()
        return int(reply.json()["usage"]["completion_tokens"])

    async def _images(
        self, client: httpx.AsyncClient, seed: int, stop: asyncio.Event, *, counted: bool
    ) -> None:
        """Ask about a new image at fixed times until `stop`, and wait for the answers."""
        async with asyncio.TaskGroup() as group:
            while not stop.is_set():
                seed += 1
                group.create_task(self._image(client, jpeg(seed), counted=counted))
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), IMAGE_SECONDS)

    async def _image(self, client: httpx.AsyncClient, data: bytes, *, counted: bool) -> None:
        url = f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
        parts = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "What shape is in the image?"},
        ]
        body = {**question(parts, 1), "stream": True}
        began = time.perf_counter()
        async with client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if '"content"' in line:
                    if counted:
                        self.ttfts.append(time.perf_counter() - began)
                    return


def question(parts: list[dict[str, Any]], max_tokens: int) -> dict[str, Any]:
    """A request that gets exactly `max_tokens` tokens."""
    return {
        "model": "m",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def jpeg(seed: int) -> bytes:
    """A new image."""
    pixels = np.frombuffer(random.Random(seed).randbytes(28 * 28 * 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.reshape(28, 28, 3)).resize((IMAGE_SIDE, IMAGE_SIDE)).save(file, "JPEG")
    return file.getvalue()


@contextlib.asynccontextmanager
async def service(name: str, cores: tuple[int, int]) -> AsyncIterator[Service]:
    """Encoder, decode worker and gateway; ended on exit."""
    stages, flags = ENCODERS[name]
    decoding = ("--stages=prefill,decode", f"--max-requests={MAX_RUNNING}")
    ports = [free_port() for _ in range(6)]
    addresses = [f"127.0.0.1:{port}" for port in ports[:2]]
    pods = (("encoder", f"--stages={stages}", *flags), ("decode", *decoding))
    async with contextlib.AsyncExitStack() as stack:
        for number, (role, *more) in enumerate(pods):
            grpc, http = ports[number], ports[2 + number]
            listens = (f"--grpc-port={grpc}", f"--http-port={http}", "--threads=1")
            memory = "--kv-memory-bytes=268435456"
            await stack.enter_async_context(
                process(role, *listens, memory, *more, under=("taskset", "-c", str(cores[number])))
            )
        listens = (f"--http-port={ports[4]}", f"--admin-port={ports[5]}")
        workers = (f"--worker={address}" for address in addresses)
        await stack.enter_async_context(process("gateway", *listens, *workers))
        found = Service(f"http://127.0.0.1:{ports[4]}", f"http://127.0.0.1:{ports[5]}")
        async with asyncio.timeout(START_SECONDS), httpx.AsyncClient() as client:
            while not await is_ready(client, found.admin):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        yield found


@contextlib.asynccontextmanager
async def process(*arguments: str, under: tuple[str, ...] = ()) -> AsyncIterator[None]:
    """A `vlm-worker` process that is ended on exit. A pipe that nobody reads would stop it."""
    started = await asyncio.create_subprocess_exec(
        *under, sys.executable, "-m", "vlm_worker", *arguments, f"--model={MODEL}",
        "--served-name=m", "--bind=127.0.0.1", "--block-size=64", cwd=ROOT / "worker",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        started.terminate()
        await started.wait()


async def is_ready(client: httpx.AsyncClient, admin: str) -> bool:
    """Whether a gateway has pods for every stage."""
    try:
        reply = await client.get(f"{admin}/readyz")
    except httpx.TransportError:
        return False
    return reply.status_code == 200 and reply.text.strip() == "ok"


async def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="counted ones of each service")
    args = parser.parse_args()
    available = sorted(os.sched_getaffinity(0))
    cores = available[0], available[-1]
    async with contextlib.AsyncExitStack() as stack:
        services = {
            name: await stack.enter_async_context(service(name, cores)) for name in ENCODERS
        }
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=120))
        for number in range(args.rounds + 1):
            for name in (*ENCODERS, *reversed(ENCODERS))[2 * (number % 2) :][:2]:
                began = time.perf_counter()
                await services[name].round(client, number, counted=number > 0)
                took = time.perf_counter() - began
                print(f"round {number}: {name} {took:.1f} s", file=sys.stderr, flush=True)
        lent = await services["lending"].lent(client)
    off, lending = services["off"], services["lending"]
    gain = median(lending.rates) / median(off.rates)
    ttft = p95(lending.ttfts) / p95(off.ttfts)
    print(json.dumps({
        "bench": "stealing", "what": "lending", "rounds": args.rounds, "lent": lent,
        "cores": len(set(cores)),
        "off tokens/s": round(median(off.rates), 1),
        "lending tokens/s": round(median(lending.rates), 1),
        "throughput": round(gain, 3),
        "images": [len(off.ttfts), len(lending.ttfts)],
        "off image TTFT p95": round(p95(off.ttfts), 4),
        "lending image TTFT p95": round(p95(lending.ttfts), 4),
        "image TTFT": round(ttft, 3),
        "met": gain >= LEAST_GAIN and ttft <= MOST_TTFT,
    }))  # fmt: skip


def median(values: list[float]) -> float:
    """The middle value."""
    return float(np.median(values))


def p95(values: list[float]) -> float:
    """The 95th percentile."""
    return float(np.percentile(values, 95))


if __name__ == "__main__":
    asyncio.run(main())
