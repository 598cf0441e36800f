"""JSON with nothing left to guess: no duplicate keys, NaN, lone surrogates or bottomless nesting.

Parsers differ on all of these, so another parser may have checked a different request. How much
there is to decode is counted first, in the text with its strings blanked out, and bounded:

    {"a": [1, {"b": "…"}]}  ──blank──▶  {:[1,{:}]}   depth 3, 4 values, 2 keys
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from vlm_worker.gateway.api.data_urls import take_images
from vlm_worker.gateway.api.errors import ApiError, invalid
from vlm_worker.gateway.turns import Steps

MAX_DEPTH: Final = 32
MAX_VALUES: Final = 16_384
"""Of a body: 1,024 messages with an image each have 8,200."""

# Blanking this much takes less than a millisecond, whatever it holds.
_PIECE = 16 * 1024
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


@dataclasses.dataclass(frozen=True, slots=True)
class JsonBody:
    """A JSON object. `images` has the long data URLs that stand in it by another name."""

    value: dict[str, Any]
    images: Mapping[str, memoryview]


def read_json(body: bytes | bytearray) -> Steps[JsonBody]:
    """The JSON object in `body`.

    Raises:
        ApiError: 400; the message says what is wrong, not what was sent.
    """
    taken = yield from take_images(body)
    num_keys = yield from _count_keys_of_text(taken.rest)
    try:
        value = msgspec.json.decode(taken.rest)
    except msgspec.ValidationError as error:
        raise _invalid("a number is out of range") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid("it cannot be parsed as JSON in UTF-8") from error
    yield
    if not isinstance(value, dict):
        raise _invalid("it must be a JSON object")
    if _count_keys(value) != num_keys:
        raise _invalid("a key occurs twice in one object")
    return JsonBody(value, taken.images)


def _count_keys_of_text(text: bytes) -> Steps[int]:
    """Keys in a JSON text, repeated ones too; refuses what is too deep or has too many values."""
    at = depth = inside = num_keys = num_quotes = 0
    num_values = 1
    while at < len(text):
        end = _between_escapes(text, at, at + _PIECE)
        piece = text[at:end]
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        # What is left of the quotes are the borders of strings.
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
    return num_keys


def _between_escapes(text: bytes, start: int, end: int) -> int:
    """`end`, or one less where a backslash before it belongs to the character behind it."""
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
