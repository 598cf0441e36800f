"""Time between tokens while images arrive: one core per role, or one worker on all cores.

    python bench/run.py interference     python bench/interference.py [--seconds 12]

Workers with Qwen2-VL of random weights (`random_vlm`) decode one long text answer, first without
load, then while 0.4 new images of 448 x 448 per second are encoded and prefilled. One core can do
that many, so both deployments do the same work.

    split        encoder and prefill on core 0, decode on core 1, one thread each
    colocated    one worker, one thread per core

The goal is a lower p99 under load if split, with at most one image less (the one in flight). The
aim is 1.5 of the median without load. Medians and tokens are reported too: split decodes on one
core of two, so it may decode fewer tokens with a lower p99.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, aclosing
from pathlib import Path
from typing import Any

import numpy as np
import random_vlm
from PIL import Image
from workers import running

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "worker"))

from vlm_worker.client import WorkerClient  # noqa: E402
from vlm_worker.types import ImageItem, Request, RequestKey, SamplingParams, Source  # noqa: E402
from vlm_worker.wire import messages  # noqa: E402

TIMEOUT = 120.0
SIDE = random_vlm.IMAGE_SIDE
TEXT_TOKENS, ANSWER_TOKENS = 128, 4000
IMAGES_PER_SECOND = 0.4
LEAST_SECONDS = 10.0
AIM = 1.5
DEPLOYMENTS = {
    "split": (("encoder,prefill", "0"), ("decode", "1")),
    "colocated": (("encoder,prefill,decode", "0,1"),),
}
_numbers = itertools.count(1)


async def main() -> None:
    """Print both deployments."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=long_enough, default=12.0, help="of a measurement")
    parser.add_argument("--model", type=Path, help="where the model is, or is to be made")
    args = parser.parse_args()
    lines = {}
    with random_vlm.model_directory(args.model) as model_dir:
        for name, workers in DEPLOYMENTS.items():
            with contextlib.ExitStack() as stack:
                addresses = [
                    stack.enter_context(on_cores(model_dir, stages, cores))
                    for stages, cores in workers
                ]
                lines[name] = await measure(addresses[0], addresses[-1], seconds=args.seconds)
    split, colocated = lines["split"], lines["colocated"]
    better = split["loaded p99"] < colocated["loaded p99"]
    same_work = split["images"]["done"] >= colocated["images"]["done"] - 1
    judged = {"same_work": same_work, "met": better and same_work}
    for name, figures in lines.items():
        print(json.dumps({"bench": "interference", "what": name, **figures, **judged}))


def on_cores(model_dir: Path, stages: str, cores: str) -> AbstractContextManager[str]:
    """A worker that is ready, with a thread for each of its cores."""
    flags = "--kv-memory-bytes=1073741824", f"--threads={len(cores.split(','))}"
    return running(model_dir, stages, *flags, under=("taskset", "--cpu-list", cores))


def long_enough(text: str) -> float:
    """Seconds per phase: a quantile needs enough tokens."""
    seconds = float(text)
    if seconds < LEAST_SECONDS:
        raise argparse.ArgumentTypeError(f"must be at least {LEAST_SECONDS:g}")
    return seconds


async def measure(here: str, there: str, *, seconds: float) -> dict[str, Any]:
    """Milliseconds between tokens of an answer that one worker decodes."""
    async with WorkerClient(here) as prefill, WorkerClient(there) as decode:
        files = [jpeg(seed) for seed in range(math.ceil(2 * seconds * IMAGES_PER_SECOND))]
        await send_image(prefill, files.pop())
        rest = await gaps(prefill, decode, seconds=seconds)
        async with images(prefill, files) as seen:
            loaded = await gaps(prefill, decode, seconds=seconds)
    median = statistics.median(rest)
    p99 = quantile(loaded, 0.99)
    return {
        "tokens": [len(rest), len(loaded)],
        "images": dict(seen),
        "rest p50": round(median, 1),
        "rest p99": round(quantile(rest, 0.99), 1),
        "loaded p50": round(statistics.median(loaded), 1),
        "loaded p99": round(p99, 1),
        "loaded p99 / rest p50": round(p99 / median, 2),
        "aim": AIM,
    }


