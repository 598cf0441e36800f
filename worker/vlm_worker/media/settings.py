"""The media pool's input, sizes, limits and measurements."""

from __future__ import annotations

import dataclasses
from typing import Final, Protocol

from vlm_worker.media.image_header import ImageLimits


@dataclasses.dataclass(frozen=True, slots=True)
class ImageSpec:
    """What a request states about one image; the pool compares each field to the file.

    `width` and `height` are oriented. `max_pixels` is the request's cap, 0 for the model's limit.
    `salt` separates tenants.
    """

    item: int
    format: str
    width: int
    height: int
    num_tokens: int
    max_pixels: int = 0
    salt: bytes = b""


REFUSALS: Final = (
    "invalid_image",
    "image_too_large",
    "image_aspect_ratio",
    "image_type_mismatch",
    "image_mismatch",
    "unsupported_image_format",
    "animated_not_supported",
)
"""Every code of an InvalidImageError that the pool raises."""


@dataclasses.dataclass(frozen=True, slots=True)
class MediaTimes:
    """The durations of one image within `media`, in seconds.

    `queue`: waiting for a child. `decode`: to RGB. `prepare`: to patches. `key`: hashing.
    """

    queue: float
    decode: float
    prepare: float
    key: float


class MediaObserver(Protocol):
    """Receives the result of each image."""

    def image_prepared(self, times: MediaTimes) -> None:
        """The patches are complete."""

    def image_refused(self, code: str) -> None:
        """The image was refused with a code of `REFUSALS`."""


@dataclasses.dataclass(frozen=True, slots=True)
class MediaSettings:
    """Sizes and limits of a pool.

    `max_waiting` and `max_waiting_pixels` limit the queue. `timeout_seconds` is the wall-clock time
    of one image in a child; after it, the child counts as frozen. With `scaled_jpeg`, a JPEG is
    decoded at the smallest of 1/1, 1/2, 1/4 and 1/8 that is not smaller than the resized image.
    """

    num_children: int = 2
    max_waiting: int = 256
    max_waiting_pixels: int = 64 * 16_777_216
    max_aliases: int = 4096
    cpu_seconds: int = 2
    timeout_seconds: float = 20.0
    limits: ImageLimits = dataclasses.field(default_factory=ImageLimits)
    scaled_jpeg: bool = False
