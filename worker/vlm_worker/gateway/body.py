"""Reads and decodes a request's body within limits of size, time and memory.

read_body ─▶ bytes ─▶ read_json ─▶ values, and long data URLs as views

    {"model":"m", ... "url":"data:image/png;base64,iVBOR..."}       up to 32 MiB
    {"model":"m", ... "url":"6f2c...1a.0"}    6f2c...1a.0 -> view   up to 4 MiB, and the images

Taken out are long data URLs that are values of a key "url" or "image_url", and the long base64 of
safetensors files that are values of a key "data" or "image_embeds". The rest is parsed.

The decoder rejects duplicate keys, NaN, lone surrogates and deep nesting. Parsers differ on them,
so another parser may have validated a different request. The decoder counts values before it
decodes them, in the text with its strings blanked out:

    {"a": [1, {"b": "…"}]}  ──blank──▶  {:[1,{:}]}   depth 3, 4 values, 2 keys
"""

from __future__ import annotations

import asyncio
import dataclasses
import mmap
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec

from vlm_worker.gateway.api.errors import ApiError, invalid
from vlm_worker.gateway.http_response import ClientGoneError
from vlm_worker.gateway.memory import MemoryReservation
from vlm_worker.gateway.turns import Steps, Turns
from vlm_worker.wire.buffers import private_memory

Receive = Callable[[], Awaitable[dict[str, Any]]]
BodyBytes = bytes | bytearray | mmap.mmap
"""The bytes of a body; a large one is in an anonymous memory map."""

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
                if more and len(body) < min_bytes(announced, time.monotonic() - started):
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
        return self._length

    def add(self, chunk: bytes) -> None:
        end = self._length + len(chunk)
        if self._large is None and end <= UNPACED_BYTES:
            self._small += chunk
        else:
            self._reserve(end)[self._length : end] = chunk
        self._length = end

    def whole(self) -> BodyBytes:
        """Return the complete body; call it after the last `add`."""
        if self._large is None:
            return self._small
        if len(self._large) != self._length:
            self._large.resize(self._length)
        return self._large

    def _reserve(self, end: int) -> mmap.mmap:
        if self._large is None:
            self._large = private_memory(max(self._announced, 2 * end))
            self._large[: self._length] = bytes(self._small)
            self._small.clear()
        elif len(self._large) < end:
            self._large.resize(2 * end)
        return self._large


def min_bytes(announced: int, seconds: float) -> float:
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
    return ApiError(
        413, f"The body has more than {MAX_BODY_BYTES} bytes.", code="request_too_large"
    )


MAX_REST_BYTES: Final = 4 * 2**20
"""Limit on a body without its images; no context fits more text."""
MIN_DATA_URL_BYTES: Final = 4096
"""Minimum size of a URL that is taken out. Shorter ones are parsed with the rest."""
MAX_DEPTH: Final = 32
MAX_VALUES: Final = 16_384
"""Limit on the JSON values of a body; 1,024 messages with an image each have 8,200."""
MAX_DATA_STRINGS: Final = MAX_VALUES
"""Limit on strings that begin with "data:"."""

# Blanking this many bytes takes less than a millisecond, for any content.
_PIECE = 16 * 1024
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

_OPENING = b'"data:'
# In the base64 of a safetensors file: six zeros of a length below 65,536, and "{".
_EMBEDDING = b"AAAAAAAB7"
_EMBEDDING_KEY = re.compile(
    rb'"(?:data|image_embeds)"[ \t\r\n]*:[ \t\r\n]*(")(?:[A-Za-z0-9+/_-]|\\/){3}\Z'
)
_URL_KEY = re.compile(rb'"(?:image_)?url"[ \t\r\n]*:[ \t\r\n]*\Z')
_KEY_BYTES = 64
_BACKSLASH = 0x5C
# Searching this many bytes takes a fraction of a millisecond.
_WINDOW = 2**17
_YIELD_EVERY = 256


@dataclasses.dataclass(frozen=True, slots=True)
class JsonBody:
    """A JSON object. `images` has what was taken out, by its placeholders in `value`."""

    value: dict[str, Any]
    images: Mapping[str, memoryview]


def read_json(body: BodyBytes, hold: Callable[[int, int], None] | None = None) -> Steps[JsonBody]:
    """Decode the JSON object in `body`.

    Before it decodes, it calls `hold` with the numbers of bytes and values without the images.

    Raises:
        ApiError: 400; the message does not contain the input.
        FullError: from `hold`.
    """
    rest, images = yield from _take_images(body)
    num_keys, num_values = yield from _count_keys_and_values(rest)
    if hold is not None:
        hold(len(rest), num_values)
    try:
        value = msgspec.json.decode(rest)
    except msgspec.ValidationError as error:
        raise _invalid("a number is out of range") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid("it cannot be parsed as JSON in UTF-8") from error
    yield
    if not isinstance(value, dict):
        raise _invalid("it must be a JSON object")
    if _count_keys(value) != num_keys:
        raise _invalid("a key occurs twice in one object")
    return JsonBody(value, images)


