"""Serves the progress of `vlm-worker fetch` over HTTP: `GET /progress`, as JSON (docs/contract.md).

The operator shows it in the condition ModelReady. A download does not depend on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

logger = logging.getLogger(__name__)
REQUEST_SECONDS = 5.0


@dataclasses.dataclass
class FetchProgress:
    """The state of one fetch. One thread writes it, the server's threads read it.

    Attributes:
        total_bytes: bytes of all files of the model; 0 while they are listed.
        present_bytes: bytes that an earlier run downloaded.
        num_bytes: bytes that are downloaded; while `checking`, bytes that are checked.
        checking: whether the files are complete and their hashes are compared.
    """

    clock: Callable[[], float] = time.monotonic
    total_bytes: int = 0
    present_bytes: int = 0
    num_bytes: int = 0
    checking: bool = False
    _began: float | None = None

    def downloaded(self, num_bytes: float, total: float) -> None:
        """Count `num_bytes` of the `total` bytes that this run downloads."""
        if self._began is None:
            self._began = self.clock()
            self.present_bytes = max(0, self.total_bytes - int(total))
        self.num_bytes = min(self.total_bytes, self.present_bytes + int(num_bytes))

    def checked(self, num_bytes: int) -> None:
        """Count a file whose hash was compared."""
        self.num_bytes = (self.num_bytes if self.checking else 0) + num_bytes
        self.checking = True

    def seconds_left(self) -> float | None:
        """Return the time until all is downloaded at the mean rate; None if it is unknown."""
        if self.checking or self._began is None:
            return None
        seconds, done = self.clock() - self._began, self.num_bytes - self.present_bytes
        if seconds <= 0 or done <= 0:
            return None
        return (self.total_bytes - self.num_bytes) * seconds / done

    def to_json(self, pod_uid: str) -> dict[str, Any]:
        """Return the body of `GET /progress`."""
        left = self.seconds_left()
        return {
            "version": 1,
            "pod_uid": pod_uid,
            "num_bytes": self.num_bytes,
            "total_bytes": self.total_bytes,
            "checking": self.checking,
            "seconds_left": None if left is None else round(left, 1),
        }


@contextlib.contextmanager
def served(progress: FetchProgress, bind: str, port: int | None, pod_uid: str) -> Iterator[int]:
    """Serve `progress` meanwhile; yields the port, 0 without one. An error is only logged."""
    if port is None:
        yield 0
        return

    class Handler(http.server.BaseHTTPRequestHandler):
        """Answers one path."""

        timeout = REQUEST_SECONDS

        def do_GET(self) -> None:
            known = self.path == "/progress"
            body = json.dumps(progress.to_json(pod_uid)).encode() if known else b""
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  as in the base
            """Requests are not logged."""

    class Server(http.server.ThreadingHTTPServer):
        """Listens at an address of either family."""

        address_family = socket.AF_INET6 if ":" in bind else socket.AF_INET

        def server_bind(self) -> None:
            if self.address_family == socket.AF_INET6:
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self.socket.bind(self.server_address)
            self.server_address = self.socket.getsockname()[:2]
            self.server_name, self.server_port = bind, self.server_address[1]

    try:
        server = Server((bind, port), Handler)
    except OSError as error:
        logger.warning("the progress is not served", extra={"bind": bind, "error": str(error)})
        yield 0
        return
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
