"""The memory that a worker declares for its requests, from its settings and its model.

--request-memory-bytes, or the sum of the parts:
  uploads      512 MiB
  images       as many pixels as may wait for the encoder, with their patches
  embeddings   both caches, and the copies that are made of what peers will fetch
  exposed      memory that peers read, where the transport has any
"""

from __future__ import annotations

import math
from typing import Final

from vlm_worker.core.families import Family
from vlm_worker.core.memory import SMALL_SHARE, MemoryBudget, divide
from vlm_worker.settings import WorkerSettings
from vlm_worker.transfer.transport import STREAM
from vlm_worker.types import Stage
from vlm_worker.wire.checks import MAX_PICTURE_BYTES

DEFAULT_UPLOADS: Final = 512 << 20
LARGE_SIDE: Final = 1 << 14
"""Pixels: no image has more visual tokens than a square one of this size."""


def request_memory(
    settings: WorkerSettings, family: Family, *, device: str, available_bytes: int | None
) -> MemoryBudget:
    """Divide what requests may hold.

    Without a flag it is the sum of the parts' own bounds, or, if `available_bytes` is known and
    less than twice that, half of it, as long as one image fits.

    Raises:
        ValueError: the flag's number is too small, with the one that is enough.
    """
    encodes = Stage.ENCODER in settings.stages
    largest = image_bytes(family)
    # one eighth of the image memory is for small images alone
    least_images = math.ceil(largest * SMALL_SHARE / (SMALL_SHARE - 1)) + SMALL_SHARE
    per_pixel = largest / _pixels(family)
    waiting = math.ceil(settings.queues.max_waiting_pixels * per_pixel)
    images = max(math.ceil(waiting * SMALL_SHARE / (SMALL_SHARE - 1)), least_images)
    parts = {
        "uploads": DEFAULT_UPLOADS if encodes else 0,
        "images": images if encodes else 0,
        "embeddings": settings.embedding_cache_bytes * (1 + embedding_copies(settings, device))
        + cold_cache_bytes(settings, device),
        "exposed": settings.exposed_memory_bytes if settings.transport != STREAM else 0,
    }
    least = {"least_uploads": MAX_PICTURE_BYTES, "least_images": least_images}
    total = settings.request_memory_bytes
    if total is None and encodes and available_bytes is not None:
        fixed = parts["embeddings"] + parts["exposed"]
        total = max(
            min(sum(parts.values()), available_bytes // 2),
            fixed + least["least_uploads"] + least_images,
        )
    return divide(total, **parts, **least)


def image_bytes(family: Family) -> int:
    """Memory of the largest image, from decoding until it is encoded: its patches and pixels."""
    geometry = family.geometry(LARGE_SIDE, LARGE_SIDE)
    patches = 4 * math.prod(geometry.grid_thw) * family.processor.patch_dim
    # another shape may have a few more patches than the square
    return math.ceil(1.05 * (patches + 3 * geometry.height * geometry.width))


def embedding_copies(settings: WorkerSettings, device: str) -> int:
    """Host copies of an embedding that is held for a peer: its frames, and off a GPU its rows."""
    if Stage.ENCODER not in settings.stages:
        return 0
    return 1 if device == "cpu" else 2


def cold_cache_bytes(settings: WorkerSettings, device: str) -> int:
    """Of embeddings in host memory; on a CPU both tiers are host memory, and one is enough."""
    if settings.embedding_cold_cache_bytes is not None:
        return settings.embedding_cold_cache_bytes
    return 0 if device == "cpu" else DEFAULT_COLD_CACHE_BYTES


DEFAULT_COLD_CACHE_BYTES: Final = 1 << 30


def _pixels(family: Family) -> int:
    geometry = family.geometry(LARGE_SIDE, LARGE_SIDE)
    return geometry.height * geometry.width
