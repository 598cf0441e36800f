"""JSON with nothing left to guess: no duplicate keys, NaN, lone surrogates or bottomless nesting.

Parsers differ on all of these, so whoever checked a request elsewhere may have seen another one.
The text is looked at once with its strings blanked out, which costs little beside its pictures:

    {"a": [1, {"b": "…"}]}  ──blank──▶  {"":[1,{"":""}]}   depth 3, 2 keys
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from vlm_worker.gateway.api.errors import ApiError, invalid

MAX_DEPTH = 32

_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_NOT_STRUCTURE = re.compile(rb"[^\[\]{}]+")


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`.

    Raises:
        ApiError: 400 with code `invalid_json`; the message says what is wrong, not what was sent.
    """
    skeleton = _STRING.sub(b"", body)
    _check_depth(skeleton)
    try:
        value = msgspec.json.decode(body)
    except msgspec.ValidationError as error:
        raise _invalid("a number is out of range") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _invalid("it cannot be parsed as JSON in UTF-8") from error
    if not isinstance(value, dict):
        raise _invalid("it must be a JSON object")
    num_keys = skeleton.count(b":")
    if _count_keys(value) != num_keys:
        raise _invalid("a key occurs twice in one object")
    return value


def _check_depth(skeleton: bytes) -> None:
    depth = 0
    for bracket in _NOT_STRUCTURE.sub(b"", skeleton):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise _invalid(f"it is nested deeper than {MAX_DEPTH} levels")


def _count_keys(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(_count_keys(item) for item in value.values())
    if isinstance(value, list):
        return sum(_count_keys(item) for item in value)
    return 0


def _invalid(reason: str) -> ApiError:
    return invalid(f"The body is not valid: {reason}.", param=None, code="invalid_json")
