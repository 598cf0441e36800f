"""Which files were seen before: from SHA-256 of the bytes to the content key, without decoding.

An alias never leaves this worker, and holds for one tenant and one set of parameters only.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import hashlib

from vlm_worker.types import PreparedImage

HASH_INLINE_BYTES = 256 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class KnownImage:
    """A picture that was prepared before: what identifies its embedding."""

    image_key: bytes
    grid_thw: tuple[int, int, int]
    num_tokens: int


class AliasCache:
    """The `capacity` files used last. The media pool is its only user."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._known: collections.OrderedDict[bytes, KnownImage] = collections.OrderedDict()

    async def find(
        self, data: bytes | memoryview, *, max_pixels: int, salt: bytes, num_tokens: int
    ) -> KnownImage | None:
        """What this file became; None where it is new or became another number of tokens.

        A big file is hashed in a thread, so that the event loop goes on.
        """
        if len(data) > HASH_INLINE_BYTES:
            digest = await asyncio.to_thread(_digest, data)
        else:
            digest = _digest(data)
        alias = _alias(digest, max_pixels, salt)
        known = self._known.get(alias)
        if known is None or known.num_tokens != num_tokens:
            return None
        self._known.move_to_end(alias)
        return known

    def add(
        self, file_digest: bytes, prepared: PreparedImage, *, max_pixels: int, salt: bytes
    ) -> None:
        """Remember a file by its SHA-256, and forget the one that was used longest ago."""
        alias = _alias(file_digest, max_pixels, salt)
        known = KnownImage(prepared.image_key, prepared.grid_thw, prepared.num_tokens)
        self._known[alias] = known
        self._known.move_to_end(alias)
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)


def _digest(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def _alias(file_digest: bytes, max_pixels: int, salt: bytes) -> bytes:
    """Fixed-size fields first, so that the salt needs no frame."""
    return hashlib.sha256(file_digest + max_pixels.to_bytes(8, "little") + salt).digest()
