"""The protocol of data connections: requests one way, gRPC's frames the other way, without HTTP/2.

    consumer ─▶  length u32 | DataRequest                           one fetch at a time
    producer ─▶  kind u8, zeros, length u32 | a frame       ... until the commit
                                            | DataFailure   replaces the rest

gRPC in Python copies each message three times in its consumer and once in its producer
(docs/decisions/0023). Here a payload goes from the producer's buffer directly to its destination.
Connections block, with timeouts: call functions that take one on their own thread. With mutual TLS
(docs/decisions/0033) they are `SecureConnection`s, and all bytes above are inside TLS records.
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
from vlm_worker.wire.frame_reader import FrameReader
from vlm_worker.wire.frames import HEADER, HEADER_BYTES, Frame, FrameKind, Header, Units
from vlm_worker.wire.messages import FETCH_CALL, FetchCall
from vlm_worker.wire.secure_connection import DataConnection, SecureConnection, raw_of
from vlm_worker.wire.status import error_of, status_of

LENGTH: Final = struct.Struct("<I")
RECORD: Final = struct.Struct("<BxxxI")
MAX_REQUEST_BYTES: Final = 4096
CHECKED_BYTES: Final = 1 << 19
"""Bytes received at a time, so that they are digested while they are in the L2 cache."""
MAX_SHORT_BYTES: Final = 8192
MAX_FAILURE_BYTES: Final = 8192
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


class Fetch(enum.Enum):
    """What is fetched: the field of a DataRequest, and the gRPC method."""

    EMBEDDING = ("embedding", "FetchEmbedding")
    KV = ("kv", "FetchKV")

    def __init__(self, field: str, method: str) -> None:
        self.field = field
        self.method = method


class _Record(enum.IntEnum):
    FRAME = 0
    FAILURE = 1


def request_to(fetch: Fetch, call: FetchCall) -> bytes:
    """The bytes that a consumer sends."""
    message = pb.DataRequest(**{fetch.field: FETCH_CALL.encode(call)})
    data: bytes = message.SerializeToString()
    return LENGTH.pack(len(data)) + data


def request_of(data: bytes) -> tuple[Fetch, FetchCall]:
    """Parse a request without its length prefix; raises InvalidRequestError."""
    try:
        message = pb.DataRequest.FromString(data)
    except DecodeError as error:
        raise InvalidRequestError(f"a data request: {error}") from error
    for fetch in Fetch:
        if message.HasField(fetch.field):
            return fetch, FETCH_CALL.decode(getattr(message, fetch.field))
    raise InvalidRequestError("a data request names neither `embedding` nor `kv`")


def send_batch(connection: DataConnection, batch: Iterable[Frame]) -> None:
    """Send all frames of a batch.

    Raises:
        OSError: the consumer is gone, or reads nothing for the connection's timeout.
        Exception: an error of building a frame; the frames before it are sent.
    """
    for head, payload in batch:
        record = RECORD.pack(_Record.FRAME, len(head) + payload.nbytes)
        _send(connection, record + head, payload)


def send_nonblocking(connection: DataConnection, batch: Sequence[Frame]) -> bytes:
    """Send what fits the socket buffer; returns the rest, for `send_rest`.

    Raises OSError; never blocks.
    """
    data = b"".join(
        part
        for head, payload in batch
        for part in (RECORD.pack(_Record.FRAME, len(head) + payload.nbytes), head, payload)
    )
    return _send_now(connection, data)


def send_rest(connection: DataConnection, rest: bytes) -> None:
    """Send what `send_nonblocking` returned. Raises OSError as `send_batch`."""
    raw_of(connection).sendall(rest)


def send_request(connection: DataConnection, request: bytes) -> bool:
    """Send a request without blocking: the buffer of an idle connection holds it."""
    try:
        return not _send_now(connection, request)
    except OSError:
        return False


def send_failure(connection: DataConnection, error: Exception) -> None:
    """End a fetch without commit. Raises OSError as `send_batch`."""
    code, message, metadata = status_of(error)
    failure = pb.DataFailure(code=code.value[0], message=message)
    for name, value in metadata:
        failure.metadata[name] = value.encode() if isinstance(value, str) else value
    data = failure.SerializeToString()
    _send(connection, RECORD.pack(_Record.FAILURE, len(data)), memoryview(data))


def receive_units(connection: DataConnection, reader: FrameReader, peer: str) -> Units | None:
    """Receive the next units of a fetch; None after its commit.

    Raises:
        OSError: the connection is lost.
        PeerLostError: no byte arrived for the connection's timeout.
        WorkerError: an error of the producer or of the reader.
    """
    start = memoryview(bytearray(RECORD.size + HEADER_BYTES))
    record, head = start[: RECORD.size], start[RECORD.size :]
    while reader.commit is None:
        num_received = _receive(connection, start, peer=peer, min_bytes=RECORD.size)
        kind, length = RECORD.unpack(record)
        if kind == _Record.FAILURE and length <= MAX_FAILURE_BYTES:
            data = memoryview(bytearray(length + HEADER_BYTES))
            data[:HEADER_BYTES] = head
            _receive(connection, data[num_received - RECORD.size : length], peer=peer)
            raise _failure_of(bytes(data[:length]), peer=peer)
        if kind != _Record.FRAME or length < HEADER_BYTES:
            raise CorruptTransferError(
                f"a record of kind {kind} with {length} bytes", refusal=Refusal.SIZE
            )
        _receive(connection, start[num_received:], peer=peer)
        for buffer in reader.begin(head, length - HEADER_BYTES):
            for position in range(0, buffer.nbytes, CHECKED_BYTES):
                part = buffer[position : position + CHECKED_BYTES]
                _receive(connection, part, peer=peer)
                reader.update(part)
        units = reader.end()
        if units is not None:
            return units
    return None


def is_readable(connection: DataConnection) -> bool:
    """Whether a whole answer, commit included, can be received without blocking.

    True only for short answers with out-of-band payloads. Nothing is consumed.
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
        if header.flags == FrameKind.COMMIT:
            return start <= len(data)
    return False


