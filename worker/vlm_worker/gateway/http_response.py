"""Sends the response to one HTTP request: a whole body, or a stream of server-sent events.

The server applies backpressure. A client that reads too slowly counts as disconnected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

import msgspec

from vlm_worker.gateway.api.errors import ApiError
from vlm_worker.gateway.request_guard import within

logger = logging.getLogger(__name__)

Send = Callable[[dict[str, Any]], Coroutine[Any, Any, None]]

Json = bytes | bytearray
encode = msgspec.json.Encoder().encode

# A client that reads nothing for this time counts as disconnected.
SLOW_READER_SECONDS = 30.0
MESSAGE_BYTES: Final = 64 * 1024


class ClientGoneError(Exception):
    """The client disconnected or stopped reading."""


class Response:
    """The HTTP response. It starts with the first byte, so that earlier errors set the status.

    `failure` writes the last event of a stream that fails; the writer of the answer may set it.
    `headers` returns more headers, when the response starts.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.failure = _error_event
        self.headers: Callable[[], Mapping[str, str]] = dict

    async def write(self, body: bytes) -> None:
        """Send bytes of an event stream; start it if necessary."""
        if not self.started:
            await self._start(
                200,
                {
                    "content-type": "text/event-stream; charset=utf-8",
                    "cache-control": "no-cache",
                    "x-accel-buffering": "no",
                },
            )
        await self._put({"type": "http.response.body", "body": body, "more_body": True})

    async def end(self) -> None:
        await self._put({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        fixed = {"content-type": "application/json", "content-length": str(len(body))}
        await self._start(status, {**fixed, **headers})
        await self._put({"type": "http.response.body", "body": body, "more_body": False})

    async def in_parts(self, parts: Sequence[Json]) -> None:
        """Send a large body in small messages, so that no copy of it is made at once."""
        length = sum(map(len, parts))
        headers = {"content-type": "application/json", "content-length": str(length)}
        await self._start(200, headers)
        for part in parts:
            for at in range(0, len(part), MESSAGE_BYTES):
                body = bytes(memoryview(part)[at : at + MESSAGE_BYTES])
                await self._put({"type": "http.response.body", "body": body, "more_body": True})
        await self.end()

    async def fail(self, error: ApiError) -> None:
        """Send an error to a client that is still there.

        It is an HTTP error, or an event if the stream has started.
        """
        try:
            if self.started:
                await self.write(self.failure(error))
                await self.end()
            else:
                await self.whole(error.status, encode(error.body), error.headers)
        except ClientGoneError:
            logger.debug("the client disconnected before the error was sent")

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        fields = {**headers, **self.headers()}
        raw = [(name.encode(), value.encode()) for name, value in fields.items()]
        await self._put({"type": "http.response.start", "status": status, "headers": raw})

    async def _put(self, message: dict[str, Any]) -> None:
        """Send a message. The server applies backpressure while the client's buffer is full.

        Raises:
            ClientGoneError: the client disconnected or read nothing for `SLOW_READER_SECONDS`.
        """
        try:
            await within(SLOW_READER_SECONDS, self._send(message))
        except TimeoutError:
            raise ClientGoneError("the client reads nothing") from None
        except OSError as error:
            raise ClientGoneError("the client disconnected") from error


def event(body: dict[str, Any]) -> bytes:
    """Return `body` as a server-sent event."""
    return b"data: " + encode(body) + b"\n\n"


def _error_event(error: ApiError) -> bytes:
    return event(error.body)
