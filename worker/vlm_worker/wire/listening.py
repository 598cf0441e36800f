"""Opens the ports of a worker and a gateway, all at the same addresses.

--bind=::       IPv4 and IPv6 through one socket; IPv4 alone if the kernel has no IPv6
other values    that address and no other
"""

from __future__ import annotations

import os
import socket
from typing import Final

ALL_IPV4: Final = "0.0.0.0"  # noqa: S104 - the same as "::", for hosts without IPv6
BACKLOG: Final = 1024


def bindable(address: str) -> str:
    """The address to bind for `--bind`: itself, but `0.0.0.0` for `::` if there is no IPv6."""
    return ALL_IPV4 if address == "::" and not socket.has_dualstack_ipv6() else address


def listen(address: str, port: int, *, backlog: int = BACKLOG) -> socket.socket:
    """A listening socket at `bindable(address)`.

    Raises:
        OSError: naming the address and the port.
    """
    host = bindable(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        sock = socket.create_server(
            (host, port), family=family, dualstack_ipv6=host == "::", backlog=backlog
        )
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(
            f"cannot listen on {host} port {port}: {why}; choose another address or port"
        ) from None
    # asyncio sets it only for its own sockets; without it, each token would wait 40 ms for an ACK.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock
