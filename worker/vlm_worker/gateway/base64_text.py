"""Decodes base64 of a request's body in pieces, with a yield after each.

Errors name the invalid character.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
import pybase64
import xxhash

from vlm_worker.gateway.turns import Steps

PIECE_BYTES: Final = 64 * 1024
"""A multiple of 4. Decoding and hashing a piece takes far less than a millisecond."""
# Length of the longest JSON escape, without its backslash.
_ESCAPE_BYTES = 5
_OTHER = re.compile(rb"[^A-Za-z0-9+/=]")
_WHITE_SPACE = b" \t\r\n"
_STANDARD = bytes.maketrans(b"-_", b"+/")


class NotBase64Error(ValueError):
    """The text is not base64. The message is fit for a client."""


class TooManyBytesError(ValueError):
    """The text has more bytes than allowed."""


def decode_base64(
    text: memoryview, *, max_bytes: int, escaped: bool
) -> Steps[tuple[bytearray, bytes]]:
    """Decode base64; return the bytes and their XXH3-128. Yields after each piece.

    It may be wrapped, unpadded and in the URL-safe alphabet. Its padding bits must be 0.

    Raises:
        NotBase64Error: the text is not base64.
        TooManyBytesError: more than `max_bytes`; raised before the whole text is decoded.
    """
    data = bytearray()
    hasher = xxhash.xxh3_128()
    rest = last = b""
    num_read = at = 0
    while at < len(text):
        end = min(at + PIECE_BYTES, len(text))
        piece = bytes(text[at:end])
        if escaped and b"\\" in piece:
            end = _before_cut_escape(piece, at, end, len(text))
            piece = _unescaped(bytes(text[at:end]))
        at = end
        piece = rest + _standard(piece)
        if at == len(text) and len(piece) % 4 > 1 and b"=" not in piece:
            piece += b"=" * (-len(piece) % 4)
        whole = len(piece) if at == len(text) else len(piece) // 4 * 4
        rest, piece = piece[whole:], piece[:whole]
        if piece and b"=" in last:
            raise NotBase64Error("'=' stands before its end")
        decoded = _decoded(piece, num_read)
        num_read += len(piece)
        last = piece[-4:] or last
        if len(data) + len(decoded) > max_bytes:
            raise TooManyBytesError
        data += decoded
        hasher.update(decoded)
        yield
    if not data:
        raise NotBase64Error("it is empty")
    if pybase64.b64encode(bytes(data[(len(data) - 1) // 3 * 3 :])) != last:
        raise NotBase64Error("its last character has bits that stand for nothing")
    return data, hasher.digest()


def _standard(piece: bytes) -> bytes:
    """Return a piece without white space, in the standard alphabet; most pieces are as they are."""
    if any(other in piece for other in (b"\n", b"\r", b" ", b"\t", b"-", b"_")):
        return piece.translate(_STANDARD, _WHITE_SPACE)
    return piece


def _decoded(piece: bytes, num_before: int) -> bytes:
    try:
        return pybase64.b64decode(piece, validate=True)
    except ValueError as error:
        raise NotBase64Error(_problem(piece, num_before)) from error


def _problem(piece: bytes, num_before: int) -> str:
    """Describe the error in a piece that `num_before` characters precede, but for white space."""
    other = _OTHER.search(piece)
    if other is None:
        return "it is cut off, or has a wrong number of '='"
    where = f"at character {num_before + other.start() + 1}"
    return f"it has a character {where} that is not of its alphabet"


def _before_cut_escape(piece: bytes, start: int, end: int, length: int) -> int:
    """Return the start of an escape that may continue after `end`, else `end`."""
    start_of_escape = piece.rfind(b"\\", max(0, len(piece) - _ESCAPE_BYTES))
    return start + start_of_escape if start_of_escape > 0 and end < length else end


def _unescaped(piece: bytes) -> bytes:
    try:
        text: str = msgspec.json.decode(b'"' + piece + b'"', type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NotBase64Error("it has an escape that JSON does not know") from error
    return text.encode("utf-8", "replace")
