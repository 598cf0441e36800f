"""The images of a call, from the bytes of their files to patches.

chunks ─▶ a file, when it is complete ─▶ known, and its embedding in the cache? ─▶ no patches needed
                                     └─▶ else the media pool decodes it, within the call's memory
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

from vlm_worker.errors import InvalidImageError, InvalidRequestError, PeerLostError
from vlm_worker.media.pool import ImageSpec, KnownImage
from vlm_worker.roles.host import Host
from vlm_worker.roles.memory import CallMemory
from vlm_worker.types import PreparedImage, RequestKey
from vlm_worker.wire.calls import EncodeCall

Chunk = tuple[int, bytes]
"""Index of the item, and the next bytes of its file."""


class Media(Protocol):
    """What decodes images: `media.pool.MediaPool`."""

    async def known_key(self, data: bytes | memoryview, spec: ImageSpec) -> KnownImage | None:
        """What this very file became before; no decoding."""

    async def prepare(self, data: bytes | memoryview, spec: ImageSpec) -> PreparedImage:
        """Decode and preprocess one image, or raise InvalidImageError."""

    def image_bytes(self, spec: ImageSpec) -> int:
        """Memory of this process that one image takes, from decoding until it is encoded."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prepared:
    """What became of one image, and when."""

    result: PreparedImage | InvalidImageError
    done: float


@dataclasses.dataclass(frozen=True, slots=True)
class _File:
    """One file that is here whole. `known` says what it became before."""

    item: int
    data: bytearray
    spec: ImageSpec
    known: asyncio.Task[PreparedImage | None]


class Uploads:
    """What all Encode calls of a worker are receiving, within the memory of its requests."""

    def __init__(self, host: Host, media: Media) -> None:
        self._host = host
        self._media = media

    async def prepare(
        self, call: EncodeCall, chunks: AsyncIterator[Chunk], memory: CallMemory
    ) -> list[Prepared]:
        """All images of a call, each a result or what is wrong with it.

        Decoding begins when the memory of all images is granted: at once while there is plenty,
        else when all files are here. `memory` holds it until the call ends.

        Raises:
            InvalidRequestError: the chunks are not what the call announced, or its images never
                fit into the memory of this worker.
            OverloadedError: too many bytes are being uploaded, or too many images wait.
            PeerLostError: the files are not here in time.
        """
        memory.check_files(sum(item.num_bytes for item in call.items))
        self._check_embeddings(call)
        specs = [_spec(call, item) for item in range(len(call.items))]
        need = [self._media.image_bytes(spec) for spec in specs]
        files: list[_File] = []
        tasks: list[asyncio.Task[Any]] = []
        decoding: list[asyncio.Task[Prepared]] = []

        def decode_all() -> None:
            for file in files[len(decoding) :]:
                decoding.append(asyncio.create_task(self._one(file, memory)))
                tasks.append(decoding[-1])

        try:
            async for item, data in self._files(call, chunks, memory):
                known = asyncio.create_task(self._known(call.key, data, specs[item]))
                tasks.append(known)
                files.append(_File(item, data, specs[item], known))
                if not memory.has_images and sum(need) <= memory.most:
                    memory.claim_early(sum(need))
                if memory.has_images:
                    decode_all()
            if not memory.has_images:
                found = await asyncio.gather(*(file.known for file in files))
                unknown = [n for n, one in zip(need, found, strict=True) if one is None]
                await memory.claim_images(sum(unknown), num_images=len(unknown))
            decode_all()
            return list(await asyncio.gather(*decoding))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _check_embeddings(self, call: EncodeCall) -> None:
        """Refuse before the upload what the engine would refuse after it."""
        host = self._host
        num_tokens = sum(item.num_tokens for item in call.items)
        needed = num_tokens * host.embed_layout.row_bytes
        host.memory.check_embeddings(host.engine.stats(), needed)

    async def _one(self, file: _File, memory: CallMemory) -> Prepared:
        await self._host.delay("media")
        result: PreparedImage | InvalidImageError | None
        try:
            result = await file.known
            if result is None:
                result = await self._media.prepare(memoryview(file.data), file.spec)
        except InvalidImageError as error:
            result = error
        memory.forget_file(len(file.data))
        return Prepared(result, done=time.monotonic())

    async def _known(
        self, key: RequestKey, data: bytearray, spec: ImageSpec
    ) -> PreparedImage | None:
        """The image without patches, if its embedding is still in the cache."""
        known = await self._media.known_key(memoryview(data), spec)
        if known is None:
            return None
        if not await self._host.engine.hold_known(key, known.image_key, known.num_tokens):
            return None
        return PreparedImage(known.image_key, known.grid_thw, known.num_tokens, memoryview(b""))

    async def _files(
        self, call: EncodeCall, chunks: AsyncIterator[Chunk], memory: CallMemory
    ) -> AsyncIterator[tuple[int, bytearray]]:
        """Each file when it is complete; files come in order, none longer than announced."""
        within = self._host.timers.encode
        current, data = 0, bytearray()
        deadline = time.monotonic() + within
        async for item, part in chunks:
            if item != current or item >= len(call.items):
                raise InvalidRequestError(f"chunk of item {item} where item {current} is due")
            expected = call.items[item].num_bytes
            if len(data) + len(part) > expected:
                raise InvalidRequestError(f"item {item} has more than its {expected} bytes")
            if time.monotonic() > deadline:  # a peer that trickles holds memory no longer
                raise PeerLostError(f"the images were not here within {within:g} s")
            memory.received(len(part))
            data += part
            if len(data) == expected:
                yield item, data
                current, data = current + 1, bytearray()
        if current != len(call.items):
            raise InvalidRequestError(f"the stream ended within item {current}")


def _spec(call: EncodeCall, item: int) -> ImageSpec:
    said = call.items[item]
    return ImageSpec(
        item=item,
        format=said.format,
        width=said.width,
        height=said.height,
        num_tokens=said.num_tokens,
        max_pixels=said.max_pixels,
        salt=call.cache_salt,
    )
