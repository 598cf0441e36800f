"""Who may talk: the one seam where channels and ports are made secure.

Plaintext until mutual TLS is built here; `WARNING` is logged by every process that opens a port, so
that nobody takes the digest of a frame for authenticity.
"""

from __future__ import annotations

from typing import Any

import grpc

from vlm_worker.settings.timers import Timers
from vlm_worker.wire.options import channel_options

WARNING = "gRPC between pods is plaintext and unauthenticated: keep it inside a NetworkPolicy"


def open_channel(address: str, timers: Timers) -> Any:
    """A `grpc.aio.Channel` to a worker."""
    return grpc.aio.insecure_channel(address, options=channel_options(timers))


def add_port(server: Any, address: str) -> int:
    """Let a `grpc.aio.Server` listen; returns the port.

    Raises:
        OSError: the address cannot be bound.
    """
    try:
        port: int = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
    if port == 0:
        raise OSError(f"cannot listen on {address}")
    return port
