"""gRPC: the RPCs of worker.proto from its descriptors, and options of clients and servers.

A stream of `Frame` carries the frames' bytes without protobuf encoding (wire/frames.py).

Without `http2.ping_timeout_ms`, keepalive detects a frozen peer after more than a minute. Without
`min_recv_ping_interval`, a server ends a healthy idle stream with `too_many_pings`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from google.protobuf import message_factory
from google.protobuf.message import Message

from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.settings.timers import Timers

MAX_MESSAGE_BYTES = 4 << 20
SENT_CHUNK_BYTES = 256 << 10
"""Chunk size of a client: a worker counts a chunk when it is complete; until then gRPC buffers it
for each call."""
MAX_STREAMS = 1024
SEND_IMAGES = "vlm-send-pictures"
"""In the initial metadata of an accepted Encode: the client may send the images.

Workers of other releases read and send this key, so its spelling stays.
"""
DATA_PORT = "vlm-data-port"
"""In the initial metadata of a fetch: the data port (`wire/data_protocol.py`)."""

Options = list[tuple[str, int]]


def channel_options(timers: Timers) -> Options:
    """Options of a client: it detects a frozen peer (`Timers.frozen`); gRPC does not retry."""
    return [
        *_sizes(),
        *_pings(timers),
        ("grpc.enable_retries", 0),
        # a restarted pod is tried again within a second, not within two minutes
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(timers: Timers) -> Options:
    """Options of a server: it pings too, so that the streams of a lost client end."""
    return [
        *_sizes(),
        *_pings(timers),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _milliseconds(timers.ping_timeout)),
        # a server that was suspended reads several pings at once; that must not end its streams
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # a port in use is an error
        ("grpc.so_reuseport", 0),
    ]


def _pings(timers: Timers) -> Options:
    timeout = _milliseconds(timers.ping_timeout)
    return [
        ("grpc.keepalive_time_ms", _milliseconds(timers.ping)),
        ("grpc.keepalive_timeout_ms", timeout),
        ("grpc.http2.ping_timeout_ms", timeout),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _sizes() -> Options:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", 8 << 10),
    ]


PACKAGE = "vlm.v1"


@dataclasses.dataclass(frozen=True, slots=True)
class Method:
    service: str
    name: str
    client_streaming: bool
    server_streaming: bool
    request_to_bytes: Callable[[Any], bytes]
    request_from_bytes: Callable[[bytes], Any]
    response_to_bytes: Callable[[Any], bytes]
    response_from_bytes: Callable[[bytes], Any]

    @property
    def path(self) -> str:
        return f"/{PACKAGE}.{self.service}/{self.name}"


def _serializers(descriptor: Any) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    if descriptor.name == pb.Frame.DESCRIPTOR.name:
        return bytes, bytes
    message: type[Message] = message_factory.GetMessageClass(descriptor)
    return message.SerializeToString, message.FromString


METHODS = {
    method.name: Method(
        service,
        method.name,
        method.client_streaming,
        method.server_streaming,
        *_serializers(method.input_type),
        *_serializers(method.output_type),
    )
    for service, descriptor in pb.DESCRIPTOR.services_by_name.items()
    for method in descriptor.methods
}
"""By name: names are unique across the services."""
