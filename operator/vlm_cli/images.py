"""Images of requests: their format, from the first bytes, and generated images. Pure.

This module encodes PNG itself, so that the operator's container image needs no imaging library.
"""

from __future__ import annotations

import base64
import random
import struct
import zlib

_PREFIXES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}
_COLOURS = ((220, 30, 30), (30, 160, 50), (40, 70, 220), (240, 200, 20), (150, 40, 170))


def media_type(data: bytes) -> str | None:
    """Return the MIME type; None if the gateway does not accept the format."""
    return next((mime for prefix, mime in _PREFIXES.items() if data.startswith(prefix)), None)


def data_url(data: bytes) -> str:
    """Return an image as a `data:` URL for the OpenAI API."""
    return f"data:{media_type(data)};base64,{base64.b64encode(data).decode()}"


def make_image(seed: int, *, width: int, height: int) -> bytes:
    """Return a PNG of `width` by `height` pixels; each seed gives another image."""
    rng = random.Random(seed)  # noqa: S311 - images, not secrets
    colour = bytes(rng.choice(_COLOURS))
    ground = bytes(rng.randrange(200, 256) for _ in range(3))
    left, right = sorted(rng.sample(range(width + 1), 2))
    top, bottom = sorted(rng.sample(range(height + 1), 2))
    empty = b"\0" + ground * width
    filled = b"\0" + ground * left + colour * (right - left) + ground * (width - right)
    rows = [filled if top <= y < bottom else empty for y in range(height)]
    # the lower 48 bits of the seed in one corner, so that images of different seeds differ
    mark = (seed & 0xFFFFFFFFFFFF).to_bytes(6, "big")
    rows[0] = rows[0][:1] + mark + rows[0][7:]
    return _png(width, height, b"".join(rows))


def _png(width: int, height: int, rows: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )
