"""Many kinds of hostile load at once: the memory of each process against its declared bytes.

    python bench/hostile_mix.py [--model DIR] [--side 1022] [--images 4] [--calls 40] ...

`vlm-worker serve --split` with real weights, one process per role. 900 clients send at once:
requests with large flat images in tiny files, `--waiting` text requests with long answers, `--slow`
uploads that never end, and deep and wide JSON. A refused well-formed request is retried after
`Retry-After` until it is answered. `--max-pixels` lets the model see images of that size.

Each process declares `triptych_memory_declared_bytes`. `peak_bytes` is its peak resident memory,
`decoders_bytes` that of its decode processes together. One JSON line per process, and one with the
outcomes of the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import re
import shutil
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "shapes" / "model"
MIB = 1 << 20
GATEWAY_BYTES = 128 * MIB
SAMPLE_SECONDS = 0.2
SLOW_BYTES = 8 * MIB
START_SECONDS = 180.0


@dataclass
class Process:
    """One role: the address of its metrics, its pid and its peak memory."""

    name: str
    metrics: str
    pid: int
    declared: dict[str, int]
    before: int = 0
    decoders: int = 0

    @property
    def own_declared(self) -> int:
        """Declared bytes without those of its children."""
        return sum(self.declared.values()) - self.declared.get("decoders", 0)


def status_bytes(pid: int, field: str) -> int:
    """Bytes of a field of /proc/PID/status; 0 if the process has ended."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return found


async def gauges(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Samples by name, or by name and label value."""
    async with session.get(url) as reply:
        text = await reply.text()
    return {
        "/".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@contextlib.asynccontextmanager
async def served(model: Path, *flags: str) -> AsyncIterator[tuple[str, list[Process]]]:
    """The API's address and its processes; they end with the context."""
    serve = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "vlm_worker", "serve", str(model), "--split", "--port=0",
        f"--gateway-memory-bytes={GATEWAY_BYTES}", *flags,
        cwd=ROOT / "worker", stderr=PIPE, limit=MIB,
    )  # fmt: skip
    assert serve.stderr is not None
    log = serve.stderr
    metrics: dict[str, str] = {}
    reading = None
    try:
        async with asyncio.timeout(START_SECONDS):
            async for raw in log:
                line = raw.decode()
                if found := re.search(r"metrics of the (\S+): (\S+)", line):
                    metrics[found[1]] = found[2]
                if found := re.search(r"is served at (\S+)/v1", line):
                    url = found[1]
                    break
            else:
                raise SystemExit(f"the service ended with {await serve.wait()}")

        async def drain() -> None:
            async for _ in log:
                pass

        reading = asyncio.create_task(drain())
        yield url, await _processes(serve.pid, metrics)
    finally:
        if serve.returncode is None:
            serve.terminate()
        await serve.wait()
        if reading is not None:
            reading.cancel()


def command_of(pid: int) -> list[bytes]:
    """Words of a command line."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


async def _processes(pid: int, metrics: dict[str, str]) -> list[Process]:
    found = []
    async with aiohttp.ClientSession() as session:
        for child in children(pid):
            command = command_of(child)
            name = next((n for n in metrics if n.encode() in command), None)
            if name is None:
                continue
            said = await gauges(session, metrics[name])
            resident = status_bytes(child, "VmRSS")
            prefix = "triptych_memory_declared_bytes/"
            declared = {
                key.removeprefix(prefix): int(value)
                for key, value in said.items()
                if key.startswith(prefix)
            }
            found.append(Process(name, metrics[name], child, declared, resident))
    return found


async def sample(processes: list[Process]) -> None:
    """Record the memory of all decode processes; the kernel records the peak of each process."""
    while True:
        for one in processes:
            held = sum(status_bytes(child, "VmRSS") for child in children(one.pid))
            one.decoders = max(one.decoders, held)
        await asyncio.sleep(SAMPLE_SECONDS)


class Crowd:
    """Run all clients; `counts` has the outcomes of their requests."""

    def __init__(self, url: str, session: aiohttp.ClientSession, seconds: float) -> None:
        self.counts: Counter[str] = Counter()
        self._url = url
        self._session = session
        self._until = time.monotonic() + seconds

    async def ask(self, kind: str, body: bytes | dict[str, Any]) -> None:
        """Retry until there is a response."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", "x-request-timeout": "600"}
        while time.monotonic() < self._until:
            try:
                async with self._session.post(
                    f"{self._url}/v1/chat/completions", data=data, headers=headers
                ) as reply:
                    await reply.read()
                    status = reply.status
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                self.counts[f"{kind} {type(error).__name__}"] += 1
                await asyncio.sleep(0.5)
                continue
            if status not in (429, 503):
                self.counts[f"{kind} {status}"] += 1
                return
            self.counts[f"{kind} told to come back"] += 1
            await asyncio.sleep(min(float(reply.headers.get("retry-after", 1)), 2.0))
        self.counts[f"{kind} unanswered"] += 1

    async def upload_slowly(self) -> None:
        """Announce a large upload, send single bytes slowly, and never end."""
        host, port = self._url.removeprefix("http://").split(":")
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = (
                "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
                f"content-type: application/json\r\ncontent-length: {SLOW_BYTES}\r\n\r\n"
            )
            writer.write(head.encode() + b" " * MIB)
            while time.monotonic() < self._until and not reader.at_eof():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await reader.read(4096)
                        break
                writer.write(b" ")
                await writer.drain()
            writer.close()
        self.counts["slow uploads"] += 1


