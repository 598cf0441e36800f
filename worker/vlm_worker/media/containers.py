"""What the first bytes of a PNG, JPEG, WebP or GIF file say. Pure parsing: no pixel is decoded.

Each parser walks a file's own chunks without copying them and returns a `Container`, or raises
`MalformedError`. Walks are bounded: a file of a million empty chunks costs no more than others.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import struct
from collections.abc import Callable, Mapping

from vlm_worker.media.exif import orientation

# 20 MiB in IDAT chunks of 4 KiB are 5,120, in full GIF sub-blocks 82,241.
MAX_CHUNKS = 8192
MAX_GIF_SUBBLOCKS = 98304
MAX_SCANS = 100
"""Encoders make about ten of a progressive JPEG."""


class MalformedError(ValueError):
    """The file is not what its first bytes promise; the text is fit for a client."""


@dataclasses.dataclass(frozen=True, slots=True)
class Container:
    """Stored size in pixels, EXIF orientation 1 to 8, whether there is more than one frame.

    `bits` is a PNG's bit depth (8 elsewhere).
    """

    width: int
    height: int
    orientation: int = 1
    animated: bool = False
    bits: int = 8


def sniff(data: bytes | memoryview) -> str | None:
    """PNG, JPEG, WEBP or GIF by the first bytes; None for anything else."""
    head = bytes(data[:12])
    if head.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if head.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if head[:4] == b"RIFF" and head[8:] == b"WEBP":
        return "WEBP"
    if head[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    return None


def parse_png(data: memoryview) -> Container:
    """IHDR, then the chunks up to IEND, for eXIf and animation control."""
    if len(data) < 33 or data[8:16].tobytes() != b"\0\0\0\x0dIHDR":
        raise MalformedError("the PNG header is damaged")
    width, height, bits = struct.unpack_from(">IIB", data, 16)
    turned, animated, at = 1, False, 33
    for _ in range(MAX_CHUNKS):
        if at + 12 > len(data):
            raise MalformedError("the PNG ends before its end marker")
        (length,) = struct.unpack_from(">I", data, at)
        kind = bytes(data[at + 4 : at + 8])
        if kind == b"IEND":
            return Container(width, height, turned, animated, bits)
        if kind == b"acTL":
            animated = True
        elif kind == b"eXIf" and turned == 1:
            turned = orientation(data[at + 8 : at + 8 + length])
        at += 12 + length
    raise MalformedError(f"the PNG has more than {MAX_CHUNKS} chunks")


# Baseline, extended and progressive Huffman frames, out of all kinds of frame header.
_SOF_READ = (0xC0, 0xC1, 0xC2)
_SCAN_HEADER = re.compile(rb"\xff\xda")
# ends entropy-coded bytes, in which 0xFF stands before 0x00 or a restart
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_SOF_ALL = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def parse_jpeg(data: memoryview) -> Container:
    """The segments up to the frame header; the first Exif segment counts.

    A progressive file of thousands of scans is small, and takes a decoder seconds for each megabyte
    of pixels: more than `MAX_SCANS` are refused.
    """
    _check_scans(data)
    turned, at = 0, 2
    for _ in range(MAX_CHUNKS):
        if at + 4 > len(data) or data[at] != 0xFF:
            break
        if data[at + 1] == 0xFF:  # a fill byte
            at += 1
            continue
        marker, (length,) = data[at + 1], struct.unpack_from(">H", data, at + 2)
        body = data[at + 4 : at + 2 + length]
        if marker in _SOF_ALL:
            if marker not in _SOF_READ or len(body) < 6:
                raise MalformedError("this kind of JPEG (lossless or arithmetic) is not supported")
            bits, height, width = struct.unpack_from(">BHH", body)
            if bits != 8:
                raise MalformedError(f"a JPEG of {bits} bits a sample is not supported")
            return Container(width, height, turned or 1)
        if marker in (0xD9, 0xDA) or length < 2:
            break
        if marker == 0xE1 and not turned and body[:6].tobytes() == b"Exif\0\0":
            turned = orientation(body[6:])
        at += 2 + length
    raise MalformedError("the JPEG has no frame header")


def _check_scans(data: memoryview) -> None:
    """Raise for too many scans. What lies behind the end of the image counts for nothing."""
    headers = itertools.islice(_SCAN_HEADER.finditer(data), MAX_SCANS + 1)
    if sum(1 for _ in headers) <= MAX_SCANS:
        return
    # so many byte pairs: metadata has them too, and what phones append, so segments are walked
    found, at = 0, 2
    for _ in range(MAX_CHUNKS):
        if at + 4 > len(data) or data[at] != 0xFF:
            return
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif marker == 0x01 or 0xD0 <= marker <= 0xD7:  # alone, without a length
            at += 2
        elif marker == 0xD9:
            return
        else:
            at += 2 + struct.unpack_from(">H", data, at + 2)[0]
            if marker != 0xDA:
                continue
            found += 1
            if found > MAX_SCANS:
                raise MalformedError(f"the JPEG has more than {MAX_SCANS} scans")
            after = _MARKER.search(data, at)
            if after is None:
                return
            at = after.start()
    raise MalformedError(f"the JPEG has more than {MAX_CHUNKS} segments")


def parse_webp(data: memoryview) -> Container:
    """The RIFF chunks: VP8, VP8L or VP8X for the size, EXIF for the orientation."""
    (riff,) = struct.unpack_from("<I", data, 4)
    if riff + 8 > len(data):
        raise MalformedError("the WebP is shorter than its header says")
    size: tuple[int, int] | None = None
    turned, animated, at, end = 1, False, 12, riff + 8
    for _ in range(MAX_CHUNKS):
        if at + 8 > end:
            break
        kind, (length,) = bytes(data[at : at + 4]), struct.unpack_from("<I", data, at + 4)
        body = data[at + 8 : at + 8 + length]
        if len(body) < length:
            raise MalformedError("the WebP is shorter than its chunks say")
        if kind in (b"ANIM", b"ANMF") or (kind == b"VP8X" and body[:1] and body[0] & 2):
            animated = True
        if size is None and kind in _WEBP_SIZES:
            size = _WEBP_SIZES[kind](body)
        elif kind == b"EXIF" and turned == 1:
            turned = orientation(body[6:] if body[:6].tobytes() == b"Exif\0\0" else body)
        at += 8 + length + (length & 1)
    if size is None:
        raise MalformedError("the WebP holds no picture")
    return Container(*size, turned, animated)


def _vp8(body: memoryview) -> tuple[int, int]:
    if len(body) < 10 or body[3:6].tobytes() != b"\x9d\x01\x2a":
        raise MalformedError("the WebP frame header is damaged")
    width, height = struct.unpack_from("<HH", body, 6)
    return width & 0x3FFF, height & 0x3FFF


def _vp8l(body: memoryview) -> tuple[int, int]:
    if len(body) < 5 or body[0] != 0x2F:
        raise MalformedError("the WebP frame header is damaged")
    (packed,) = struct.unpack_from("<I", body, 1)
    return (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1


def _vp8x(body: memoryview) -> tuple[int, int]:
    if len(body) < 10:
        raise MalformedError("the WebP header is damaged")
    width, height = int.from_bytes(body[4:7], "little"), int.from_bytes(body[7:10], "little")
    return width + 1, height + 1


_WEBP_SIZES: Mapping[bytes, Callable[[memoryview], tuple[int, int]]] = {
    b"VP8 ": _vp8,
    b"VP8L": _vp8l,
    b"VP8X": _vp8x,
}


def parse_gif(data: memoryview) -> Container:
    """The logical screen, grown to the first frame; a second frame makes it animated."""
    if len(data) < 13:
        raise MalformedError("the GIF header is damaged")
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + _palette_bytes(flags)
    num_frames, budget = 0, MAX_GIF_SUBBLOCKS
    while at < len(data) and data[at] != 0x3B and num_frames < 2:
        if data[at] == 0x21:
            at, budget = _skip_subblocks(data, at + 2, budget)
        elif data[at] == 0x2C and at + 10 < len(data):
            left, top, columns, rows, flags = struct.unpack_from("<HHHHB", data, at + 1)
            if num_frames == 0:
                width, height = max(width, left + columns), max(height, top + rows)
            num_frames += 1
            at, budget = _skip_subblocks(data, at + 11 + _palette_bytes(flags), budget)
        else:
            raise MalformedError("the GIF is damaged or cut off")
    if num_frames == 0:
        raise MalformedError("the GIF holds no picture")
    return Container(width, height, animated=num_frames > 1)


def _palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _skip_subblocks(data: memoryview, at: int, budget: int) -> tuple[int, int]:
    """Behind the sub-blocks that start at `at`, and what is left of the budget."""
    end = len(data)
    while budget and at < end:
        budget -= 1
        length = data[at]
        at += length + 1
        if not length:
            return at, budget
    raise MalformedError("the GIF is damaged or cut off")


PARSERS: Mapping[str, Callable[[memoryview], Container]] = {
    "PNG": parse_png,
    "JPEG": parse_jpeg,
    "WEBP": parse_webp,
    "GIF": parse_gif,
}