def quantile(values: list[float], share: float) -> float:
    """The value at a percentile."""
    return sorted(values)[round(share * (len(values) - 1))]


async def gaps(prefill: WorkerClient, decode: WorkerClient, *, seconds: float) -> list[float]:
    """Gaps between tokens of one answer, for `seconds`."""
    number = next(_numbers)
    words = np.random.default_rng(number).integers(300, 31_000, TEXT_TOKENS)
    sampling = SamplingParams(ANSWER_TOKENS, ignore_eos=True)
    key = RequestKey(f"text-{number}", 1)
    request = Request(key, tuple(map(int, words)), TEXT_TOKENS, sampling)
    granted = await decode.reserve(messages.ReserveCall(key, TEXT_TOKENS + 1))
    call = messages.PrefillCall(request, f"{key.request_id}.kv", ())
    replies = [reply.event async for reply in prefill.prefill(call, timeout=TIMEOUT)]
    (taken,) = [event for event in replies if isinstance(event, messages.Accepted)]
    kv = Source(prefill.address, taken.boot_id, taken.transfer_id, taken.layout_fingerprint)
    decoding = messages.DecodeCall(request, granted.reservation_id, kv, granted.boot_id)
    times: list[float] = []
    async with aclosing(decode.decode(decoding, timeout=TIMEOUT)) as answer:
        async for _ in answer:
            times.append(time.perf_counter())
            if times[-1] - times[0] > seconds:
                break
    return [1e3 * (b - a) for a, b in itertools.pairwise(times)]


@contextlib.asynccontextmanager
async def images(worker: WorkerClient, files: list[bytes]) -> AsyncIterator[Counter[str]]:
    """Send images at fixed times, even if the previous one has not ended; count started and done.

    Drawing an image would take the processor from decode, so the files are made before.
    """
    seen = Counter(begun=0, done=0)

    async def one(data: bytes) -> None:
        seen["begun"] += 1
        await send_image(worker, data)
        seen["done"] += 1

    async def arrive() -> None:
        async with asyncio.TaskGroup() as group:
            for data in files:
                group.create_task(one(data))
                await asyncio.sleep(1 / IMAGES_PER_SECOND)

    arriving = asyncio.create_task(arrive())
    try:
        yield seen
    finally:
        arriving.cancel()
        await asyncio.gather(arriving, return_exceptions=True)


async def send_image(worker: WorkerClient, data: bytes) -> None:
    """A new image, encoded and prefilled by one worker, to the first token."""
    number = next(_numbers)
    key, transfer_id = RequestKey(f"image-{number}", 1), f"e-{number}"
    hello = await worker.hello()
    num_tokens = random_vlm.NUM_IMAGE_TOKENS
    item = messages.EncodeItem(transfer_id, len(data), SIDE, SIDE, num_tokens, 0, "JPEG")
    encoding = worker.encode(messages.EncodeCall(key, (item,), bytes(32)), [data], timeout=TIMEOUT)
    async with aclosing(encoding) as replies:
        async for reply in replies:
            if isinstance(reply.event, messages.Decoded):
                (decoded,) = reply.event.items
    tokens = (random_vlm.VISION_START, *[random_vlm.IMAGE_TOKEN] * num_tokens)
    place = ImageItem(decoded.image_key, 1, num_tokens, decoded.grid_thw)
    request = Request(
        key, (*tokens, random_vlm.VISION_END, 500), num_tokens + 3, SamplingParams(1), (place,)
    )
    source = Source(worker.address, hello.boot_id, transfer_id, hello.embed_fingerprint)
    call = messages.PrefillCall(request, f"p-{number}", (source,), handoff=False)
    _ = [reply async for reply in worker.prefill(call, timeout=TIMEOUT)]
    await worker.release(hello.boot_id, transfer_id)


def jpeg(seed: int) -> bytes:
    """A new image."""
    pixels = np.frombuffer(random.Random(seed).randbytes(56 * 56 * 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.reshape(56, 56, 3)).resize((SIDE, SIDE)).save(file, "JPEG")
    return file.getvalue()


if __name__ == "__main__":
    asyncio.run(main())
