"""Validates an image from its header alone, within milliseconds and before any decoder.

The gateway checks first and the encoder checks again: neither trusts the other's data. Orientation
is the only EXIF field that is read.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import struct
from collections.abc import Callable, Mapping

from vlm_worker.core.image_geometry import MAX_ASPECT_RATIO
from vlm_worker.errors import InvalidImageError

ORIENTATION_TAG = 0x0112
MAX_ENTRIES = 1024
_SHORT = 3


def orientation(tiff: bytes | memoryview) -> int:
    """The orientation, 1 to 8, in EXIF's TIFF structure; 1 if it is absent or invalid.

    Reads only the first directory and follows no other offset, so it cannot loop.
    """
    head = bytes(tiff[:8])
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(head[:4])
    if order is None or len(head) < 8:
        return 1
    (start,) = struct.unpack(order + "I", head[4:])
    if start + 2 > len(tiff):
        return 1
    (num_entries,) = struct.unpack_from(order + "H", tiff, start)
    for i in range(min(num_entries, MAX_ENTRIES)):
        at = start + 2 + 12 * i
        if at + 12 > len(tiff):
            break
        tag, kind, count, value = struct.unpack_from(order + "HHIH", tiff, at)
        if tag == ORIENTATION_TAG:
            return value if kind == _SHORT and count == 1 and 1 <= value <= 8 else 1
    return 1


# 20 MiB in IDAT chunks of 4 KiB are 5,120, in full GIF sub-blocks 82,241.
MAX_CHUNKS = 8192
MAX_GIF_SUBBLOCKS = 98304
MAX_SCANS = 100
"""Scans of a JPEG. Encoders write about ten scans in a progressive JPEG."""


class MalformedError(ValueError):
    """The file is refused; a client may see the text. `code` is that of an InvalidImageError."""

    def __init__(self, message: str, code: str = "invalid_image") -> None:
        super().__init__(message)
        self.code = code


@dataclasses.dataclass(frozen=True, slots=True)
class Container:
    """Stored size in pixels, EXIF orientation 1 to 8, and whether there are several frames."""

    width: int
    height: int
    orientation: int = 1
    animated: bool = False
    bits: int = 8


def detect_format(data: bytes | memoryview) -> str | None:
    """PNG, JPEG, WEBP or GIF, from the first bytes; None for other formats."""
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
    """Parse IHDR, then the chunks up to IEND, for eXIf and animation control."""
    if len(data) < 33 or data[8:16].tobytes() != b"\0\0\0\x0dIHDR":
        raise MalformedError("the PNG header is damaged")
    width, height, bits = struct.unpack_from(">IIB", data, 16)
    oriented, animated, at = 1, False, 33
    for _ in range(MAX_CHUNKS):
        if at + 12 > len(data):
            raise MalformedError("the PNG ends before its end marker")
        (length,) = struct.unpack_from(">I", data, at)
        kind = bytes(data[at + 4 : at + 8])
        if kind == b"IEND":
            return Container(width, height, oriented, animated, bits)
        if kind == b"acTL":
            animated = True
        elif kind == b"eXIf" and oriented == 1:
            oriented = orientation(data[at + 8 : at + 8 + length])
        at += 12 + length
    raise MalformedError(f"the PNG has more than {MAX_CHUNKS} chunks")


# Baseline, extended and progressive Huffman frames; all other frame types are refused.
_SOF_READ = (0xC0, 0xC1, 0xC2)
_SCAN_HEADER = re.compile(rb"\xff\xda")
# A marker ends entropy-coded bytes; in those, 0x00 or a restart marker follows each 0xFF.
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_SOF_ALL = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


def parse_jpeg(data: memoryview) -> Container:
    """Parse the segments up to the frame header; the first Exif segment counts.

    A progressive file with thousands of scans is small, but takes a decoder seconds per megabyte
    of pixels. Files with more than `MAX_SCANS` scans are refused.
    """
    _check_scans(data)
    oriented, at = 0, 2
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
            return Container(width, height, oriented or 1)
        if marker in (0xD9, 0xDA) or length < 2:
            break
        if marker == 0xE1 and not oriented and body[:6].tobytes() == b"Exif\0\0":
            oriented = orientation(body[6:])
        at += 2 + length
    raise MalformedError("the JPEG has no frame header")


def _check_scans(data: memoryview) -> None:
    """Raise MalformedError for too many scans. Bytes after the end of the image are ignored."""
    headers = itertools.islice(_SCAN_HEADER.finditer(data), MAX_SCANS + 1)
    if sum(1 for _ in headers) <= MAX_SCANS:
        return
    # The byte pair also occurs in metadata and trailing data, so parse the segments to count.
    num_scans, at = 0, 2
    for _ in range(MAX_CHUNKS):
        if at + 4 > len(data) or data[at] != 0xFF:
            return
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif marker == 0x01 or 0xD0 <= marker <= 0xD7:  # markers without a length
            at += 2
        elif marker == 0xD9:
            return
        else:
            at += 2 + struct.unpack_from(">H", data, at + 2)[0]
            if marker != 0xDA:
                continue
            num_scans += 1
            if num_scans > MAX_SCANS:
                raise MalformedError(f"the JPEG has more than {MAX_SCANS} scans")
            after = _MARKER.search(data, at)
            if after is None:
                return
            at = after.start()
    raise MalformedError(f"the JPEG has more than {MAX_CHUNKS} segments")


def parse_webp(data: memoryview) -> Container:
    """Parse the RIFF chunks: VP8, VP8L or VP8X for the size, EXIF for the orientation."""
    (riff,) = struct.unpack_from("<I", data, 4)
    if riff + 8 > len(data):
        raise MalformedError("the WebP is shorter than its header says")
    size: tuple[int, int] | None = None
    oriented, animated, at, end = 1, False, 12, riff + 8
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
        elif kind == b"EXIF" and oriented == 1:
            oriented = orientation(body[6:] if body[:6].tobytes() == b"Exif\0\0" else body)
        at += 8 + length + (length & 1)
    if size is None:
        raise MalformedError("the WebP holds no image")
    return Container(*size, oriented, animated)


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
    """The logical screen, enlarged to the first frame; a second frame makes it animated."""
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
        raise MalformedError("the GIF holds no image")
    return Container(width, height, animated=num_frames > 1)


def _palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _skip_subblocks(data: memoryview, at: int, budget: int) -> tuple[int, int]:
    """The offset after the sub-blocks that start at `at`, and the rest of their budget."""
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
FORMATS = tuple(PARSERS)
MIME_TYPES = {
    "image/png": "PNG",
    "image/jpeg": "JPEG",
    "image/jpg": "JPEG",
    "image/webp": "WEBP",
    "image/gif": "GIF",
}

_TRANSPOSED = (5, 6, 7, 8)  # EXIF orientations that swap width and height


@dataclasses.dataclass(frozen=True, slots=True)
class ImageLimits:
    """Hard limits: an image beyond them is refused, never scaled. `max_pixels` is 4096 * 4096."""

    max_bytes: int = 20 * 1024 * 1024
    max_pixels: int = 16_777_216
    max_side: int = 8192


@dataclasses.dataclass(frozen=True, slots=True)
class ImageHeader:
    """An image's format and its displayed size, with EXIF orientation applied.

    `bits` is a PNG's bit depth, 8 for other formats.
    """

    format: str
    width: int
    height: int
    orientation: int
    bits: int

    @property
    def stored_size(self) -> tuple[int, int]:
        """Height and width of the pixels in the file, before orientation is applied."""
        if self.orientation in _TRANSPOSED:
            return self.width, self.height
        return self.height, self.width


def read_header(
    data: bytes | bytearray | memoryview,
    *,
    item: int,
    limits: ImageLimits | None = None,
    mime_type: str | None = None,
) -> ImageHeader:
    """Check a file and read its header; takes at most 5 ms.

    Args:
        data: the whole file.
        item: the image's index in its request, for the error.
        limits: hard limits; None selects the defaults.
        mime_type: the type that the sender gave (from a data URL); it must match the content.

    Raises:
        InvalidImageError: with code `image_too_large`, `unsupported_image_format`,
            `image_type_mismatch`, `animated_not_supported`, `image_aspect_ratio` or
            `invalid_image`.
    """
    try:
        return _read_header(memoryview(data), limits or ImageLimits(), mime_type)
    except MalformedError as error:
        raise InvalidImageError(str(error), item=item, code=error.code) from error


def _read_header(view: memoryview, limits: ImageLimits, mime_type: str | None) -> ImageHeader:
    if len(view) > limits.max_bytes:
        raise MalformedError(
            f"the image has {len(view)} bytes; at most {limits.max_bytes} are accepted",
            "image_too_large",
        )
    file_format = _format(view, mime_type)
    container = PARSERS[file_format](view)
    _check_size(container, limits)
    if container.animated:
        raise MalformedError(
            f"the {file_format} is animated; send one frame as a still image",
            "animated_not_supported",
        )
    width, height = container.width, container.height
    if container.orientation in _TRANSPOSED:
        width, height = height, width
    return ImageHeader(file_format, width, height, container.orientation, container.bits)


def _format(view: memoryview, mime_type: str | None) -> str:
    file_format = detect_format(view)
    if file_format is None:
        raise MalformedError(
            f"the content is no image in one of the formats {', '.join(FORMATS)}",
            "unsupported_image_format",
        )
    if mime_type is not None:
        stated = MIME_TYPES.get(mime_type.lower())
        if stated is None:
            raise MalformedError(
                f"the media type is not one of {', '.join(MIME_TYPES)}", "unsupported_image_format"
            )
        if stated != file_format:
            raise MalformedError(
                f"the media type says {stated}, the content is {file_format}", "image_type_mismatch"
            )
    return file_format


def _check_size(container: Container, limits: ImageLimits) -> None:
    width, height = container.width, container.height
    size = f"{width}x{height} pixels"
    if min(width, height) < 1:
        raise MalformedError(f"the image is empty: {size}")
    if max(width, height) > limits.max_side or width * height > limits.max_pixels:
        raise MalformedError(
            f"the image has {size}; at most {limits.max_side} a side and {limits.max_pixels} "
            "in all are accepted: send it smaller",
            "image_too_large",
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise MalformedError(
            f"the image has {size}; one side may be at most {MAX_ASPECT_RATIO} times the other: "
            "cut it into pieces",
            "image_aspect_ratio",
        )
