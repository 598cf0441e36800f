"""How the operator's port is opened: the worker's rule (`vlm_worker/wire/listening.py`).

The operator and the worker share no Python, so each has its own copy of these few lines.
"""

from __future__ import annotations

import os
import socket


def listen(address: str, port: int) -> socket.socket:
    """A listening socket; `::` takes IPv4 too, and is `0.0.0.0` if the kernel has no IPv6.

    Raises:
        OSError: naming the address and the port.
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
