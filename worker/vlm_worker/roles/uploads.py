"""The pictures of a call, from the bytes of their files to patches.

chunks ─▶ a file, when it is complete ─▶ known, and its embedding in the cache? ─▶ no patches needed
                                     └─▶ else the media pool decodes it
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Final, Protocol

from vlm_worker.errors import InvalidImageError, InvalidRequestError, OverloadedError
from vlm_worker.media.pool import ImageSpec, KnownImage
from vlm_worker.roles.host import Host
from vlm_worker.types import PreparedImage, RequestKey
from vlm_worker.wire.calls import EncodeCall

MAX_UPLOAD_BYTES: Final = 512 << 20
RETRY_AFTER_SECONDS: Final = 1.0

Chunk = tuple[int, bytes]
"""Index of the item, and the next bytes of its file."""


class Media(Protocol):
    """What decodes pictures: `media.pool.MediaPool`."""

    async def known_key(self, data: bytes | memoryview, spec: ImageSpec) -> KnownImage | None:
        """What this very file became before; no decoding."""

    async def prepare(self, data: bytes | memoryview, spec: ImageSpec) -> PreparedImage:
        """Decode and preprocess one picture, or raise InvalidImageError."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """What became of one picture, and when."""

    result: PreparedImage | InvalidImageError
    done: float


class Uploads:
    """What all Encode calls of a worker are receiving, within one bound of bytes."""

    def __init__(self, host: Host, media: Media) -> None:
        self._host = host
        self._media = media
        self._num_bytes = 0

    async def prepare(self, call: EncodeCall, chunks: AsyncIterator[Chunk]) -> list[Prepared]:
        """All pictures of a call, each a result or what is wrong with it.

        Raises:
            InvalidRequestError: the chunks are not what the call announced.
            OverloadedError: too many bytes are being uploaded, or too many pictures wait.
        """
        num_bytes = sum(item.num_bytes for item in call.items)
        if num_bytes > MAX_UPLOAD_BYTES:
            raise InvalidRequestError(
                f"the pictures have {num_bytes} bytes, {MAX_UPLOAD_BYTES} may come in one request"
            )
        if self._num_bytes + num_bytes > MAX_UPLOAD_BYTES:
            raise OverloadedError(
                f"{self._num_bytes} bytes of pictures are being received",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        self._num_bytes += num_bytes
        tasks: list[asyncio.Task[Prepared]] = []
        try:
            async for item, data in _files(call, chunks):
                tasks.append(asyncio.create_task(self._one(call, item, data)))
            return list(await asyncio.gather(*tasks))
        finally:
            self._num_bytes -= num_bytes
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, call: EncodeCall, item: int, data: bytearray) -> Prepared:
        said = call.items[item]
        spec = ImageSpec(
            item=item,
            format=said.format,
            width=said.width,
            height=said.height,
            num_tokens=said.num_tokens,
            max_pixels=said.max_pixels,
            salt=call.cache_salt,
        )
        await self._host.delay("media")
        result: PreparedImage | InvalidImageError | None
        try:
            result = await self._known(call.key, data, spec)
            if result is None:
                result = await self._media.prepare(memoryview(data), spec)
        except InvalidImageError as error:
            result = error
        return Prepared(result, done=time.monotonic())

    async def _known(
        self, key: RequestKey, data: bytearray, spec: ImageSpec
    ) -> PreparedImage | None:
        """The picture without patches, where its embedding is still in the cache."""
        known = await self._media.known_key(memoryview(data), spec)
        if known is None:
            return None
        if not await self._host.engine.hold_known(key, known.image_key, known.num_tokens):
            return None
        return PreparedImage(known.image_key, known.grid_thw, known.num_tokens, memoryview(b""))


async def _files(
    call: EncodeCall, chunks: AsyncIterator[Chunk]
) -> AsyncIterator[tuple[int, bytearray]]:
    """Each file when it is complete; files come in order, none longer than announced."""
    current, data = 0, bytearray()
    async for item, part in chunks:
        if item != current or item >= len(call.items):
            raise InvalidRequestError(f"chunk of item {item} where item {current} is due")
        data += part
        expected = call.items[item].num_bytes
        if len(data) > expected:
            raise InvalidRequestError(f"item {item} has more than its {expected} bytes")
        if len(data) == expected:
            yield item, data
            current, data = current + 1, bytearray()
    if current != len(call.items):
        raise InvalidRequestError(f"the stream ended within item {current}")
