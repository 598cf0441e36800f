"""A worker without a model: HTTP/2 and the messages of worker.proto, in few microseconds a token.

    python bench/gateway_stand_in.py --port=9000 [--step-ms=10]

It implements HTTP/2 for gRPC's client itself: a server of grpc.aio uses as much processor time as
the gateway that is measured. It is one pod for all stages. A prompt gets its first token at once.
Without `--step-ms` the others follow at once; with it, all answers get one token per step, as from
a batch. As on the wire of workers, each token is a message.

    client ── HEADERS(path), DATA(request) ──▶ Connection ─▶ Replies.of ─▶ messages, status
           ◀─ HEADERS, DATA(message) ...       Stream: sends what the windows allow
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import json
import struct
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1] / "worker"))

from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.types import FinishReason, Role, Stage, StageSpan
from vlm_worker.wire import messages
from vlm_worker.wire.rpc import METHODS

BOOT_ID: Final = bytes(16)
CAPACITY_TOKENS: Final = 1 << 24
TOKEN_IDS: Final = range(39, 65)
"""The letters A to Z of examples/shapes/model: each has text of its own."""
LOAD_SECONDS: Final = 1.0

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS: Final = 4
HEADER_TABLE_SIZE, MAX_STREAMS, INITIAL_WINDOW = 1, 3, 4
DEFAULT_WINDOW: Final = 65_535
OUR_WINDOW: Final = 1 << 30
UNIMPLEMENTED: Final = 12
# static table: 8 is `:status: 200`, 31 is `content-type`; the others are literals
OPENING: Final = b"\x88\x0f\x10\x10application/grpc"
FRAME: Final = struct.Struct(">BHBBI")
LENGTH: Final = struct.Struct(">BI")


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One HTTP/2 frame."""
    size = len(payload)
    return FRAME.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id) + payload


def packed(message: Any) -> bytes:
    """A message with gRPC's prefix: not compressed, and its length."""
    data: bytes = message.SerializeToString()
    return LENGTH.pack(0, len(data)) + data


def ending(status: int = 0) -> bytes:
    """The header block that ends a call."""
    text = str(status).encode()
    return b"\x00\x0bgrpc-status" + bytes([len(text)]) + text


class Stream:
    """The replies of one call; they wait while a window is closed."""

    def __init__(self, connection: Connection, stream_id: int, window: int) -> None:
        self._connection = connection
        self._id = stream_id
        self.window = window
        self.body = bytearray()
        self.method = ""
        self.waiting: deque[bytes] = deque()
        self._opened = False
        self._status: int | None = None

    def send(self, message: bytes) -> None:
        """Send a message, after those that wait."""
        if not self._opened:
            self._opened = True
            self._connection.put(frame(HEADERS, END_HEADERS, self._id, OPENING))
        if self.waiting or not self._fits(message):
            self.waiting.append(message)
        else:
            self._write(message)

    def end(self, status: int = 0) -> None:
        """End the call after the last message."""
        self._status = status
        self.resume()

    def resume(self) -> None:
        """Send what the windows allow now."""
        while self.waiting and self._fits(self.waiting[0]):
            self._write(self.waiting.popleft())
        if self._status is not None and not self.waiting:
            opening = b"" if self._opened else OPENING
            trailers = frame(
                HEADERS, END_HEADERS | END_STREAM, self._id, opening + ending(self._status)
            )
            self._connection.put(trailers)
            self._connection.streams.pop(self._id, None)

    def _fits(self, message: bytes) -> bool:
        return len(message) <= min(self.window, self._connection.window)

    def _write(self, message: bytes) -> None:
        self.window -= len(message)
        self._connection.window -= len(message)
        self._connection.put(frame(DATA, 0, self._id, message))


