"""How gRPC is set up, on both sides.

Without `http2.ping_timeout_ms`, keepalive notices a frozen peer after more than a minute; without
`min_recv_ping_interval`, a server kills a healthy idle stream with `too_many_pings`.
"""

from __future__ import annotations

from vlm_worker.settings.timers import Timers

MAX_MESSAGE_BYTES = 4 << 20
CHUNK_BYTES = 1 << 20
MAX_STREAMS = 1024
SEND_PICTURES = "vlm-send-pictures"
"""In the initial metadata of an Encode that is taken: the chunks may come."""
DATA_PORT = "vlm-data-port"
"""In the initial metadata of a fetch: where the next ones may go (`wire/data.py`)."""

Options = list[tuple[str, int]]


def channel_options(timers: Timers) -> Options:
    """Of a client: a frozen peer is noticed (`Timers.frozen`); no retry behind our back."""
    return [
        *_sizes(),
        *_pings(timers),
        ("grpc.enable_retries", 0),
        # a pod that comes back is tried again within a second, not within two minutes
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(timers: Timers) -> Options:
    """Of a server: it pings too, so that a vanished client's streams end."""
    return [
        *_sizes(),
        *_pings(timers),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _milliseconds(timers.ping_timeout)),
        # one that stood still reads several pings at once, and must not end its streams for that
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # a port in use is an error to report, not one to share
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
