"""The images of a body, taken out of it before it is parsed: they stay bytes and are never copied.

    {"model":"m", ... "url":"data:image/png;base64,iVBOR..."}       up to 32 MiB
    {"model":"m", ... "url":"6f2c...1a.0"}    6f2c...1a.0 -> view   up to 4 MiB, and the images

Only a long data URL that is the value of a key "url" is taken out. What is left is parsed.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Mapping
from typing import Final

from vlm_worker.gateway.api.errors import ApiError, invalid
from vlm_worker.gateway.turns import Steps

MAX_REST_BYTES: Final = 4 * 2**20
"""Of a body without its images: more text than this fits in no context."""
LEAST_BYTES: Final = 4096
"""No field but an image's takes a `url` of so many bytes; shorter ones are parsed as they are."""

_OPENING = b'"data:'
_URL_KEY = re.compile(rb'"url"[ \t\r\n]*:[ \t\r\n]*\Z')
_KEY_BYTES = 64
_BACKSLASH = 0x5C
# A search through so much takes a fraction of a millisecond.
_WINDOW = 2**17
_YIELD_EVERY = 256


@dataclasses.dataclass(frozen=True, slots=True)
class Body:
    """A body without its images.

    Attributes:
        rest: JSON with a stand-in for each image's URL.
        images: by stand-in, what stands between the quotes of its URL; JSON escapes remain.
        token: what every stand-in begins with; random, so that no client can write one.
    """

    rest: bytes
    images: Mapping[str, memoryview]
    token: str


def take_images(body: bytes | bytearray) -> Steps[Body]:
    """Take the images out of a body.

    Raises:
        ApiError: 400; more than 4 MiB are left.
    """
    view = memoryview(body)
    token = secrets.token_hex(16)
    images: dict[str, memoryview] = {}
    kept: list[memoryview | bytes] = []
    num_kept = kept_to = at = num_seen = 0
    while num_kept + at - kept_to <= MAX_REST_BYTES:
        # If no image begins before this, too much is left.
        limit = kept_to + MAX_REST_BYTES - num_kept
        start = yield from _find(body, _OPENING, at, limit)
        if start < 0:
            break
        at = start + 1
        num_seen += 1
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


def _is_image(body: bytes | bytearray, start: int, end: int) -> bool:
    """Whether the string from the quote at `start` to the one at `end` is an image's URL.

    A quote before which a backslash stands ends no string; no base64 has one.
    """
    return (
        end - start > LEAST_BYTES
        and body[end - 1] != _BACKSLASH
        and _URL_KEY.search(body, max(0, start - _KEY_BYTES), start) is not None
    )


def _find(body: bytes | bytearray, what: bytes, at: int, limit: int) -> Steps[int]:
    """As `body.find(what, at)`, of what begins before `limit`."""
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
