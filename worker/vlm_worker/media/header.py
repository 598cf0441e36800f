"""Whether a picture may come in, from its header alone: in milliseconds, before any decoder.

The gateway asks first, the encoder asks again: nobody believes a peer's word about a file.
"""

from __future__ import annotations

import dataclasses

from vlm_worker.core.geometry import MAX_ASPECT_RATIO
from vlm_worker.errors import InvalidImageError
from vlm_worker.media.containers import PARSERS, Container, MalformedError, sniff

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
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
    """Hard bounds: what lies beyond is refused, never scaled. `max_pixels` is 4096 * 4096."""

    max_bytes: int = 20 * 1024 * 1024
    max_pixels: int = 16_777_216
    max_side: int = 8192


@dataclasses.dataclass(frozen=True, slots=True)
class ImageHeader:
    """A picture's format and its size as a person sees it, EXIF orientation applied.

    `bits` is a PNG's bit depth, 8 elsewhere.
    """

    format: str
    width: int
    height: int
    orientation: int
    bits: int

    @property
    def stored_size(self) -> tuple[int, int]:
        """Height and width of the pixels in the file, before they are turned."""
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
        item: the picture's index in its request, for the error.
        limits: what may pass; the defaults where absent.
        mime_type: what the sender called it (from a data URL); it must agree with the content.

    Raises:
        InvalidImageError: with code `image_too_large`, `unsupported_image_format`,
            `image_type_mismatch`, `animated_not_supported`, `image_aspect_ratio` or
            `invalid_image`.
    """
    limits = limits or ImageLimits()
    view = memoryview(data)
    if len(view) > limits.max_bytes:
        raise InvalidImageError(
            f"the image has {len(view)} bytes; at most {limits.max_bytes} are accepted",
            item=item,
            code="image_too_large",
        )
    file_format = _format(view, item, mime_type)
    try:
        container = PARSERS[file_format](view)
    except MalformedError as error:
        raise InvalidImageError(str(error), item=item) from error
    _check_size(container, item, limits)
    if container.animated:
        raise InvalidImageError(
            f"the {file_format} is animated; send one frame as a still image",
            item=item,
            code="animated_not_supported",
        )
    width, height = container.width, container.height
    if container.orientation in _TRANSPOSED:
        width, height = height, width
    return ImageHeader(file_format, width, height, container.orientation, container.bits)


def _format(view: memoryview, item: int, mime_type: str | None) -> str:
    file_format = sniff(view)
    if file_format is None:
        raise InvalidImageError(
            f"the content is no image in one of the formats {', '.join(FORMATS)}",
            item=item,
            code="unsupported_image_format",
        )
    if mime_type is not None:
        promised = MIME_TYPES.get(mime_type.lower())
        if promised is None:
            raise InvalidImageError(
                f"the media type is not one of {', '.join(MIME_TYPES)}",
                item=item,
                code="unsupported_image_format",
            )
        if promised != file_format:
            raise InvalidImageError(
                f"the media type says {promised}, the content is {file_format}",
                item=item,
                code="image_type_mismatch",
            )
    return file_format


def _check_size(container: Container, item: int, limits: ImageLimits) -> None:
    width, height = container.width, container.height
    size = f"{width}x{height} pixels"
    if min(width, height) < 1:
        raise InvalidImageError(f"the image is empty: {size}", item=item)
    if max(width, height) > limits.max_side or width * height > limits.max_pixels:
        raise InvalidImageError(
            f"the image has {size}; at most {limits.max_side} a side and {limits.max_pixels} "
            "in all are accepted: send it smaller",
            item=item,
            code="image_too_large",
        )
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise InvalidImageError(
            f"the image has {size}; one side may be at most {MAX_ASPECT_RATIO} times the other: "
            "cut it into pieces",
            item=item,
            code="image_aspect_ratio",
        )
