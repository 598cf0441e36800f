"""Sends one chat completion over HTTP and reads its stream: deltas, then usage and stage times.

The stream has the server-sent events of OpenAI's API. The gateway adds the field `timing` to the
chunk with the usage: `{"ttft_ms": 41.5, "stages": {"media": 3.1, ...}}`. Other servers do not.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import io
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from vlm_cli.output import CliError
from vlm_cli.target import Target

_PREFIXES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}


class ApiError(Exception):
    """The server answered with an error.

    Attributes:
        kind: the error's code, for counting.
        retry: whether the client should retry later: True for 429 and 503.
    """

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry = status in (429, 503)


@dataclasses.dataclass(frozen=True)
class Answer:
    """One finished answer. Times are seconds on the client's clock, from the request's start.

    Attributes:
        text: the whole text.
        first_token: arrival of the first token; None for an empty answer.
        total: arrival of the last byte.
        arrivals: arrival of each piece of text.
        usage: token counts of the server.
        stages: milliseconds by stage, measured by the gateway; empty from other servers.
        ttft_ms: the gateway's TTFT; None from other servers.
        finish_reason: `stop` or `length`.
    """

    text: str
    first_token: float | None
    total: float
    arrivals: tuple[float, ...]
    usage: dict[str, Any]
    stages: dict[str, float]
    ttft_ms: float | None
    finish_reason: str | None


def chat_body(
    model: str,
    question: str,
    images: Sequence[bytes] = (),
    *,
    max_tokens: int,
    temperature: float = 0.0,
    detail: str | None = None,
) -> dict[str, Any]:
    """Return the JSON of a streamed chat completion; images precede the question as data URLs."""
    parts: list[dict[str, Any]] = []
    for image in images:
        reference = {"url": data_url(image)}
        if detail is not None:
            reference["detail"] = detail
        parts.append({"type": "image_url", "image_url": reference})
    parts.append({"type": "text", "text": question})
    return {
        "model": model,
        "messages": [{"role": "user", "content": parts if images else question}],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def read_image(path: Path) -> bytes:
    """Return the bytes of an image file.

    Raises:
        CliError: the file cannot be read, or the gateway does not accept its format.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise CliError(f"the image {path} cannot be read: {reason}") from error
    if media_type(data) is None:
        raise CliError(f"{path} is not a PNG, JPEG, WebP or GIF", "convert it to PNG")
    return data


def media_type(data: bytes) -> str | None:
    """Return the MIME type; None if the gateway does not accept the format."""
    return next((mime for prefix, mime in _PREFIXES.items() if data.startswith(prefix)), None)


def data_url(data: bytes) -> str:
    """Return an image as a `data:` URL for the OpenAI API."""
    return f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"


async def stream_chat(
    session: aiohttp.ClientSession,
    target: Target,
    body: dict[str, Any],
    *,
    on_text: Callable[[str], None] | None = None,
) -> Answer:
    """Send one request and read its answer to the end.

    Raises:
        ApiError: the server refused, sent an error event, or ended the stream before [DONE].
        aiohttp.ClientError, TimeoutError: the connection failed.
    """
    start = time.perf_counter()
    text, arrivals = [], []
    usage: dict[str, Any] = {}
    timing: dict[str, Any] = {}
    finish_reason = None
    url = f"{target.url}/v1/chat/completions"
    headers = {"Content-Type": "application/json", **target.headers}
    # a file object, so that aiohttp writes a body of megabytes in chunks
    data = io.BytesIO(json.dumps(body).encode())
    async with session.post(url, data=data, headers=headers, ssl=target.verify) as response:
        if response.status != 200:
            raise _refusal(response.status, await response.read())
        async with contextlib.aclosing(_events(response.content)) as events:
            async for event in events:
                if "error" in event:
                    raise _error(500, event["error"])
                usage = event.get("usage") or usage
                timing = event.get("timing") or timing
                for choice in event.get("choices") or []:
                    finish_reason = choice.get("finish_reason") or finish_reason
                    if piece := (choice.get("delta") or {}).get("content"):
                        arrivals.append(time.perf_counter() - start)
                        text.append(piece)
                        if on_text is not None:
                            on_text(piece)
    return Answer(
        text="".join(text),
        first_token=arrivals[0] if arrivals else None,
        total=time.perf_counter() - start,
        arrivals=tuple(arrivals),
        usage=usage,
        stages={str(k): float(v) for k, v in (timing.get("stages") or {}).items()},
        ttft_ms=timing.get("ttft_ms"),
        finish_reason=finish_reason,
    )


async def _events(content: aiohttp.StreamReader) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the JSON of each event up to [DONE].

    Raises:
        ApiError: an event is not JSON, or the stream ends before [DONE].
    """
    async for raw in content:
        line = raw.strip()
        if line == b"data: [DONE]":
            return
        if line.startswith(b"data:"):
            try:
                event = json.loads(line[5:])
            except ValueError as error:
                raise ApiError(200, "bad_event", "an event of the stream is not JSON") from error
            if isinstance(event, dict):
                yield event
    raise ApiError(200, "cut_off", "the stream ended before [DONE]")


def _refusal(status: int, body: bytes) -> ApiError:
    try:
        return _error(status, json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        text = body[:200].decode(errors="replace").strip()
        return ApiError(status, f"http_{status}", f"HTTP {status}: {text}")


def _error(status: int, error: Any) -> ApiError:
    if not isinstance(error, dict):
        return ApiError(status, f"http_{status}", str(error))
    kind = error.get("code") or error.get("type") or f"http_{status}"
    where = f" ({error['param']})" if error.get("param") else ""
    return ApiError(status, str(kind), f"{error.get('message', 'unknown error')}{where}")


def failure_kind(error: BaseException) -> str:
    """Return the kind of failure in one word, for counting."""
    if isinstance(error, ApiError):
        return error.kind
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return "timeout"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connect"
    return "connection_lost"
