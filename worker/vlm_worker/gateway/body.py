"""Reads a request's body within limits of size and time, its timeout and its disconnect."""

from __future__ import annotations

import asyncio
import mmap
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from vlm_worker.gateway.api.data_urls import BodyBytes
from vlm_worker.gateway.api.errors import ApiError, invalid, too_large
from vlm_worker.gateway.memory import MemoryReservation
from vlm_worker.gateway.responses import ClientGoneError
from vlm_worker.gateway.turns import Turns
from vlm_worker.wire.buffers import private_memory

Receive = Callable[[], Awaitable[dict[str, Any]]]

MAX_BODY_BYTES = 32 * 2**20
# Up to this size a body is read without rests for other requests.
UNPACED_BYTES = 2**20
BODY_SILENCE_SECONDS = 10.0
BODY_SECONDS = 60.0
_SECONDS = re.compile(rb"[0-9]{1,6}(\.[0-9]{1,6})?")


async def read_body(
    scope: dict[str, Any], receive: Receive, *, held: MemoryReservation, turns: Turns
) -> BodyBytes:
    """Read the whole body. While reading a large body, yield to other requests.

    `held` accounts for the bytes. The announced length is admitted before the first read.

    Raises:
        ApiError: 415 for anything but plain JSON, 413 above 32 MiB, 408 if it is too slow.
        FullError: the gateway has no free memory for the body.
        ClientGoneError: the client disconnected before the end of the body.
    """
    headers = dict(scope["headers"])
    _check_type(headers)
    announced = int(headers.get(b"content-length", b"0"))
    if announced > MAX_BODY_BYTES:
        raise _oversized()
    held.admit(announced)
    body, more = BodyBuffer(announced), True
    started = time.monotonic()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while more:
                async with asyncio.timeout(BODY_SILENCE_SECONDS):
                    message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError("the client left before the end of its request")
                chunk, more = message.get("body", b""), message.get("more_body", False)
                if len(body) + len(chunk) > MAX_BODY_BYTES:
                    raise _oversized()
                held.admit(len(body) + len(chunk))
                body.add(chunk)
                if more and len(body) > UNPACED_BYTES:
                    await turns.rest()
                if more and len(body) < least_bytes(announced, time.monotonic() - started):
                    raise TimeoutError
    except TimeoutError:
        raise ApiError(
            408, "The body of the request did not come in time.", code="timeout"
        ) from None
    return body.whole()


class BodyBuffer:
    """The received bytes of a body. The bytes of a large body never move.

    If no free heap follows a growing bytearray, each growth copies it, which takes milliseconds.
    An anonymous memory map allocates pages on write and grows without a copy.
    """

    def __init__(self, announced: int) -> None:
        self._announced = announced
        self._small = bytearray()
        self._large: mmap.mmap | None = None
        self._length = 0

    def __len__(self) -> int:
        """Number of received bytes."""
        return self._length

    def add(self, chunk: bytes) -> None:
        end = self._length + len(chunk)
        if self._large is None and end <= UNPACED_BYTES:
            self._small += chunk
        else:
            self._room(end)[self._length : end] = chunk
        self._length = end

    def whole(self) -> BodyBytes:
        """Return the complete body; call it after the last `add`."""
        if self._large is None:
            return self._small
        if len(self._large) != self._length:
            self._large.resize(self._length)
        return self._large

    def _room(self, end: int) -> mmap.mmap:
        if self._large is None:
            self._large = private_memory(max(self._announced, 2 * end))
            self._large[: self._length] = bytes(self._small)
            self._small.clear()
        elif len(self._large) < end:
            self._large.resize(2 * end)
        return self._large


def least_bytes(announced: int, seconds: float) -> float:
    """Return the bytes that must have arrived after `seconds`.

    A slow client would otherwise occupy memory for the announced length.
    """
    share = (seconds - BODY_SILENCE_SECONDS) / (BODY_SECONDS - BODY_SILENCE_SECONDS)
    return announced * max(0.0, share)


def timeout_of(scope: dict[str, Any]) -> float | None:
    """Return `X-Request-Timeout` in seconds; None without the header.

    Raises:
        ApiError: 400 if the header is not a number of seconds.
    """
    for name, value in scope["headers"]:
        if name == b"x-request-timeout":
            if not _SECONDS.fullmatch(value):
                raise invalid(
                    "X-Request-Timeout must be a number of seconds.",
                    param="X-Request-Timeout",
                    code="invalid_header",
                )
            return float(value)
    return None


async def until_disconnect(receive: Receive) -> Exception:
    """Wait until the client disconnects; return the error to raise."""
    while (await receive())["type"] != "http.disconnect":
        pass
    return ClientGoneError("the client disconnected")


def _check_type(headers: dict[bytes, bytes]) -> None:
    kind, _, parameters = headers.get(b"content-type", b"").decode("latin-1").partition(";")
    if kind.strip().lower() != "application/json":
        raise ApiError(
            415, "The content type must be application/json.", code="unsupported_media_type"
        )
    charset = parameters.strip().lower().replace('"', "")
    if charset.startswith("charset=") and charset != "charset=utf-8":
        raise ApiError(415, "The charset must be utf-8.", code="unsupported_media_type")
    if headers.get(b"content-encoding", b"identity").lower() != b"identity":
        raise ApiError(415, "The body must not be compressed.", code="unsupported_content_encoding")


def _oversized() -> ApiError:
    return too_large(
        f"The body has more than {MAX_BODY_BYTES} bytes.", param=None, code="request_too_large"
    )
