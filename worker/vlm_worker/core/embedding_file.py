"""The format of one file of the encoder cache's disk tier. Pure.

    magic (8 bytes) | length of the header (uint32) | header (JSON) | SHA-256 | rows | scores

The digest covers all other bytes. The header names the format, the image key, the layout of the
rows, their number, and the sizes. The file's name is a hash of the image key.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import struct
from typing import Final

from vlm_worker.types import EmbedLayout

VERSION: Final = 1
MAGIC: Final = b"triptych"
DIGEST_BYTES: Final = 32
MAX_HEADER_BYTES: Final = 4096
NAME: Final = re.compile(r"[0-9a-f]{64}\.embedding")
TEMPORARY: Final = re.compile(r"[0-9a-f]{64}\.embedding\.[0-9a-f]{16}\.tmp")
_LENGTH: Final = struct.Struct("<I")
_PREFIX_BYTES: Final = len(MAGIC) + _LENGTH.size
HEAD_BYTES: Final = _PREFIX_BYTES + MAX_HEADER_BYTES
"""With so many first bytes, `read_header` can read the header of every file."""


class BadFileError(ValueError):
    """A file that is not what it should be; the text says in what."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredEmbedding:
    """A whole image's rows as bytes, `[num_tokens, row_bytes]`, and float32 scores `[num_tokens]`.

    `scores` is empty if the embedding has none.
    """

    image_key: bytes
    num_tokens: int
    rows: memoryview
    scores: memoryview


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """What a file says about itself. `num_bytes` is the size of the whole file."""

    fingerprint: str
    image_key: str
    num_tokens: int
    rows_bytes: int
    scores_bytes: int
    num_bytes: int
    payload_start: int


def file_name(image_key: bytes) -> str:
    """The name of an image's file; the key cannot be read from it."""
    return hashlib.sha256(b"triptych/embedding/1" + image_key).hexdigest() + ".embedding"


def pack(stored: StoredEmbedding, layout: EmbedLayout) -> list[bytes | memoryview]:
    """The parts of a file, in order."""
    rows, scores = stored.rows.cast("B"), stored.scores.cast("B")
    header = json.dumps(
        {
            "version": VERSION,
            "fingerprint": layout.fingerprint.hex(),
            "image_key": stored.image_key.hex(),
            "dtype": layout.dtype,
            "shape": [stored.num_tokens, layout.row_bytes],
            "rows_bytes": rows.nbytes,
            "scores_dtype": "float32",
            "scores_bytes": scores.nbytes,
        }
    ).encode()
    head = MAGIC + _LENGTH.pack(len(header)) + header
    return [head, _digest(head, rows, scores), rows, scores]


def read_header(data: bytes | memoryview) -> Header:
    """The header of a file, from at least its first `HEAD_BYTES` bytes, or all of them.

    Raises BadFileError.
    """
    if bytes(data[: len(MAGIC)]) != MAGIC or len(data) < _PREFIX_BYTES:
        raise BadFileError("it does not start with the format's name")
    (length,) = _LENGTH.unpack_from(data, len(MAGIC))
    if length > MAX_HEADER_BYTES or len(data) < _PREFIX_BYTES + length:
        raise BadFileError("its header is cut off")
    try:
        fields = json.loads(bytes(data[_PREFIX_BYTES : _PREFIX_BYTES + length]))
        if fields["version"] != VERSION:
            raise BadFileError(f"its version is not {VERSION}")
        start = _PREFIX_BYTES + length + DIGEST_BYTES
        rows_bytes, scores_bytes = int(fields["rows_bytes"]), int(fields["scores_bytes"])
        return Header(
            fingerprint=str(fields["fingerprint"]),
            image_key=str(fields["image_key"]),
            num_tokens=int(fields["shape"][0]),
            rows_bytes=rows_bytes,
            scores_bytes=scores_bytes,
            num_bytes=start + rows_bytes + scores_bytes,
            payload_start=start,
        )
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise BadFileError(f"its header cannot be read: {error!r}") from error


def unpack(
    data: memoryview, layout: EmbedLayout, *, image_key: bytes, num_tokens: int
) -> StoredEmbedding:
    """The embedding of a file's bytes.

    Raises:
        BadFileError: it has another key, layout or size, or a byte differs from what was written.
    """
    header = read_header(data)
    expected = (layout.fingerprint.hex(), image_key.hex(), num_tokens)
    if (header.fingerprint, header.image_key, header.num_tokens) != expected:
        raise BadFileError("it is of another image, model or layout")
    sizes = (header.rows_bytes, header.num_bytes)
    if sizes != (num_tokens * layout.row_bytes, data.nbytes):
        raise BadFileError(f"it has {data.nbytes} bytes, not {header.num_bytes}")
    start, end = header.payload_start, header.payload_start + header.rows_bytes
    rows, scores = data[start:end], data[end:]
    head, digest = data[: start - DIGEST_BYTES], data[start - DIGEST_BYTES : start]
    if _digest(head, rows, scores) != digest:
        raise BadFileError("its digest does not match")
    return StoredEmbedding(image_key, num_tokens, rows, scores)


def _digest(*parts: bytes | memoryview) -> bytes:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part)
    return hasher.digest()