def image_request(number: int, side: int, num_images: int) -> dict[str, Any]:
    """Flat images of a unique colour."""
    parts = []
    for one in range(num_images):
        colour = (number % 256, number // 256, one)
        file = io.BytesIO()
        Image.new("RGB", (side, side), colour).save(file, "PNG", compress_level=1)
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    content = [*parts, {"type": "text", "text": "How many shapes?"}]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4}


def text_request(number: int) -> dict[str, Any]:
    """A unique prompt with a long answer."""
    words = f"question {number} " * 60
    message = {"role": "user", "content": words}
    return {"messages": [message], "max_tokens": 200, "ignore_eos": True}


def json_bombs(size: int = 8 * MIB) -> list[bytes]:
    """Bodies that are small to send and large to hold."""
    head = b'{"messages":[{"role":"user","content":"x"}],"x":'
    wide = [b"[" + b",".join([unit] * (size // (len(unit) + 1))) + b"]" for unit in (b"[]", b"{}")]
    deep = b"[" * (size // 2) + b"]" * (size // 2)
    return [head + value + b"}" for value in (*wide, deep)]


async def hostile_mix(options: argparse.Namespace) -> None:
    """Run it; print a line per process."""
    if options.max_pixels:
        with tempfile.TemporaryDirectory() as directory:
            model = seeing_more(options.model, Path(directory) / "model", options.max_pixels)
            return await measured(options, model)
    return await measured(options, options.model)


def seeing_more(model: Path, directory: Path, max_pixels: int) -> Path:
    """A model whose images keep up to that many pixels."""
    shutil.copytree(model, directory)
    for name in ("preprocessor_config.json", "processor_config.json"):
        path = directory / name
        fields = json.loads(path.read_text())
        fields.get("image_processor", fields)["size"]["longest_edge"] = max_pixels
        path.write_text(json.dumps(fields))
    return directory


async def measured(options: argparse.Namespace, model_dir: Path) -> None:
    """Run the mix on one model; print its lines."""
    flags = [f"--request-memory-bytes={options.request_mib * MIB}"] if options.request_mib else []
    async with (
        served(model_dir, *flags) as (url, processes),
        aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
        ) as session,
    ):
        async with session.get(f"{url}/v1/models") as reply:
            model = (await reply.json())["data"][0]["id"]
        crowd = Crowd(url, session, options.seconds)
        sampling = asyncio.create_task(sample(processes))
        began = time.monotonic()
        slow = [asyncio.create_task(crowd.upload_slowly()) for _ in range(options.slow)]
        async with asyncio.TaskGroup() as group:
            for number in range(options.calls):
                body = {"model": model, **image_request(number, options.side, options.images)}
                group.create_task(crowd.ask("images", body))
            for number in range(options.waiting):
                group.create_task(crowd.ask("text", {"model": model, **text_request(number)}))
            for bomb in json_bombs():
                group.create_task(crowd.ask("bomb", bomb))
        seconds = time.monotonic() - began
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        sampling.cancel()
        results = [_line(one) for one in processes]
    requests = {"bench": "hostile_mix", "seconds": round(seconds, 1), **crowd.counts}
    for line in (*results, requests):
        print(json.dumps(line), flush=True)


def _line(one: Process) -> dict[str, Any]:
    peak = status_bytes(one.pid, "VmHWM")
    within = peak <= one.own_declared
    decoders = one.declared.get("decoders", 0)
    return {
        "bench": "hostile_mix",
        "process": one.name,
        "declared_bytes": one.own_declared,
        "before_bytes": one.before,
        "peak_bytes": peak,
        "ratio": round(peak / one.own_declared, 3),
        "declared_decoders_bytes": decoders,
        "decoders_bytes": one.decoders,
        "met": within and one.decoders <= decoders,
    }


def main() -> None:
    """Options and one run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    for name, default in (
        ("side", 1022), ("images", 4), ("calls", 40), ("waiting", 512), ("slow", 345),
        ("seconds", 600), ("request-mib", 0), ("max-pixels", 0),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    asyncio.run(hostile_mix(parser.parse_args()))


if __name__ == "__main__":
    main()
