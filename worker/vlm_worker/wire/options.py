"""How gRPC is set up, on both sides.

Without `http2.ping_timeout_ms`, keepalive notices a frozen peer after more than a minute; without
`min_recv_ping_interval`, a server kills a healthy idle stream with `too_many_pings`.
"""

from __future__ import annotations

MAX_MESSAGE_BYTES = 4 << 20
CHUNK_BYTES = 1 << 20
PING_SECONDS = 10
PING_TIMEOUT_SECONDS = 5
MAX_STREAMS = 1024

Options = list[tuple[str, int]]


def channel_options() -> Options:
    """Of a client: a frozen peer is noticed within 15 s; no retry behind our back."""
    return [
        *_sizes(),
        ("grpc.keepalive_time_ms", PING_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_SECONDS * 1000),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_SECONDS * 1000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.enable_retries", 0),
        # a pod that comes back is tried again within a second, not within two minutes
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options() -> Options:
    """Of a server: it pings too, so that a vanished client's streams end."""
    return [
        *_sizes(),
        ("grpc.keepalive_time_ms", PING_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_SECONDS * 1000),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_SECONDS * 1000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_TIMEOUT_SECONDS * 1000),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # a port in use is an error to report, not one to share
        ("grpc.so_reuseport", 0),
    ]


def _sizes() -> Options:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", 8 << 10),
    ]
