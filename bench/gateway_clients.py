"""Clients of a gateway in one process: HTTP/1.1 on kept connections, without an HTTP library.

    python bench/gateway_clients.py --port=8000 --connections=64 --tokens=4 --seconds=5 [--stream]

Each connection sends the next request as soon as an answer ends. With `--rate`, requests start at
this rate on any free connection, and latencies count from when they were due. Prints one JSON line
of the time after `--warmup`, with the processor time that each of `--pids` used.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import json
import os
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

EVENT: Final = b"data: {"
LAST_CHUNK: Final = b"0\r\n\r\n"
LAST_BYTES: Final = b"data: [DONE]\n\n\r\n" + LAST_CHUNK
ACCEPTED: Final = b"HTTP/1.1 200"
QUESTION: Final = "What shape is in the image, and what is its color? Answer in one word."
TICKS: Final = os.sysconf("SC_CLK_TCK")


def request_bytes(*, num_tokens: int, stream: bool) -> bytes:
    """A text chat completion, with headers as clients of OpenAI's API send them."""
    body = json.dumps(
        {
            "model": "shapes",
            "messages": [
                {"role": "system", "content": "You are a helpful assistant."},
                {"role": "user", "content": QUESTION},
            ],
            "max_tokens": num_tokens,
            "temperature": 0.7,
            "stream": stream,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\naccept: application/json\r\n"
        "user-agent: bench\r\nauthorization: Bearer none\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@dataclasses.dataclass(slots=True)
class Tally:
    """Counts since the last `reset`; `tokens` counts events with tokens."""

    answers: int = 0
    tokens: int = 0
    failed: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)

    def reset(self) -> None:
        self.answers = self.tokens = self.failed = 0
        self.seconds.clear()


class Client(asyncio.Protocol):
    """One connection. `free` is called with it when it may send the next request."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._tally = load.tally
        self._transport: Any = None
        self._began = 0.0
        self._received = bytearray()
        self._end = 0
        self._tail = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def send(self, due: float) -> None:
        """Send a request; its latency counts from `due`."""
        self._began = due
        self._received.clear()
        self._end, self._tail = 0, b""
        self._transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        if self._load.stream:
            self._streamed(data)
        else:
            self._whole(data)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._load.lost()

    def close(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def _whole(self, data: bytes) -> None:
        self._received += data
        received = self._received
        if not self._end:
            head = received.find(b"\r\n\r\n")
            if head < 0:
                return
            begin = received.index(b"content-length: ", 0, head) + 16
            self._end = head + 4 + int(received[begin : received.index(b"\r\n", begin)])
        if len(received) >= self._end:
            self._ended(ok=received.startswith(ACCEPTED))

    def _streamed(self, data: bytes) -> None:
        tail = self._tail
        text = tail + data
        self._tally.tokens += text.count(EVENT, max(0, len(tail) - len(EVENT) + 1))
        self._tail = text[-len(LAST_BYTES) :]
        if not tail and not data.startswith(ACCEPTED):
            self._ended(ok=False)
        elif text.endswith(LAST_CHUNK):
            self._tally.tokens -= 1  # the event with the finish reason
            self._ended(ok=text.endswith(LAST_BYTES))

    def _ended(self, *, ok: bool) -> None:
        self._tally.answers += 1
        self._tally.failed += not ok
        self._tally.seconds.append(time.perf_counter() - self._began)
        self._load.free(self)


class Load:
    """The connections and their requests."""

    def __init__(self, request: bytes, *, stream: bool, rate: float) -> None:
        self.request = request
        self.stream = stream
        self.tally = Tally()
        self._rate = rate
        self._clients: list[Client] = []
        self._idle: deque[Client] = deque()
        self._due: deque[float] = deque()
        self.num_lost = 0

    def free(self, client: Client) -> None:
        """Send the next request on this connection, or keep it for one that is due later."""
        if not self._rate:
            client.send(time.perf_counter())
        elif self._due:
            client.send(self._due.popleft())
        else:
            self._idle.append(client)

    def lost(self) -> None:
        """Count a connection that the gateway closed."""
        self.num_lost += 1

    async def start(self, port: int, num_connections: int) -> None:
        """Open the connections; without a rate, each sends its first request."""
        loop = asyncio.get_running_loop()
        for _ in range(num_connections):
            _, client = await loop.create_connection(lambda: Client(self), "127.0.0.1", port)
            self._clients.append(client)
            self.free(client)
            if self.stream:
                await asyncio.sleep(0.002)  # answers begin at different times

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            client.close()

    async def run(self) -> None:
        """Start requests at the rate, evenly."""
        due = time.perf_counter()
        while True:
            due += 1 / self._rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if self._idle:
                self._idle.popleft().send(due)
            else:
                self._due.append(due)


def processor_seconds(pid: int) -> dict[str, float]:
    """Processor time of a process: its main thread, its other threads, and all that ended."""
    process = Path(f"/proc/{pid}")
    total = _seconds(process / "stat")
    main = _seconds(process / "task" / str(pid) / "stat")
    return {"main": main, "others": total - main}


def _seconds(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def busy_seconds() -> float:
    """Processor time of everything that runs on this machine, idle time and waits left out."""
    fields = Path("/proc/stat").read_text().partition("\n")[0].split()[1:]
    return sum(int(field) for i, field in enumerate(fields[:8]) if i not in (3, 4)) / TICKS


def quantile(ordered: list[float], share: float) -> float:
    """The value below which this share is, in milliseconds."""
    return round(ordered[round(share * (len(ordered) - 1))] * 1e3, 2) if ordered else 0.0


async def main() -> None:
    """One measurement."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--rate", type=float, default=0.0, help="0: as many as are answered")
    parser.add_argument("--warmup", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--pids", type=int, nargs="*", default=[])
    options = parser.parse_args()
    gc.disable()
    request = request_bytes(num_tokens=options.tokens, stream=options.stream)
    load = Load(request, stream=options.stream, rate=options.rate)
    await load.start(options.port, options.connections)
    pacing = asyncio.create_task(load.run()) if options.rate else None
    await asyncio.sleep(options.warmup)
    pids = [*options.pids, os.getpid()]
    before, busy = [processor_seconds(pid) for pid in pids], busy_seconds()
    load.tally.reset()
    began = time.perf_counter()
    await asyncio.sleep(options.seconds)
    seconds = time.perf_counter() - began
    after, busy = [processor_seconds(pid) for pid in pids], busy_seconds() - busy
    if pacing is not None:
        pacing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await pacing
    used = [{k: round(b[k] - a[k], 3) for k in a} for a, b in zip(before, after, strict=True)]
    tally, ordered = load.tally, sorted(load.tally.seconds)
    figures = {
        "seconds": round(seconds, 3),
        "answers": tally.answers,
        "tokens": tally.tokens,
        "failed": tally.failed + load.num_lost,
        "p50_ms": quantile(ordered, 0.5),
        "p95_ms": quantile(ordered, 0.95),
        "used": used,
        "used_by_others": round(busy - sum(sum(one.values()) for one in used), 3),
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
