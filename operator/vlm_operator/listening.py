"""Opens the operator's listening socket, by the worker's rule (`vlm_worker/wire/sockets.py`).

The operator and the worker share no Python code, so each has a copy of this function.
"""

from __future__ import annotations

import os
import socket


def listen(address: str, port: int) -> socket.socket:
    """Open a listening socket.

    `::` accepts IPv4 and IPv6. If the kernel has no IPv6, `0.0.0.0` replaces it.

    Raises:
        OSError: the process cannot listen; the message names address and port.
    """
    dual = address == "::" and socket.has_dualstack_ipv6()
    host = "0.0.0.0" if address == "::" and not dual else address  # noqa: S104 - as "::" is
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(
            f"cannot listen on {host} port {port}: {why}; choose another --bind or --metrics-port"
        ) from None
