r"""Decodes the base64 of a data URL in pieces; errors name the invalid character.

data:image/jpeg;base64,/9j\/4AAQ...   ─ unescape ─▶ ─ decode ─▶ bytes, digest
"""

from __future__ import annotations

import re

import msgspec
import pybase64
import xxhash

from vlm_worker.gateway.turns import Steps

_PREFIX = re.compile(rb"data:(image/[a-z0-9.+-]{1,32});base64,")
_PREFIX_BYTES = 128
# A multiple of 4. Decoding and hashing a piece takes far less than a millisecond.
_PIECE = 64 * 1024
# Length of the longest JSON escape, without its backslash.
_ESCAPE_BYTES = 5
_OTHER = re.compile(rb"[^A-Za-z0-9+/=]")


class NotBase64Error(ValueError):
    """The text is not canonical base64. The message is fit for a client."""


class TooManyBytesError(ValueError):
    """The image has more bytes than allowed."""


def split_data_url(url: bytes | memoryview, *, escaped: bool) -> tuple[str, memoryview] | None:
    """Return the media type and the base64 of an image's data URL; None for any other URL.

    If `escaped`, `url` still contains JSON escapes.
    """
    view = memoryview(url)
    head = bytes(view[:_PREFIX_BYTES])
    # JSON encoders escape only the slash of the prefix, as two bytes.
    plain = head.replace(b"\\/", b"/") if escaped else head
    match = _PREFIX.match(plain)
    if match is None:
        return None
    num_escaped = match.group().count(b"/") if head[: match.end()] != match.group() else 0
    return match.group(1).decode(), view[match.end() + num_escaped :]


def decode_base64(
    text: memoryview, *, max_bytes: int, escaped: bool
) -> Steps[tuple[bytearray, bytes]]:
    """Decode canonical base64; return the bytes and their XXH3-128. Yields after each piece.

    Raises:
        NotBase64Error: the text is not canonical base64.
        TooManyBytesError: more than `max_bytes`; raised before the whole text is decoded.
    """
    data = bytearray()
    hasher = xxhash.xxh3_128()
    rest = last = b""
    num_read = at = 0
    while at < len(text):
        end = min(at + _PIECE, len(text))
        piece = bytes(text[at:end])
        if escaped and b"\\" in piece:
            end = _before_cut_escape(piece, at, end, len(text))
            piece = _unescaped(bytes(text[at:end]))
        at = end
        piece = rest + piece
        whole = len(piece) if at == len(text) else len(piece) // 4 * 4
        rest, piece = piece[whole:], piece[:whole]
        if b"=" in last:
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


def _decoded(piece: bytes, num_before: int) -> bytes:
    try:
        return pybase64.b64decode(piece, validate=True)
    except ValueError as error:
        raise NotBase64Error(_problem(piece, num_before)) from error


def _problem(piece: bytes, num_before: int) -> str:
    """Describe the error in a piece that `num_before` characters precede."""
    other = _OTHER.search(piece)
    if other is None:
        return "it is cut off, or '=' at its end is missing: its length must be a multiple of 4"
    where = f"at character {num_before + other.start() + 1}"
    character = other.group()
    if character in b"\r\n":
        return f"it has a line break {where}: send it in one line"
    if character in b" \t":
        return f"it has white space {where}: send it without"
    if character in b"-_":
        return f"it has '{character.decode()}' {where}: use the standard alphabet, with '+' and '/'"
    return f"it has a character {where} that is not of its alphabet"


def _before_cut_escape(piece: bytes, start: int, end: int, length: int) -> int:
    """Return the start of an escape that may continue after `end`, else `end`."""
    found = piece.rfind(b"\\", max(0, len(piece) - _ESCAPE_BYTES))
    return start + found if found > 0 and end < length else end


def _unescaped(piece: bytes) -> bytes:
    try:
        text: str = msgspec.json.decode(b'"' + piece + b'"', type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise NotBase64Error("it has an escape that JSON does not know") from error
    return text.encode("utf-8", "replace")
