"""Takes the images out of a body before it is parsed, as views without a copy.

    {"model":"m", ... "url":"data:image/png;base64,iVBOR..."}       up to 32 MiB
    {"model":"m", ... "url":"6f2c...1a.0"}    6f2c...1a.0 -> view   up to 4 MiB, and the images

Only long data URLs that are values of a key "url" are taken out. The rest is parsed.
"""

from __future__ import annotations

import dataclasses
import mmap
import re
import secrets
from collections.abc import Mapping
from typing import Final

from vlm_worker.gateway.api.errors import ApiError, invalid
from vlm_worker.gateway.turns import Steps

MAX_REST_BYTES: Final = 4 * 2**20
"""Limit on a body without its images; no context fits more text."""
MAX_DATA_STRINGS: Final = 16_384
"""Limit on strings that begin with "data:"; equals the limit on values of a body."""
LEAST_BYTES: Final = 4096
"""Minimum size of a URL that is taken out. Shorter ones are parsed with the rest."""

BodyBytes = bytes | bytearray | mmap.mmap
"""The bytes of a body; a large one is in an anonymous memory map."""

_OPENING = b'"data:'
_URL_KEY = re.compile(rb'"url"[ \t\r\n]*:[ \t\r\n]*\Z')
_KEY_BYTES = 64
_BACKSLASH = 0x5C
# Searching this many bytes takes a fraction of a millisecond.
_WINDOW = 2**17
_YIELD_EVERY = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Body:
    """A body without its images.

    Attributes:
        rest: JSON with a placeholder for each image's URL.
        images: by placeholder, the bytes between the quotes of the URL, with JSON escapes.
        token: random prefix of every placeholder, so that no client can forge one.
    """

    rest: bytes
    images: Mapping[str, memoryview]
    token: str


def take_images(body: BodyBytes) -> Steps[Body]:
    """Take the images out of a body.

    Raises:
        ApiError: 400; more than 4 MiB remain, or too many strings begin with "data:".
    """
    view = memoryview(body)
    token = secrets.token_hex(16)
    images: dict[str, memoryview] = {}
    kept: list[memoryview | bytes] = []
    num_kept = kept_to = at = num_seen = 0
    while num_kept + at - kept_to <= MAX_REST_BYTES:
        # If no image begins before this limit, the rest is too large.
        limit = kept_to + MAX_REST_BYTES - num_kept
        start = yield from _find(body, _OPENING, at, limit)
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
        if _is_image(body, start, end):
            name = f"{token}.{len(images)}"
            images[name] = view[at:end]
            kept += (view[kept_to:at], name.encode())
            num_kept += at - kept_to
            kept_to = at = end
    num_kept += len(body) - kept_to
    if num_kept > MAX_REST_BYTES:
        raise _too_much(num_kept)
    return Body(b"".join((*kept, view[kept_to:])), images, token)


def _is_image(body: BodyBytes, start: int, end: int) -> bool:
    """Whether the string between the quotes at `start` and `end` is a long data URL.

    A quote after a backslash does not end a string; base64 contains no quote.
    """
    return (
        end - start > LEAST_BYTES
        and body[end - 1] != _BACKSLASH
        and _URL_KEY.search(body, max(0, start - _KEY_BYTES), start) is not None
    )


def _find(body: BodyBytes, what: bytes, at: int, limit: int) -> Steps[int]:
    """Return `body.find(what, at)` for matches that begin before `limit`, else -1."""
    end = min(limit, len(body))
    while at < end:
        found = body.find(what, at, min(at + _WINDOW, end) + len(what) - 1)
        if found >= 0:
            return found
        at += _WINDOW
        yield
    return -1


def _too_much(num_bytes: int) -> ApiError:
    return invalid(
        f"Without its images the body has {num_bytes} bytes; at most {MAX_REST_BYTES} are "
        "accepted: send less text and white space.",
        param=None,
        code="request_too_large",
    )
