"""Receives the image files of a call and turns them into patches.

chunks ─▶ complete file ─▶ known, and its embedding is cached? ─▶ no patches needed
                       ├─▶ the rows of a client's embedding ─▶ its key; nothing is decoded
                       └─▶ else the media pool decodes it, within the call's memory
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any, Protocol

from vlm_worker.core.client_embeddings import embedding_key
from vlm_worker.errors import InvalidImageError, InvalidRequestError, PeerLostError
from vlm_worker.media.pool import HASH_INLINE_BYTES, ImageSpec
from vlm_worker.roles.context import RoleContext
from vlm_worker.roles.request_memory import CallMemory
from vlm_worker.types import NO_ROWS, EmbedLayout, PreparedImage
from vlm_worker.wire.buffers import private_memory
from vlm_worker.wire.messages import EncodeCall, EncodeItem

Chunk = tuple[int, bytes]
"""Index of the item, and the next bytes of its file."""


class Media(Protocol):
    """The interface to the decoder: `media.pool.MediaPool`."""

    async def known_key(self, data: bytes | memoryview, spec: ImageSpec) -> PreparedImage | None:
        """The image that the same file gave before, without its patches; decodes nothing."""

    async def prepare(self, data: bytes | memoryview, spec: ImageSpec) -> PreparedImage:
        """Decode and preprocess one image, or raise InvalidImageError."""

    def image_bytes(self, spec: ImageSpec) -> int:
        """Bytes of this process that one image takes, from decoding until it is encoded."""


@dataclasses.dataclass(frozen=True, slots=True)
class DecodedUpload:
    """The result of one image.

    Attributes:
        done: when it was complete, on the monotonic clock.
        waited: start and end of the call's wait for image memory, which images in the encoder
            queue hold. Two equal instants if it did not wait.
    """

    result: PreparedImage | InvalidImageError
    done: float
    waited: tuple[float, float] = (0.0, 0.0)


@dataclasses.dataclass(eq=False, slots=True)
class _File:
    """One complete file that is not decoded yet. `known` is what it gave before."""

    item: int
    data: memoryview
    spec: ImageSpec
    known: asyncio.Task[PreparedImage | None]


class Uploads:
    """The uploads of all Encode calls of a worker, within the memory of its requests."""

    def __init__(self, context: RoleContext, media: Media) -> None:
        self._context = context
        self._media = media

    async def prepare(
        self, call: EncodeCall, chunks: AsyncIterator[Chunk], memory: CallMemory
    ) -> list[DecodedUpload]:
        """Receive and decode all images of a call; returns a result or an error per image.

        Decoding starts when the memory of all images is granted: at once if much is free, else
        after all files have arrived. `memory` holds it until the call ends.

        Raises:
            InvalidRequestError: the chunks differ from what the call announced, or its images
                exceed what one call may ever hold.
            OverloadedError: too many bytes are being uploaded, or too many images wait.
            PeerLostError: the files did not arrive in time.
        """
        memory.check_files(sum(item.num_bytes for item in call.items))
        self._check_embeddings(call)
        specs = [_spec(call, item) for item in range(len(call.items))]
        need = [
            item.num_bytes if item.grid_thw else self._media.image_bytes(spec)
            for item, spec in zip(call.items, specs, strict=True)
        ]
        files: list[_File] = []
        tasks: list[asyncio.Task[Any]] = []
        decoding: list[asyncio.Task[DecodedUpload]] = []
        waited = (0.0, 0.0)

        def decode_all() -> None:
            for file in files[len(decoding) :]:
                decoding.append(asyncio.create_task(self._one(call, file, memory)))
                tasks.append(decoding[-1])

        try:
            async for item, data in self._files(call, chunks, memory):
                known = asyncio.create_task(self._known(call, item, data, specs[item]))
                tasks.append(known)
                files.append(_File(item, data, specs[item], known))
                del data, known  # `_one` has the last reference, and drops it after decoding
                if not memory.has_images and sum(need) <= memory.max_image_bytes:
                    memory.reserve_early(sum(need))
                if memory.has_images:
                    decode_all()
            if not memory.has_images:
                known_images = await asyncio.gather(*(file.known for file in files))
                unknown = [n for n, image in zip(need, known_images, strict=True) if image is None]
                since = time.monotonic()
                await memory.reserve_images(sum(unknown), num_images=len(unknown))
                waited = (since, time.monotonic())
            decode_all()
            prepared = await asyncio.gather(*decoding)
            return [dataclasses.replace(one, waited=waited) for one in prepared]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _check_embeddings(self, call: EncodeCall) -> None:
        """Refuse before the upload what the engine would refuse after it."""
        context = self._context
        num_tokens = sum(item.num_tokens for item in call.items)
        needed = num_tokens * context.embed_layout.row_bytes
        context.memory.check_embeddings(context.engine.stats(), needed)

    async def _one(self, call: EncodeCall, file: _File, memory: CallMemory) -> DecodedUpload:
        await self._context.delay("media")
        result: PreparedImage | InvalidImageError | None
        try:
            result = await file.known
            if result is None and call.items[file.item].grid_thw:
                result = await self._given(call, file)
            elif result is None:
                result = await self._media.prepare(file.data, file.spec)
        except InvalidImageError as error:
            result = error
        num_bytes = len(file.data)
        file.data = memoryview(b"")
        memory.forget_file(num_bytes)
        return DecodedUpload(result, done=time.monotonic())

    async def _given(self, call: EncodeCall, file: _File) -> PreparedImage:
        """The embedding that a client gave; raises InvalidImageError."""
        layout, given = self._context.embed_layout, call.items[file.item]
        args = file.data, given, layout, file.item, call.cache_salt
        if len(file.data) > HASH_INLINE_BYTES:
            return await asyncio.to_thread(_given_image, *args)
        return _given_image(*args)

    async def _known(
        self, call: EncodeCall, item: int, data: memoryview, spec: ImageSpec
    ) -> PreparedImage | None:
        """The image without patches, if its embedding is still in the cache.

        The engine looks up a client's embedding itself: it needs no decoding.
        """
        if call.items[item].grid_thw:
            return None
        known = await self._media.known_key(data, spec)
        if known is None:
            return None
        return known if await self._context.engine.pin_cached(call.key, known) else None

    async def _files(
        self, call: EncodeCall, chunks: AsyncIterator[Chunk], memory: CallMemory
    ) -> AsyncIterator[tuple[int, memoryview]]:
        """Each file when it is complete, in order; none is longer than announced.

        Only the pages of bytes that have arrived use memory.
        """
        within = self._context.timers.encode
        deadline = time.monotonic() + within
        for item, announced in enumerate(call.items):
            num_bytes, num_received, data = announced.num_bytes, 0, memoryview(b"")
            while num_received < num_bytes:
                chunk = await anext(chunks, None)
                if chunk is None:
                    raise InvalidRequestError(f"the stream ended within item {item}")
                index, part = chunk
                if index != item:
                    raise InvalidRequestError(f"chunk of item {index} where item {item} is due")
                if num_received + len(part) > num_bytes:
                    raise InvalidRequestError(f"item {item} has more than its {num_bytes} bytes")
                if time.monotonic() > deadline:  # a slow peer must not hold memory longer
                    raise PeerLostError(f"the images were not here within {within:g} s")
                memory.received(len(part))
                if len(part) == num_bytes:
                    data = memoryview(part)
                elif part:
                    if not num_received:
                        data = memoryview(private_memory(num_bytes))
                    data[num_received : num_received + len(part)] = part
                num_received += len(part)
                del chunk, part  # not kept during the wait for the next one
            yield item, data
        async for index, _ in chunks:
            raise InvalidRequestError(f"chunk of item {index}, and there are {len(call.items)}")


def _given_image(
    rows: memoryview, given: EncodeItem, layout: EmbedLayout, item: int, salt: bytes
) -> PreparedImage:
    """Check rows against the layout and what the request states, and make their key."""
    t, h, w = given.grid_thw
    num_bytes = given.num_tokens * layout.row_bytes
    if given.format != layout.dtype or len(rows) != num_bytes or given.reduction is not None:
        raise InvalidImageError(
            f"an embedding of {given.num_tokens} tokens has {num_bytes} bytes of {layout.dtype} "
            f"here and no reduction, not {len(rows)} of {given.format}",
            item=item,
            code="image_mismatch",
        )
    key = embedding_key(rows, layout, grid=(t, h, w), salt=salt)
    return PreparedImage(key, (t, h, w), given.num_tokens, NO_ROWS, salt=salt, rows=rows)


def _spec(call: EncodeCall, item: int) -> ImageSpec:
    i = call.items[item]
    return ImageSpec(
        item,
        i.format,
        i.width,
        i.height,
        i.num_tokens,
        i.max_pixels,
        salt=call.cache_salt,
        reduction=i.reduction,
    )
