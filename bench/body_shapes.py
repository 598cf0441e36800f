"""How large bodies of one client delay the streams of others: the gaps between their tokens.

    python bench/body_shapes.py [--rounds 3] [--seconds 2] [--streams 8] [--senders 2]

A gateway and a worker with a stub model are separate processes. Streams run without pause. For each
shape, other connections send bodies of 31 MiB of that shape, one after another, from a process with
the lowest priority, which simulates other machines. Rounds with and without bodies alternate. One
JSON line per shape has the 99th percentile of the gaps in both, the ratio of each round with its
median, and the responses to the bodies.

"to a sink" is the control: the bodies go to a process that only reads them. Its ratio is the cost
of sending on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from workers import free_port, message_of

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "shapes" / "model"
NUM_BYTES = 31 * 2**20
REST_BYTES = 4 * 2**20 - 2**12
"""Maximum bytes of a body that are parsed, without its images."""
START_SECONDS = 120.0
HEAD = b'{"model":"shapes","max_tokens":1,"messages":[{"role":"user","content":"hi"}],"x":'


def repeated(unit: bytes) -> bytes:
    """An array that repeats one unit."""
    return HEAD + b"[" + unit * (NUM_BYTES // len(unit)) + b"0]}"


def of_parts() -> bytes:
    """700 messages of 1,024 empty texts."""
    message = {"role": "user", "content": [{"type": "text", "text": ""}] * 1024}
    return json.dumps({"model": "shapes", "max_tokens": 1, "messages": [message] * 700}).encode()


def of_image(num_bytes: int, text: str = "") -> bytes:
    """One noise image, and a text."""
    url = b"data:image/png;base64," + base64.b64encode(os.urandom(num_bytes * 3 // 4))
    parts = [{"type": "image_url", "image_url": {"url": "URL"}}, {"type": "text", "text": text}]
    body = {"model": "shapes", "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    return json.dumps(body).encode().replace(b"URL", url)


def beside_image(rest: bytes) -> bytes:
    """A valid body with one image, and then `rest`: up to 4 MiB of it are parsed."""
    assert len(rest) < REST_BYTES, len(rest)
    whole = of_image(NUM_BYTES - len(rest) - 2**10)
    return whole[:-1] + b',"x":' + rest + b"}"


def filled(unit: bytes, before: bytes = b"", after: bytes = b"") -> bytes:
    """One unit, repeated up to the parsed maximum."""
    return before + unit * ((REST_BYTES - 2**11) // len(unit)) + after


def of_escaped_images() -> bytes:
    """Thirty images, each slash of them escaped."""
    data = base64.b64encode(os.urandom(2**20 * 3 // 4)).replace(b"/", b"\\/")
    part = b'{"type":"image_url","image_url":{"url":"data:image\\/png;base64,%b"}}' % data
    parts = b",".join([part] * (NUM_BYTES // len(part)))
    head = b'{"model":"shapes","max_tokens":1,"messages":[{"role":"user","content":['
    return head + parts + b"]}]}"


CONTROL = "to a sink"

SHAPES: dict[str, Callable[[], bytes]] = {
    CONTROL: lambda: bytes(NUM_BYTES),
    "[]": lambda: repeated(b"[],"),
    "{}": lambda: repeated(b"{},"),
    '{"a":{}}': lambda: repeated(b'{"a":{}},'),
    "0,": lambda: repeated(b"0,"),
    '"",': lambda: repeated(b'"",'),
    "nested": lambda: b"[" * NUM_BYTES,
    "nested objects": lambda: b'{"a":' * (NUM_BYTES // 5),
    "escapes": lambda: HEAD + b'"' + b"\\n" * (NUM_BYTES // 2) + b'"}',
    "quotes": lambda: b'{"a":' + b'\\"' * (NUM_BYTES // 2),
    "data: strings": lambda: repeated(b'"data:",'),
    "700x1024 empty texts": of_parts,
    "one image": lambda: of_image(NUM_BYTES),
    "one image of 20 MiB": lambda: of_image(26 * 2**20),
    "an image and 4 MiB of escapes": lambda: of_image(NUM_BYTES - 2**22, "\n" * (2**21 - 2**10)),
    "white space": lambda: b" " * NUM_BYTES + HEAD + b"0}",
    "a number": lambda: HEAD + b"1" * NUM_BYTES + b"}",
    "messages": lambda: (
        HEAD[: HEAD.index(b"[") + 1]
        + b'{"role":"user","content":"hi"},' * (NUM_BYTES // 31)
        + b"0]}"
    ),
    "30 escaped images": of_escaped_images,
    "an image and a number": lambda: beside_image(filled(b"1")),
    "an image and a fraction": lambda: beside_image(filled(b"1", b"0.")),
    "an image and emojis": lambda: beside_image(filled(b"\\ud83d\\ude00", b'"', b'"')),
    "an image and white space": lambda: beside_image(filled(b" ", after=b"0")),
    "an image and 16,000 lists": lambda: beside_image(
        b"[" + b'["%b"],' % (b"a" * 240) * 8000 + b"0]"
    ),
    "an image and nesting": lambda: beside_image(
        b"[" + (b"[" * 29 + b'"%b"' % (b"a" * 4000) + b"]" * 29 + b",") * 500 + b"0]"
    ),
    "an image and one key again": lambda: beside_image(
        b"{" + (b'"%b":0,' % (b"k" * 240)) * 16000 + b'"b":0}'
    ),
    "an image and tools": lambda: beside_image(
        b"[" + b'{"type":"function","function":{"name":"f","parameters":{}}},' * 1600 + b"0]"
    ),
}


@contextlib.asynccontextmanager
async def process(ready: str, *args: str) -> AsyncIterator[None]:
    """A `vlm-worker` process that has logged `ready`; it is ended on exit."""
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "vlm_worker", *args, f"--model={MODEL}", "--served-name=shapes",
        "--bind=127.0.0.1", cwd=ROOT / "worker", stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert running.stderr is not None
    draining = None
    try:
        async with asyncio.timeout(START_SECONDS):
            while message_of((await running.stderr.readline()).decode()) != ready:
                if running.stderr.at_eof():
                    raise SystemExit(f"{args[0]} ended")
        draining = asyncio.create_task(running.stderr.read())
        yield
    finally:
        running.terminate()
        await running.wait()
        if draining is not None:
            await draining


async def stream(port: int, gaps: list[float], stop: asyncio.Event) -> None:
    """Stream answers one after another; record the gaps within each."""
    request = {"model": "shapes", "messages": [{"role": "user", "content": "hi"}], "stream": True,
               "max_tokens": 1000, "ignore_eos": True}  # fmt: skip
    body = json.dumps(request).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    while not stop.is_set():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + body)
        last = None
        while not stop.is_set() and (line := await reader.readline()):
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last = now
        writer.close()


async def sink(port: int) -> None:
    """The process that reads bodies of `NUM_BYTES` as fast as a gateway, and discards them."""

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        num_left = NUM_BYTES
        while num_left > 0 and (piece := await reader.read(64 * 1024)):
            num_left -= len(piece)
            await asyncio.sleep(0.001)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(read, "127.0.0.1", port)
    print("ready", flush=True)
    await server.serve_forever()


@contextlib.asynccontextmanager
async def sink_process() -> AsyncIterator[int]:
    """The port of a sink, which is ended on exit."""
    port = free_port()
    running = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--sink", f"--port={port}", stdout=asyncio.subprocess.PIPE
    )
    assert running.stdout is not None
    await running.stdout.readline()
    try:
        yield port
    finally:
        running.terminate()
        await running.wait()


async def gaps_of(port: int, num_streams: int, seconds: float) -> list[float]:
    """The gaps that streams see for some seconds."""
    gaps: list[float] = []
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(num_streams):
            group.create_task(stream(port, gaps, stop))
        await asyncio.sleep(1.0)
        gaps.clear()
        await asyncio.sleep(seconds)
        found = sorted(gaps)
        stop.set()
    return found


async def send(port: int, body: bytes, seconds: float, statuses: Counter[str]) -> None:
    """Send bodies one after another, each on a new connection."""
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    )
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answer = b""
        with contextlib.suppress(OSError):
            writer.write(head)
            for start in range(0, len(body), 2**20):
                writer.write(body[start : start + 2**20])
                await writer.drain()
            answer = await reader.read()
        statuses[answer[9:12].decode() or "none"] += 1
        writer.close()


async def sender(shape: str, port: int, num_senders: int, seconds: float) -> None:
    """The process that sends; prints the responses."""
    body = SHAPES[shape]()
    os.nice(19)
    statuses: Counter[str] = Counter()
    print("ready", flush=True)
    async with asyncio.TaskGroup() as group:
        for _ in range(num_senders):
            group.create_task(send(port, body, seconds, statuses))
    print(json.dumps(statuses), flush=True)


async def under_load(
    shape: str, port: int, options: argparse.Namespace, sink_port: int
) -> tuple[list[float], dict[str, int]]:
    """The gaps while bodies of a shape are sent."""
    target = sink_port if shape == CONTROL else port
    sending = await asyncio.create_subprocess_exec(
        sys.executable, __file__, f"--send={shape}", f"--port={target}",
        f"--senders={options.senders}", f"--seconds={options.seconds + 1.5}",
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert sending.stdout is not None
    await sending.stdout.readline()
    gaps = await gaps_of(port, options.streams, options.seconds)
    return gaps, json.loads(await sending.stdout.read())


def percentile(ordered: list[float], share: float) -> float:
    """A percentile of sorted seconds, in milliseconds."""
    return round(ordered[round(share * (len(ordered) - 1))] * 1e3, 2)


async def main() -> None:
    """Start everything, measure, stop everything."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--senders", type=int, default=2)
    parser.add_argument("--shape", action="append", choices=SHAPES, default=[])
    parser.add_argument("--send", choices=SHAPES, help=argparse.SUPPRESS)
    parser.add_argument("--sink", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.send:
        await sender(options.send, options.port, options.senders, options.seconds)
        return
    if options.sink:
        await sink(options.port)
        return
    grpc, public = free_port(), free_port()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(process(
            "ready", "decode", "--stages=encoder,prefill,decode", "--runner=checksum",
            f"--grpc-port={grpc}", f"--http-port={free_port()}", "--threads=1",
        ))  # fmt: skip
        await stack.enter_async_context(process(
            "gateway serves", "gateway", f"--http-port={public}", f"--admin-port={free_port()}",
            f"--worker=127.0.0.1:{grpc}",
        ))  # fmt: skip
        sink_port = await stack.enter_async_context(sink_process())
        for shape in options.shape or SHAPES:
            alone: list[float] = []
            loaded: list[float] = []
            ratios: list[float] = []
            answers: Counter[str] = Counter()
            for _ in range(options.rounds):
                quiet = await gaps_of(public, options.streams, options.seconds)
                busy, said = await under_load(shape, public, options, sink_port)
                ratios.append(percentile(busy, 0.99) / percentile(quiet, 0.99))
                alone, loaded = sorted(alone + quiet), sorted(loaded + busy)
                answers.update(said)
            figure = {
                "bench": "body_shapes",
                "shape": shape,
                "alone_p99_ms": percentile(alone, 0.99),
                "loaded_p99_ms": percentile(loaded, 0.99),
                "ratio": round(statistics.median(ratios), 2),
                "ratios": [round(ratio, 2) for ratio in ratios],
                "alone_max_ms": percentile(alone, 1.0),
                "loaded_max_ms": percentile(loaded, 1.0),
                "gaps": [len(alone), len(loaded)],
                "answers": answers,
            }
            print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
