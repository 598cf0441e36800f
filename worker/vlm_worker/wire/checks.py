"""What a peer may say: bounds on ids, keys and counts, checked where a message becomes a value."""

from __future__ import annotations

import string
from collections.abc import Collection, Sequence

from vlm_worker.errors import InvalidRequestError

MAX_ITEMS = 64
MAX_TOKENS = 1 << 21
MAX_PICTURE_BYTES = 20 << 20
"""The decoder takes no larger file (`media.header.ImageLimits`)."""
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

# Of sampling; the gateway's own door holds to them too.
MAX_LOGPROBS = 20
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_REPETITION_PENALTY = 10.0
MAX_PRIORITY = 1000

_ID_CHARACTERS = frozenset(string.ascii_letters + string.digits + "-_.:/")
_MAX_ID = 128


def identifier(value: str, name: str) -> str:
    """An id as the gateway mints them: 1 to 128 of letters, digits and `-_.:/`."""
    if not 0 < len(value) <= _MAX_ID or not _ID_CHARACTERS.issuperset(value):
        raise InvalidRequestError(f"{name} must be 1 to {_MAX_ID} letters, digits or -_.:/")
    return value


def octets(value: bytes, name: str, lengths: Collection[int]) -> bytes:
    """Bytes of one of the given lengths."""
    if len(value) not in lengths:
        wanted = " or ".join(str(length) for length in sorted(lengths))
        raise InvalidRequestError(f"{name} must have {wanted} bytes, not {len(value)}")
    return value


def at_most(value: bytes, name: str, most: int) -> bytes:
    """Bytes, not too many."""
    if len(value) > most:
        raise InvalidRequestError(f"{name} must have at most {most} bytes, not {len(value)}")
    return value


def text(value: str, name: str, most: int) -> str:
    """Text, not too long."""
    if len(value) > most:
        raise InvalidRequestError(f"{name} must have at most {most} characters, not {len(value)}")
    return value


def measure(value: float, name: str, most: float) -> float:
    """A number from 0 to `most`; neither NaN nor infinite."""
    if not 0.0 <= value <= most:  # NaN fails this as well
        raise InvalidRequestError(f"{name} must be 0 to {most:g}, not {value}")
    return value


def between(value: int, name: str, least: int, most: int) -> int:
    """An integer within bounds."""
    if not least <= value <= most:
        raise InvalidRequestError(f"{name} must be {least} to {most}, not {value}")
    return value


def token_ids(values: Sequence[int], name: str, least: int, most: int) -> tuple[int, ...]:
    """So many tokens, each of which an int32 holds."""
    between(len(values), name, least, most)
    if values and max(values) > MAX_TOKEN_ID:
        raise InvalidRequestError(f"{name} must be 0 to {MAX_TOKEN_ID}, not {max(values)}")
    return tuple(values)


def grid(values: Collection[int], name: str) -> tuple[int, int, int]:
    """A patch grid (time, height, width)."""
    if len(values) != 3 or not all(0 < value < 1 << 16 for value in values):
        raise InvalidRequestError(f"{name} must be three positive numbers")
    time, height, width = values
    return time, height, width
