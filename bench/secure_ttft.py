"""TTFT of a service with mutual TLS between its processes, against one without.

    python bench/secure_ttft.py [--requests 60]

Two services run at once, each a gateway, an encoder, a prefill and a decode worker: one with
`--identity-dir`, one without. The same request goes to both in turn, so that other work of the
machine slows both. A request has a new image or text alone; TTFT ends with its first token at the
client. `ratio` is the median of the ratios of each turn, `fast ratio` that of the 20th percentiles,
which other work changes less. Goal: at most 1.05.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
from gateway_overhead import MODEL, ROOT, ask_gateway, body_of, quantiles, until_ready
from identities import Authority
from split_ttft import image
from workers import free_port

WARM_UP = 10
GOAL = 1.05
ROLES = ("encoder", "prefill", "decode")


@contextlib.asynccontextmanager
async def service(authority: Authority | None) -> AsyncIterator[str]:
    """The address of a gateway; its workers and itself end with the context."""
    addresses = {role: free_port() for role in ROLES}
    port = free_port()
    workers = [f"--worker=127.0.0.1:{number}" for number in addresses.values()]
    async with contextlib.AsyncExitStack() as stack:
        for role, number in addresses.items():
            others = (f"--http-port={free_port()}", f"--data-port={free_port()}")
            ports = (f"--grpc-port={number}", *others)
            await stack.enter_async_context(process(authority, role, *ports))
        flags = [f"--http-port={port}", f"--admin-port={free_port()}", *workers]
        await stack.enter_async_context(process(authority, "gateway", *flags))
        url = f"http://127.0.0.1:{port}"
        await until_ready(url)
        yield url


@contextlib.asynccontextmanager
async def process(authority: Authority | None, role: str, *flags: str) -> AsyncIterator[None]:
    """One `vlm-worker`, that ends with the context."""
    own = [f"--identity-dir={authority.pair(role)}"] if authority is not None else []
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "vlm_worker", role, f"--model={MODEL}", "--served-name=shapes",
        "--bind=127.0.0.1", *flags, *own, cwd=ROOT / "worker",
        stderr=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield
    finally:
        running.terminate()
        await running.wait()


async def main() -> None:
    """Serve, ask both in turn, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=60)
    options = parser.parse_args()
    rng = random.Random(5)
    seconds: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as made:
        async with contextlib.AsyncExitStack() as stack:
            authority = Authority(Path(made) / "certificates")
            clients = {}
            for name, own in (("plaintext", None), ("tls", authority)):
                url = await stack.enter_async_context(service(own))
                clients[name] = await stack.enter_async_context(
                    httpx.AsyncClient(base_url=url, timeout=60)
                )
            for turn in range(options.requests + WARM_UP):
                for kind in ("image", "text"):
                    body = body_of(image(rng) if kind == "image" else None)
                    order = sorted(clients, reverse=bool(turn % 2))
                    for name in order:
                        took, _ = await ask_gateway(clients[name], body)
                        if turn >= WARM_UP:
                            seconds.setdefault((kind, name), []).append(took)
    for kind in ("image", "text"):
        print(json.dumps(figures(kind, seconds[kind, "plaintext"], seconds[kind, "tls"])))


def figures(kind: str, plaintext: list[float], tls: list[float]) -> dict[str, object]:
    """One line of the report."""
    ratio = statistics.median(b / a for a, b in zip(plaintext, tls, strict=True))
    fast = [statistics.quantiles(one, n=5)[0] for one in (plaintext, tls)]
    return {
        "bench": "secure_ttft",
        "kind": kind,
        "requests": len(tls),
        "plaintext": quantiles(plaintext),
        "tls": quantiles(tls),
        "ratio": round(ratio, 3),
        "fast ratio": round(fast[1] / fast[0], 3),
        "goal": GOAL,
        "met": ratio <= GOAL,
    }


if __name__ == "__main__":
    asyncio.run(main())
