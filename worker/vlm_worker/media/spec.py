"""What the media pool is asked, how it is sized, and what it reports."""

from __future__ import annotations

import dataclasses
from typing import Final, Protocol

from vlm_worker.media.header import ImageLimits


@dataclasses.dataclass(frozen=True, slots=True)
class ImageSpec:
    """What a request says of one picture; the pool checks each word against the file.

    `width` and `height` are oriented. `max_pixels` is the request's own cap, 0 for the model's own.
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
    """Where one picture's `media` time went, in seconds.

    It waited for a child (`queue`), became RGB (`decode`), then patches (`prepare`), and was hashed
    for its key (`key`).
    """

    queue: float
    decode: float
    prepare: float
    key: float


class MediaObserver(Protocol):
    """Hears what became of each picture."""

    def picture_prepared(self, times: MediaTimes) -> None:
        """It is on its way to the encoder."""

    def picture_refused(self, code: str) -> None:
        """It was an error, one of `REFUSALS`."""


@dataclasses.dataclass(frozen=True, slots=True)
class MediaSettings:
    """Sizes and bounds of a pool.

    `max_waiting` and `max_waiting_pixels` bound the queue; `timeout_seconds` is the wall-clock time
    of one picture in a child, beyond which the child counts as frozen. `scaled_jpeg` decodes a JPEG
    at the smallest of 1/1, 1/2, 1/4 and 1/8 that is no smaller than what it is resized to.
    """

    num_children: int = 2
    max_waiting: int = 256
    max_waiting_pixels: int = 64 * 16_777_216
    max_aliases: int = 4096
    cpu_seconds: int = 2
    timeout_seconds: float = 20.0
    limits: ImageLimits = dataclasses.field(default_factory=ImageLimits)
    scaled_jpeg: bool = False
