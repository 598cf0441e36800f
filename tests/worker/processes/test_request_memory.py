"""A hostile mix against a real encoder process: its memory stays within what it declares.

Flat images that are large once decoded, callers that announce much and send little, and requests
whose embeddings nobody fetches, all at once. Figures are printed; run with -s to see them.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from worker.media.files import encode as encode_file
from worker.processes.workers import MODEL, Worker, started

from vlm_worker.annotations import MAX_IMAGE_BYTES
from vlm_worker.client import WorkerClient
from vlm_worker.core.families import load_family
from vlm_worker.errors import OverloadedError
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.serve.budget import image_bytes
from vlm_worker.types import RequestKey
from vlm_worker.wire.messages import ENCODE_CALL, EncodeCall, EncodeItem, ItemReady

NUM_CALLS, NUM_IMAGES = 20, 4
NUM_SLOW = 16
NUM_WAITING = 64
CACHE = 1 << 20
SLACK_BYTES = 64 << 20
"""What malloc and gRPC may keep beside what requests hold."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """Bytes of one process, and of its decode children together.

    Attributes:
        requests, total, decoders: what it declares for requests, for itself, for the children.
        before, most, most_decoders: what they had.
    """

    requests: int
    total: int
    decoders: int
    before: int
    most: int
    most_decoders: int

    def check(self, what: str) -> None:
        """Print, and hold them to what was declared."""
        numbers = {name: value >> 20 for name, value in dataclasses.asdict(self).items()}
        grown = self.most - self.before
        print(f"{what}: grew by {grown >> 20} MiB; {numbers} MiB")
        assert grown <= self.requests + SLACK_BYTES
        assert self.most <= self.total
        assert self.most_decoders <= self.decoders


def model_of(directory: Path, max_pixels: int) -> Path:
    """The shipped model's files, but that it sees images whole."""
    shutil.copytree(MODEL, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    for name in ("preprocessor_config.json", "processor_config.json"):
        path = directory / name
        fields = json.loads(path.read_text())
        fields.get("image_processor", fields)["size"]["longest_edge"] = max_pixels
        path.write_text(json.dumps(fields))
    assert load_family(directory).processor.max_tokens * 28 * 28 > max_pixels // 2
    return directory


def rss(pid: int, field: str = "VmRSS") -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024


def rss_of_children(pid: int) -> int:
    total = 0
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            with contextlib.suppress(OSError, ValueError):  # it has ended
                total += rss(int(child))
    return total


async def declared(worker: Worker) -> dict[str, int]:
    """Bytes by part."""
    _, text = await worker.get("/metrics")
    return {
        sample.labels["part"]: int(sample.value)
        for family in text_string_to_metric_families(text)
        if family.name == "triptych_memory_declared_bytes"
        for sample in family.samples
    }


async def hostile_mix(model: Path, side: int) -> None:
    """All of it at once; every well-formed call has to be answered in the end."""
    family = load_family(model)
    geometry = family.geometry(side, side)
    call_bytes = NUM_IMAGES * image_bytes(family)
    budget = 2 * CACHE + (24 << 20) + call_bytes * 3 // 2  # a fifth of it is for files
    flags = (f"--model={model}", f"--request-memory-bytes={budget}",
             f"--embedding-cache-bytes={CACHE}", "--max-waiting-pixels=67108864")  # fmt: skip

    def item(name: str, num_bytes: int, size: int) -> EncodeItem:
        tokens = family.geometry(size, size).num_tokens
        return EncodeItem(name, num_bytes, size, size, tokens, 0, "PNG")

    def flat(number: int, size: int) -> bytes:
        colour = (number % 256, number // 256, 9)
        return encode_file(Image.new("RGB", (size, size), colour))

    async def answer(client: WorkerClient, name: str, files: list[bytes], size: int) -> None:
        """Retry after the delay that the refusal names, with another attempt, as a gateway does."""
        for attempt in range(1, 1000):
            key = RequestKey(name, attempt)
            items = tuple(
                item(f"{name}.{attempt}.{n}", len(data), size) for n, data in enumerate(files)
            )
            try:
                replies = client.encode(EncodeCall(key, items, bytes(32)), files, timeout=900.0)
                async with aclosing(replies):
                    events = [reply.event async for reply in replies]
            except OverloadedError as error:
                await asyncio.sleep(min(error.retry_after_seconds, 0.2))
                continue
            assert [type(event) for event in events[1:]] == [ItemReady] * len(files)
            await client.cancel(key)
            return
        raise AssertionError(f"{name} was never served")

    def slow(client: WorkerClient, number: int) -> Any:
        call = EncodeCall(
            RequestKey(f"slow-{number}", 1), (item("s", MAX_IMAGE_BYTES, 56),), bytes(32)
        )

        async def requests() -> AsyncIterator[pb.EncodeRequest]:
            yield pb.EncodeRequest(begin=ENCODE_CALL.encode(call))
            yield pb.EncodeRequest(chunk=pb.EncodeChunk(item=0, data=bytes(1 << 20)))
            await asyncio.Event().wait()

        return client._stub("Encode")(requests(), timeout=900.0)

    assert geometry.num_tokens * 8 * NUM_IMAGES <= CACHE
    async with started("encoder", *flags) as worker, WorkerClient(worker.address) as client:
        await answer(client, "first", [flat(0, 56)], 56)
        pid, parts = worker.process.pid, await declared(worker)
        before, most_decoders = rss(pid), 0
        assert parts["requests"] == budget

        async def watch() -> None:
            nonlocal most_decoders
            while True:
                most_decoders = max(most_decoders, rss_of_children(pid))
                await asyncio.sleep(0.05)

        watching = asyncio.create_task(watch())
        stalled = [slow(client, number) for number in range(NUM_SLOW)]
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_CALLS):
                files = [flat(NUM_IMAGES * number + one, side) for one in range(NUM_IMAGES)]
                group.create_task(answer(client, f"large-{number}", files, side))
            for number in range(NUM_WAITING):
                files = [flat(10_000 + number, 56)]
                group.create_task(answer(client, f"small-{number}", files, 56))
        for call in stalled:
            call.cancel()
        watching.cancel()
        decoders = parts.pop("decoders")
        figures = Figures(
            parts["requests"],
            sum(parts.values()),
            decoders,
            before,
            rss(pid, "VmHWM"),
            most_decoders,
        )
        assert (await worker.get("/healthz"))[0] == 200
    figures.check(f"{NUM_CALLS} calls of {NUM_IMAGES} images of {side}x{side} and others")


async def test_a_small_hostile_mix_stays_within_the_declared_bytes(tmp_path: Path) -> None:
    # without a bound, 80 images of 25 MB of patches
    await hostile_mix(model_of(tmp_path / "model", 1 << 20), 1022)


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_a_hostile_mix_of_the_largest_images_stays_within_the_declared_bytes(
    tmp_path: Path,
) -> None:
    # without a bound, 80 images of 308 MB of patches
    await hostile_mix(model_of(tmp_path / "model", 12_845_056), 3584)
