"""TTFT by stage if every role is a process.

    python bench/run.py split_ttft          python bench/split_ttft.py [--requests 80]

`vlm-worker serve --split` with `shapes`. Requests with one new image alternate with text requests,
one at a time. One JSON line per kind: the 50th and 95th percentile of TTFT and of each stage, and
the share of `other`. The goal is that `other` is at most 5 % or 5 ms at the 95th percentile.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import random
import sys
from collections.abc import AsyncIterator

import httpx
from gateway_overhead import MODEL, ROOT, ask_gateway, body_of, quantiles, until_ready
from PIL import Image, ImageDraw
from workers import free_port

WARM_UP = 10
SIDE = 224


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[str]:
    """The four processes, and the address of their gateway."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "vlm_worker", "serve", str(MODEL), "--split", f"--port={port}",
        cwd=ROOT / "worker", stderr=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        await until_ready(url)
        yield url
    finally:
        process.terminate()
        await process.wait()


def image(rng: random.Random) -> bytes:
    """A new image as a PNG."""
    image = Image.new("RGB", (SIDE, SIDE), (rng.randrange(256), rng.randrange(256), 30))
    corner = rng.randrange(SIDE // 2)
    ImageDraw.Draw(image).ellipse((corner, corner, corner + 80, corner + 80), (220, 40, 60))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def figures(kind: str, seconds: list[float], stages: list[dict[str, float]]) -> dict[str, object]:
    """One line of the report; the stages of the gateway are in milliseconds."""
    shares = [one["other"] / max(sum(one.values()), 1e-9) for one in stages]
    names = [name for name in stages[0] if any(one[name] for one in stages)]
    return {
        "bench": "split_ttft",
        "kind": kind,
        "requests": len(seconds),
        "ttft_at_client": quantiles(seconds),
        "ttft": quantiles([sum(one.values()) / 1e3 for one in stages]),
        "stages": {name: quantiles([one[name] / 1e3 for one in stages]) for name in names},
        "other_p95_percent": round(100 * sorted(shares)[round(0.95 * (len(shares) - 1))], 1),
    }


async def main() -> None:
    """Serve, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=80)
    options = parser.parse_args()
    rng = random.Random(5)
    seconds: dict[str, list[float]] = {"image": [], "text": []}
    stages: dict[str, list[dict[str, float]]] = {"image": [], "text": []}
    async with served() as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        for turn in range(options.requests + WARM_UP):
            for kind in seconds:
                body = body_of(image(rng) if kind == "image" else None)
                took, account = await ask_gateway(client, body)
                if turn >= WARM_UP:
                    seconds[kind].append(took)
                    stages[kind].append(account)
    for kind in seconds:
        print(json.dumps(figures(kind, seconds[kind], stages[kind])), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