class Connection(asyncio.Protocol):
    """One connection of a client. `replies` answers its calls."""

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self.streams: dict[int, Stream] = {}
        self.window = self._stream_window = DEFAULT_WINDOW
        self._received = bytearray()
        self._num_unacknowledged = 0
        self._out: list[bytes] = []
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        settings = struct.pack(
            # without a dynamic table, each block of headers has its path in plain bytes
            ">HIHIHI",
            HEADER_TABLE_SIZE,
            0,
            MAX_STREAMS,
            1 << 20,
            INITIAL_WINDOW,
            OUR_WINDOW,
        )
        self.put(frame(SETTINGS, 0, 0, settings))
        self.put(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", OUR_WINDOW)))
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.streams.clear()
        self._replies.forget(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._received.startswith(PREFACE[:3]):
            if len(self._received) < len(PREFACE):
                return
            del self._received[: len(PREFACE)]
        for kind, flags, stream_id, payload in self._frames():
            self._handle(kind, flags, stream_id, payload)
        self.flush()

    def close(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    def put(self, data: bytes) -> None:
        """Send with the next `flush`."""
        self._out.append(data)

    def flush(self) -> None:
        """Write all at once, as one step of a batch does."""
        if self._out:
            self._transport.write(b"".join(self._out))
            self._out.clear()

    def _frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        received, begin = self._received, 0
        while len(received) - begin >= FRAME.size:
            high, low, kind, flags, stream_id = FRAME.unpack_from(received, begin)
            end = begin + FRAME.size + (high << 16) + low
            if end > len(received):
                break
            yield kind, flags, stream_id & 0x7FFFFFFF, bytes(received[begin + FRAME.size : end])
            begin = end
        del received[:begin]

    def _handle(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == HEADERS:
            assert flags & END_HEADERS, "CONTINUATION is not supported"
            stream = Stream(self, stream_id, self._stream_window)
            self.streams[stream_id] = stream
            stream.method = self._replies.method(payload)
        elif kind == DATA:
            self._acknowledge(len(payload))
            if (called := self.streams.get(stream_id)) is None:
                return
            called.body += payload
            if flags & END_STREAM:
                self._replies.answer(called, self)
        elif kind == SETTINGS and not flags & ACK:
            self._apply(payload)
            self.put(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.put(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            self._widen(stream_id, *struct.unpack(">I", payload))
        elif kind == RST_STREAM:
            self.streams.pop(stream_id, None)

    def _acknowledge(self, num_bytes: int) -> None:
        self._num_unacknowledged += num_bytes
        if self._num_unacknowledged > OUR_WINDOW // 2:
            self.put(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._num_unacknowledged)))
            self._num_unacknowledged = 0

    def _apply(self, settings: bytes) -> None:
        for name, number in struct.iter_unpack(">HI", settings):
            if name == INITIAL_WINDOW:
                for stream in self.streams.values():
                    stream.window += number - self._stream_window
                self._stream_window = number

    def _widen(self, stream_id: int, num_bytes: int) -> None:
        if stream_id:
            if (stream := self.streams.get(stream_id)) is not None:
                stream.window += num_bytes
                stream.resume()
            return
        self.window += num_bytes
        for stream in [stream for stream in self.streams.values() if stream.waiting]:
            stream.resume()


@dataclasses.dataclass(slots=True)
class Answer:
    """An answer that gets a token per step, from index `next` on."""

    stream: Stream
    connection: Connection
    next: int
    num_tokens: int


class Replies:
    """Answers calls, and gives all answers a token per step."""

    def __init__(self, *, step_seconds: float = 0.0) -> None:
        self._step_seconds = step_seconds
        self._answers: dict[int, Answer] = {}
        self._paths = {method.path.encode(): name for name, method in METHODS.items()}
        self._tasks: set[asyncio.Task[None]] = set()

    def method(self, headers: bytes) -> str:
        """The called method; "" if it is unknown."""
        # the longest first: one path may begin with another
        found = [path for path in self._paths if path in headers]
        return self._paths[max(found, key=len)] if found else ""

    def answer(self, stream: Stream, connection: Connection) -> None:
        """Answer a call whose request is complete."""
        request = bytes(stream.body[LENGTH.size :])
        match stream.method:
            case "Prefill":
                _prefill(pb.PrefillRequest.FromString(request), stream)
            case "Decode":
                self._decode(pb.DecodeRequest.FromString(request), stream, connection)
            case "WatchLoad":
                task = asyncio.create_task(_watch_load(stream, connection))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case name if name in UNARY:
                stream.send(packed(UNARY[name]()))
                stream.end()
            case _:
                stream.end(UNIMPLEMENTED)

    def forget(self, connection: Connection) -> None:
        """Drop the answers of a lost connection."""
        self._answers = {
            key: answer
            for key, answer in self._answers.items()
            if answer.connection is not connection
        }

    def _decode(self, request: pb.DecodeRequest, stream: Stream, connection: Connection) -> None:
        num_tokens = request.sampling.max_tokens
        begin = len(request.token_ids) - request.num_prompt_tokens + 1
        answer = Answer(stream, connection, begin, num_tokens)
        if self._step_seconds:
            self._answers[id(stream)] = answer
            return
        while _step(answer):
            pass

    async def run(self) -> None:
        """Run steps; a step that is late starts at once, and none is made up for."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._step_seconds, loop.time())
            await asyncio.sleep(due - loop.time())
            connections = {answer.connection for answer in self._answers.values()}
            for key, answer in list(self._answers.items()):
                if not _step(answer):
                    del self._answers[key]
            for connection in connections:
                connection.flush()


def _prefill(request: pb.PrefillRequest, stream: Stream) -> None:
    stream.send(
        packed(
            messages.PREFILL_REPLY.encode(
                messages.Reply(
                    messages.Accepted(request.transfer_id, BOOT_ID, bytes(16), 10), (), 0
                )
            )
        )
    )
    index = len(request.token_ids) - request.num_prompt_tokens
    ends = request.sampling.max_tokens <= index + 1
    first = messages.FirstToken(
        index, _token_id(index), 0, FinishReason.LENGTH if ends else None, None
    )
    spans = (StageSpan("prefill_queue", 0.0, 1e-5, 0), StageSpan("prefill", 1e-5, 2e-5, 0))
    stream.send(packed(messages.PREFILL_REPLY.encode(messages.Reply(first, spans, 2e-5))))
    stream.send(
        packed(messages.PREFILL_REPLY.encode(messages.Reply(messages.PrefillDone(), (), 0)))
    )
    stream.end()


def _step(answer: Answer) -> bool:
    """Send the next token of an answer; False if it is complete."""
    if answer.next < answer.num_tokens:
        answer.stream.send(_token(answer.next))
        answer.next += 1
    if answer.next < answer.num_tokens:
        return True
    finished = messages.Finished(FinishReason.LENGTH, answer.num_tokens)
    answer.stream.send(packed(messages.DECODE_REPLY.encode(messages.Reply(finished, (), 0))))
    answer.stream.end()
    return False


@functools.cache
def _token(index: int) -> bytes:
    tokens = messages.Tokens(index, (_token_id(index),))
    return packed(messages.DECODE_REPLY.encode(messages.Reply(tokens, (), 1e-3 * index)))


def _token_id(index: int) -> int:
    return TOKEN_IDS[index % len(TOKEN_IDS)]


async def _watch_load(stream: Stream, connection: Connection) -> None:
    load = messages.Load(0, 0, 0.0, CAPACITY_TOKENS, CAPACITY_TOKENS, True, BOOT_ID)
    while stream in connection.streams.values():
        stream.send(packed(messages.LOAD.encode(load)))
        connection.flush()
        await asyncio.sleep(LOAD_SECONDS)


def _hello() -> Any:
    return messages.HELLO.encode(
        messages.Hello(
            role=Role.DECODE,
            stages=frozenset(Stage),
            model="shapes",
            model_revision="",
            pod_name="stand-in",
            pod_uid="stand-in",
            boot_id=BOOT_ID,
            layout_fingerprint=bytes(16),
            embed_fingerprint=bytes(16),
            compat="",
            weights="bfloat16",
            limits=messages.Limits(64, CAPACITY_TOKENS, 4096, 1024),
            min_tokens=True,
        )
    )


UNARY: Final = {
    "Hello": _hello,
    "Cancel": lambda: messages.CANCEL_REPLY.encode(
        messages.CancelReply(messages.CancelOutcome.NOT_FOUND)
    ),
    "RenewLeases": pb.RenewLeasesReply,
    "ReleaseLease": pb.ReleaseLeaseReply,
}


async def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=0.0)
    options = parser.parse_args()
    replies = Replies(step_seconds=options.step_ms / 1000)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(replies), "127.0.0.1", options.port)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    if options.step_ms:
        await replies.run()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
