"""What a client sends: the body, within bounds of size and time, its deadline, and that it left."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from vlm_worker.gateway.answering import ClientGoneError
from vlm_worker.gateway.api.errors import ApiError, invalid, too_large
from vlm_worker.gateway.memory import Held
from vlm_worker.gateway.turns import Turns

Receive = Callable[[], Awaitable[dict[str, Any]]]

MAX_BODY_BYTES = 32 * 2**20
# Less is read as fast as it comes.
UNPACED_BYTES = 2**20
BODY_SILENCE_SECONDS = 10.0
BODY_SECONDS = 60.0
_SECONDS = re.compile(rb"[0-9]{1,6}(\.[0-9]{1,6})?")


async def read_body(
    scope: dict[str, Any], receive: Receive, *, held: Held, turns: Turns
) -> bytearray:
    """The whole body, a large one in turns with other work.

    `held` has its bytes, those that were announced before the first is read.

    Raises:
        ApiError: 415 for anything but plain JSON, 413 above 32 MiB, 408 when it does not come.
        FullError: the gateway has no memory for it now.
        ClientGoneError: the client left before its end.
    """
    headers = dict(scope["headers"])
    _check_type(headers)
    announced = int(headers.get(b"content-length", b"0"))
    if announced > MAX_BODY_BYTES:
        raise _oversized()
    held.admit(announced)
    body, more = bytearray(), True
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
                body += chunk
                if more and len(body) > UNPACED_BYTES:
                    await turns.rest()
                if more and len(body) < least_bytes(announced, time.monotonic() - started):
                    raise TimeoutError
    except TimeoutError:
        raise ApiError(
            408, "The body of the request did not come in time.", code="timeout"
        ) from None
    return body


def least_bytes(announced: int, seconds: float) -> float:
    """How much of a body must have come after so many seconds: memory is held for all of it."""
    share = (seconds - BODY_SILENCE_SECONDS) / (BODY_SECONDS - BODY_SILENCE_SECONDS)
    return announced * max(0.0, share)


def timeout_of(scope: dict[str, Any]) -> float | None:
    """Seconds that the client gives its request, from `X-Request-Timeout`; None: no bound.

    Raises:
        ApiError: 400 where that is not a number of seconds.
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
    """Returns when the client has gone."""
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