def wait_for_answer(connection: DataConnection, *, peer: str) -> None:
    """Block until the first byte. Raises as `receive_units`."""
    _receive(connection, memoryview(bytearray(1)), peer=peer, flags=socket.MSG_PEEK)


def shut_down(connection: DataConnection) -> None:
    """Wake the thread that blocks on the connection."""
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


def _send_now(connection: DataConnection, data: bytes) -> bytes:
    """Send what fits the socket buffer; returns the rest, encrypted if the connection is."""
    if isinstance(connection, SecureConnection):
        data = connection.encrypt(data)
    try:
        return data[raw_of(connection).send(data, socket.MSG_DONTWAIT) :]
    except BlockingIOError:
        return data


def _send(connection: DataConnection, head: bytes, payload: memoryview) -> None:
    sent = connection.sendmsg((head, payload))
    if sent < len(head):
        connection.sendall(head[sent:])
    connection.sendall(payload[max(0, sent - len(head)) :])


def _receive(
    connection: DataConnection,
    buffer: memoryview,
    *,
    peer: str,
    min_bytes: int | None = None,
    flags: int = 0,
) -> int:
    """Receive at least `min_bytes` into `buffer`, or all of it; returns how many."""
    num_bytes = 0
    if min_bytes is None:
        min_bytes, flags = buffer.nbytes, flags | socket.MSG_WAITALL
    while num_bytes < min_bytes:
        remaining = buffer[num_bytes:]
        try:
            num_received = connection.recv_into(remaining, remaining.nbytes, flags)
        except BlockingIOError:  # the timeout of a blocking socket
            raise PeerLostError(f"{peer}: no byte of a frame in time") from None
        if not num_received:
            raise ConnectionResetError("the connection was closed")
        num_bytes += num_received
    return num_bytes