def _take_images(body: BodyBytes) -> Steps[tuple[bytes, Mapping[str, memoryview]]]:
    """Take the images out of a body, as views without a copy.

    Returns:
        JSON with a placeholder for each image's URL, and by placeholder the bytes between the
        quotes of the URL, with JSON escapes. The placeholders are random, so no client can forge
        one.

    Raises:
        ApiError: 400; more than 4 MiB remain, or too many strings begin with "data:".
    """
    view = memoryview(body)
    token = secrets.token_hex(16)
    images: dict[str, memoryview] = {}
    kept: list[memoryview | bytes] = []
    openings = _Openings(body)
    num_kept = kept_to = at = num_seen = 0
    while num_kept + at - kept_to <= MAX_REST_BYTES:
        # If no image begins before this limit, the rest is too large.
        limit = kept_to + MAX_REST_BYTES - num_kept
        start, is_embedding = yield from openings.next(at, limit)
        if start < 0:
            break
        at = start + 1
        num_seen += 1
        if num_seen > MAX_DATA_STRINGS:
            raise invalid(
                f'The body has more than {MAX_DATA_STRINGS} strings that begin with "data:".',
                param=None,
                code="invalid_json",
            )
        if num_seen % _YIELD_EVERY == 0:
            yield
        end = yield from _find(body, b'"', at, len(body))
        if _is_image(body, start, end, is_embedding=is_embedding):
            name = f"{token}.{len(images)}"
            images[name] = view[at:end]
            kept += (view[kept_to:at], name.encode())
            num_kept += at - kept_to
            kept_to = at = end
    num_kept += len(body) - kept_to
    if num_kept > MAX_REST_BYTES:
        raise invalid(
            f"Without its images the body has {num_kept} bytes; at most {MAX_REST_BYTES} are "
            "accepted: send less text and white space.",
            param=None,
            code="request_too_large",
        )
    return b"".join((*kept, view[kept_to:])), images


def _is_image(body: BodyBytes, start: int, end: int, *, is_embedding: bool) -> bool:
    """Whether the string between the quotes at `start` and `end` is taken out.

    That is a long data URL, or with `is_embedding` any long string. A quote after a backslash does
    not end a string; base64 contains no quote.
    """
    if end - start <= MIN_DATA_URL_BYTES or body[end - 1] == _BACKSLASH:
        return False
    return is_embedding or _URL_KEY.search(body, max(0, start - _KEY_BYTES), start) is not None


class _Openings:
    """The quotes before data URLs and embeddings, in order. No byte is searched twice."""

    def __init__(self, body: BodyBytes) -> None:
        self._body = body
        self._url = -1  # the next data URL, if it is not behind the caller
        self._no_url_before = self._no_embedding_before = 0

    def next(self, at: int, limit: int) -> Steps[tuple[int, bool]]:
        """Find the next quote from `at` on that begins before `limit`.

        Returns:
            Its index, -1 if there is none, and whether it is that of an embedding.
        """
        url = yield from self._next_url(at, limit)
        end = limit if url < 0 else url
        embedding = yield from self._next_embedding(at, end)
        return (url, False) if embedding < 0 else (embedding, True)

    def _next_url(self, at: int, limit: int) -> Steps[int]:
        if self._url < at:
            start = max(at, self._no_url_before)
            self._url = yield from _find(self._body, _OPENING, start, limit)
            self._no_url_before = max(start, limit) if self._url < 0 else self._url
        return self._url if self._url < limit else -1

    def _next_embedding(self, at: int, end: int) -> Steps[int]:
        start, num_others = max(at, self._no_embedding_before), 0
        while (found := (yield from _find(self._body, _EMBEDDING, start, end))) >= 0:
            start = self._no_embedding_before = found + 1
            first = max(0, found - _KEY_BYTES)
            key = _EMBEDDING_KEY.search(self._body, first, found)
            if key is not None:
                return key.start(1)
            num_others += 1
            if num_others % _YIELD_EVERY == 0:
                yield
        self._no_embedding_before = max(start, end)
        return -1


def _find(body: BodyBytes, what: bytes, at: int, limit: int) -> Steps[int]:
    """Return `body.find(what, at)` for matches that begin before `limit`, else -1."""
    end = min(limit, len(body))
    while at < end:
        found = body.find(what, at, min(at + _WINDOW, end) + len(what) - 1)
        if found >= 0:
            return found
        at += _WINDOW
        if at < end:  # callers that search short parts yield themselves
            yield
    return -1


def _count_keys_and_values(text: bytes) -> Steps[tuple[int, int]]:
    """Count the keys, repeated ones included, and the values of a JSON text.

    Raises:
        ApiError: 400; the text is nested too deeply or has too many values.
    """
    at = depth = inside = num_keys = num_quotes = 0
    num_values = 1
    while at < len(text):
        end = _between_escapes(text, at, at + _PIECE)
        piece = text[at:end]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        # The remaining quotes delimit strings.
        num_quotes += piece.count(b'"')
        if num_quotes > 4 * MAX_VALUES:
            raise _too_many_values()
        segments = piece.split(b'"')
        skeleton = b"".join(segments[inside::2])
        inside = (inside + len(segments) - 1) % 2
        num_keys += skeleton.count(b":")
        num_values += sum(map(skeleton.count, (b",", b"[", b"{")))
        if num_values > MAX_VALUES:
            raise _too_many_values()
        depth = _depth_after(depth, skeleton.translate(None, _NOT_BRACKETS))
        at = end
        yield
    return num_keys, num_values


def _between_escapes(text: bytes, start: int, end: int) -> int:
    """Return `end`, or `end` - 1 if that would split an escape."""
    piece = text[start:end]
    num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
    return end - num_backslashes % 2 if end < len(text) else len(text)


def _depth_after(depth: int, brackets: bytes) -> int:
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise _invalid(f"it is nested deeper than {MAX_DEPTH} levels")
        if depth < 0:
            raise _invalid("it cannot be parsed as JSON in UTF-8")
    return depth


def _count_keys(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(_count_keys(item) for item in value.values())
    if isinstance(value, list):
        return sum(_count_keys(item) for item in value)
    return 0


def _too_many_values() -> ApiError:
    return _invalid(f"it has more than {MAX_VALUES} values")


def _invalid(reason: str) -> ApiError:
    return invalid(f"The body is not valid: {reason}.", param=None, code="invalid_json")
