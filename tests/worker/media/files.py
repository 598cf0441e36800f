"""Image files for tests: small ones of every kind, and ones whose pixels are many."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Mapping

import numpy as np
from PIL import Image


def encode(image: Image.Image, fmt: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, fmt, **options)
    return out.getvalue()


def noise(width: int = 60, height: int = 40, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def chunk(kind: bytes, body: bytes) -> bytes:
    """One chunk of a PNG."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def with_chunk(png: bytes, kind: bytes, body: bytes) -> bytes:
    """A PNG with one more chunk behind its header."""
    return png[:33] + chunk(kind, body) + png[33:]


def small_files() -> dict[str, bytes]:
    """One of every kind that may come in, each a few hundred bytes."""
    sample = noise(12, 9)
    grey = sample.convert("L")
    deep = np.arange(108, dtype=np.uint16).reshape(9, 12) * 600
    alpha = sample.convert("RGBA")
    alpha.putalpha(grey)
    exif = Image.Exif()
    exif[0x0112] = 6
    return {
        "PNG": encode(sample),
        "PNG palette": encode(sample.quantize(8), transparency=3),
        "PNG 16 bits": encode(Image.fromarray(deep)),
        "PNG 1 bit": encode(sample.convert("1")),
        "PNG alpha, turned": encode(alpha, exif=exif),
        "JPEG": encode(sample, "JPEG"),
        "JPEG progressive": encode(sample, "JPEG", progressive=True),
        "JPEG CMYK": encode(sample.convert("CMYK"), "JPEG"),
        "JPEG grey, turned": encode(grey, "JPEG", exif=exif),
        "WebP lossy": encode(sample, "WEBP"),
        "WebP lossless, alpha": encode(alpha, "WEBP", lossless=True),
        "GIF": encode(sample.quantize(16), "GIF"),
    }


def zeros_png(width: int, height: int) -> bytes:
    """An all-black PNG of any size in a few kilobytes."""
    packer = zlib.compressobj(9)
    row = bytes(1 + 3 * width)
    body = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*one) for one in chunks)


def black(fmt: str, **options: object) -> Callable[[int, int], bytes]:
    def make(width: int, height: int) -> bytes:
        return encode(Image.new("RGB", (width, height)), fmt, **options)

    return make


def black_gif(width: int, height: int) -> bytes:
    return encode(Image.new("P", (width, height)), "GIF")


OF_SIZE: Mapping[str, Callable[[int, int], bytes]] = {
    "PNG": zeros_png,
    "JPEG": black("JPEG", quality=1),
    "WEBP": black("WEBP", lossless=True, method=0),
    "GIF": black_gif,
}
"""All-black files of a format, by width and height."""
