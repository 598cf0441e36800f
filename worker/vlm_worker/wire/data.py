"""Data connections: fetches one way, the same frames as gRPC's another, without HTTP/2 between.

    consumer ─▶  length u32 | DataRequest                           one fetch at a time
    producer ─▶  kind u8, zeros, length u32 | a frame       ... to the commit
                                            | DataFailure   instead of what was to come

gRPC in Python copies each message three times at its consumer and once at its producer
(docs/decisions/0023). Here a payload goes from where a producer has gathered it into the memory
where its units shall lie. Sockets block, with the timeouts that they were given: the functions that
take one belong on a thread of their own.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError

from vlm_worker.errors import CorruptTransferError, InvalidRequestError, PeerLostError, Refusal
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.wire import identity
from vlm_worker.wire.calls import FetchCall
from vlm_worker.wire.errors import error_of, status_of
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import HEADER, HEADER_BYTES, Frame, Header, Kind, Units

LENGTH: Final = struct.Struct("<I")
RECORD: Final = struct.Struct("<BxxxI")
MAX_REQUEST_BYTES: Final = 4096
CHECKED_BYTES: Final = 1 << 19
"""Of a payload at a time: what has come is checked while it is in a core's own cache."""
MAX_SHORT_BYTES: Final = 8192
MAX_FAILURE_BYTES: Final = 8192
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


class Fetch(enum.Enum):
    """What is fetched: the field of a DataRequest, and the method of gRPC."""

    EMBEDDING = ("embedding", "FetchEmbedding")
    KV = ("kv", "FetchKV")

    def __init__(self, field: str, method: str) -> None:
        self.field = field
        self.method = method


class _Record(enum.IntEnum):
    FRAME = 0
    FAILURE = 1


def request_to(fetch: Fetch, call: FetchCall) -> bytes:
    """What a consumer writes."""
    message = pb.DataRequest(**{fetch.field: identity.fetch_call_to(call)})
    data: bytes = message.SerializeToString()
    return LENGTH.pack(len(data)) + data


def request_of(data: bytes) -> tuple[Fetch, FetchCall]:
    """What a producer reads, without the length.

    Raises:
        InvalidRequestError: it is no fetch.
    """
    try:
        message = pb.DataRequest.FromString(data)
    except DecodeError as error:
        raise InvalidRequestError(f"a data request: {error}") from error
    for fetch in Fetch:
        if message.HasField(fetch.field):
            return fetch, identity.fetch_call_of(getattr(message, fetch.field))
    raise InvalidRequestError("a data request names neither `embedding` nor `kv`")


def send_run(connection: socket.socket, run: Iterable[Frame]) -> None:
    """All frames of a run.

    Raises:
        OSError: the consumer is gone, or takes nothing for the connection's timeout.
        Exception: what making a frame failed with; the frames before it are sent.
    """
    for head, payload in run:
        record = RECORD.pack(_Record.FRAME, len(head) + payload.nbytes)
        _send(connection, record + head, payload)


def send_now(connection: socket.socket, run: Sequence[Frame]) -> bytes:
    """A few bytes, so many as there is room for; returns the rest. Never blocks.

    Raises:
        OSError: the consumer is gone.
    """
    data = b"".join(
        part
        for head, payload in run
        for part in (RECORD.pack(_Record.FRAME, len(head) + payload.nbytes), head, payload)
    )
    try:
        return data[connection.send(data, socket.MSG_DONTWAIT) :]
    except BlockingIOError:
        return data


def send_rest(connection: socket.socket, data: bytes) -> None:
    """What `send_now` left. Raises OSError as `send_run`."""
    connection.sendall(data)


def send_failure(connection: socket.socket, error: Exception) -> None:
    """The last word of a fetch that comes to no commit. Raises OSError as `send_run`."""
    code, message, metadata = status_of(error)
    failure = pb.DataFailure(code=code.value[0], message=message)
    for name, value in metadata:
        failure.metadata[name] = value.encode() if isinstance(value, str) else value
    data = failure.SerializeToString()
    _send(connection, RECORD.pack(_Record.FAILURE, len(data)), memoryview(data))


def receive_units(connection: socket.socket, reader: FrameReader, peer: str) -> Units | None:
    """The next units of a fetch; None when its commit has come.

    Raises:
        OSError: the connection is lost.
        PeerLostError: nothing came for the connection's timeout.
        WorkerError: what the producer raised, or the reader.
    """
    start = memoryview(bytearray(RECORD.size + HEADER_BYTES))
    record, head = start[: RECORD.size], start[RECORD.size :]
    while reader.commit is None:
        num_come = _receive(connection, start, peer=peer, least=RECORD.size)
        kind, length = RECORD.unpack(record)
        if kind == _Record.FAILURE and length <= MAX_FAILURE_BYTES:
            data = memoryview(bytearray(length + HEADER_BYTES))
            data[:HEADER_BYTES] = head
            _receive(connection, data[num_come - RECORD.size : length], peer=peer)
            raise _failure_of(bytes(data[:length]), peer=peer)
        if kind != _Record.FRAME or length < HEADER_BYTES:
            raise CorruptTransferError(
                f"a record of kind {kind} with {length} bytes", refusal=Refusal.SIZE
            )
        _receive(connection, start[num_come:], peer=peer)
        for room in reader.begin(head, length - HEADER_BYTES):
            for position in range(0, room.nbytes, CHECKED_BYTES):
                part = room[position : position + CHECKED_BYTES]
                _receive(connection, part, peer=peer)
                reader.come(part)
        units = reader.end()
        if units is not None:
            return units
    return None


def has_come(connection: socket.socket) -> bool:
    """Whether an answer has come to its commit, so that it can be received without waiting.

    True of short ones, whose units do not travel. Nothing is received.
    """
    try:
        data = connection.recv(MAX_SHORT_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError:
        return False
    start = 0
    while start + RECORD.size + HEADER.size <= len(data):
        kind, length = RECORD.unpack_from(data, start)
        if kind != _Record.FRAME or length < HEADER_BYTES:
            return False
        header = Header(*HEADER.unpack_from(data, start + RECORD.size))
        start += RECORD.size + int(length)
        if header.flags == Kind.COMMIT:
            return start <= len(data)
    return False


def wait_for_answer(connection: socket.socket, *, peer: str) -> None:
    """Wait for the first byte. Raises as `receive_units`."""
    _receive(connection, memoryview(bytearray(1)), peer=peer, least=1, flags=socket.MSG_PEEK)


def shut(connection: socket.socket) -> None:
    """Wake the thread that blocks on it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _failure_of(data: bytes, *, peer: str) -> Exception:
    try:
        failure = pb.DataFailure.FromString(data)
    except DecodeError as error:
        return PeerLostError(f"{peer}: why the fetch failed: {error}")
    metadata: list[tuple[str, Any]] = [
        (name, value if name.endswith("-bin") else value.decode(errors="replace"))
        for name, value in failure.metadata.items()
    ]
    code = _CODES.get(failure.code, grpc.StatusCode.UNKNOWN)
    return error_of(code, failure.message, metadata, peer=peer)


def _send(connection: socket.socket, head: bytes, payload: memoryview) -> None:
    sent = connection.sendmsg((head, payload))
    if sent < len(head):
        connection.sendall(head[sent:])
    connection.sendall(payload[max(0, sent - len(head)) :])


def _receive(
    connection: socket.socket,
    room: memoryview,
    *,
    peer: str,
    least: int | None = None,
    flags: int = 0,
) -> int:
    """Fill `room`, or so much of it as has come with its `least` first bytes; returns how much."""
    num_bytes, least = 0, room.nbytes if least is None else least
    while num_bytes < least:
        left = room[num_bytes:]
        try:
            num_come = connection.recv_into(
                left, left.nbytes, flags | (socket.MSG_WAITALL if least == room.nbytes else 0)
            )
        except BlockingIOError:  # the timeout of a socket that blocks
            raise PeerLostError(f"{peer}: no byte of a frame in time") from None
        if not num_come:
            raise ConnectionResetError("it was closed")
        num_bytes += num_come
    return num_bytes
