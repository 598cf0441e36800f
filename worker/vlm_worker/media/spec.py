"""What the media pool is asked, how it is sized, and what it reports."""

from __future__ import annotations

import dataclasses

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


@dataclasses.dataclass(frozen=True, slots=True)
class MediaTimes:
    """Where one picture's `media` time went, in seconds."""

    queued: float
    decode: float
    prepare: float


@dataclasses.dataclass(frozen=True, slots=True)
class MediaSettings:
    """Sizes and bounds of a pool.

    `max_waiting` and `max_waiting_pixels` bound the queue; `timeout_seconds` is the wall-clock time
    of one picture in a child, beyond which the child counts as frozen.
    """

    num_children: int = 2
    max_waiting: int = 256
    max_waiting_pixels: int = 64 * 16_777_216
    max_aliases: int = 4096
    cpu_seconds: int = 2
    timeout_seconds: float = 20.0
    limits: ImageLimits = dataclasses.field(default_factory=ImageLimits)
