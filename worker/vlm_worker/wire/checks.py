"""Bounds on ids, keys and counts of messages, checked when a message is parsed."""

from __future__ import annotations

import string
from collections.abc import Collection, Sequence

from vlm_worker.errors import InvalidRequestError

MAX_ITEMS = 64
MAX_TOKENS = 1 << 21
MAX_IMAGE_BYTES = 20 << 20
"""Maximum file size; the decoder accepts no larger file (`media.image_header.ImageLimits`)."""
MAX_IDS = 1024
MAX_TOKEN_ID = (1 << 31) - 1
MAX_ATTEMPT = 1 << 20
MAX_SPANS = 1024
MAX_BYTES = 1 << 42
MAX_PIXELS = 1 << 40
MAX_SIDE = 1 << 20
MAX_COUNT = 1 << 40
MAX_SECONDS = 86400.0
MAX_LABEL = 64
MAX_TEXT = 1024

# Limits of sampling parameters; the gateway uses them too.
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_PRIORITY = 1000

_ID_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-_.:/")
_MAX_ID = 128


def identifier(value: str, name: str) -> str:
    """Check an id of the gateway: 1 to 128 of letters, digits and `-_.:/`."""
    if not 0 < len(value) <= _MAX_ID or not _ID_CHARACTERS.issuperset(value):
        raise InvalidRequestError(f"{name} must be 1 to {_MAX_ID} letters, digits or -_.:/")
    return value


def fixed_bytes(value: bytes, name: str, lengths: Collection[int]) -> bytes:
    """Check bytes of one of the given lengths."""
    if len(value) not in lengths:
        wanted = " or ".join(str(length) for length in sorted(lengths))
        raise InvalidRequestError(f"{name} must have {wanted} bytes, not {len(value)}")
    return value


def at_most(value: bytes, name: str, maximum: int) -> bytes:
    """Check bytes of at most `maximum` length."""
    if len(value) > maximum:
        raise InvalidRequestError(f"{name} must have at maximum {maximum} bytes, not {len(value)}")
    return value


def text(value: str, name: str, maximum: int) -> str:
    """Check text of at most `maximum` characters."""
    if len(value) > maximum:
        raise InvalidRequestError(
            f"{name} must have at maximum {maximum} characters, not {len(value)}"
        )
    return value


def bounded_float(value: float, name: str, maximum: float) -> float:
    """Check a number from 0 to `maximum`; NaN and infinity fail."""
    if not 0.0 <= value <= maximum:  # NaN fails this as well
        raise InvalidRequestError(f"{name} must be 0 to {maximum:g}, not {value}")
    return value


def bounded_int(value: int, name: str, minimum: int, maximum: int) -> int:
    """Check an integer within bounds."""
    if not minimum <= value <= maximum:
        raise InvalidRequestError(f"{name} must be {minimum} to {maximum}, not {value}")
    return value


def token_ids(values: Sequence[int], name: str, minimum: int, maximum: int) -> tuple[int, ...]:
    """Check `minimum` to `maximum` token ids, each of int32."""
    bounded_int(len(values), name, minimum, maximum)
    if values and max(values) > MAX_TOKEN_ID:
        raise InvalidRequestError(f"{name} must be 0 to {MAX_TOKEN_ID}, not {max(values)}")
    return tuple(values)


def grid(values: Collection[int], name: str) -> tuple[int, int, int]:
    """Check a patch grid (time, height, width)."""
    if len(values) != 3 or not all(0 < value < 1 << 16 for value in values):
        raise InvalidRequestError(f"{name} must be three positive numbers")
    time, height, width = values
    return time, height, width
