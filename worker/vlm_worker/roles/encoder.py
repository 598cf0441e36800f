"""Stage encoder: picture bytes come in, embeddings are held for whoever prefills.

chunks ─▶ media pool ─▶ Decoded ─▶ engine.encode ─▶ Ready, Ready, ...
              │           │ each item may be fetched from here on; a fetch waits until it is ready
              │           └ with an error in it, and nothing to skip: the last word
              └ not for a file that was seen before, while its embedding is in the cache
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Final, Protocol

from vlm_worker.engine.events import ItemReady as EngineItemReady
from vlm_worker.errors import InvalidImageError, InvalidRequestError, OverloadedError
from vlm_worker.media.pool import ImageSpec, KnownImage
from vlm_worker.roles.host import Host
from vlm_worker.roles.times import CallClock
from vlm_worker.transfer.outgoing import Outgoing
from vlm_worker.types import PreparedImage, RequestKey, StageSpan
from vlm_worker.wire.calls import (
    Decoded,
    DecodedItem,
    EncodeCall,
    EncodeEvent,
    FetchCall,
    ItemFailed,
    ItemReady,
    Reply,
)
from vlm_worker.wire.frames import Commit

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
class _Prepared:
    """What became of one picture, and when."""

    result: PreparedImage | InvalidImageError
    done: float


class EncoderRole:
    """Encode and FetchEmbedding."""

    def __init__(self, host: Host, media: Media) -> None:
        self._host = host
        self._media = media
        self._upload_bytes = 0

    async def encode(
        self, call: EncodeCall, chunks: AsyncIterator[Chunk], clock: CallClock
    ) -> AsyncGenerator[Reply[EncodeEvent]]:
        """One request's pictures. Giving up early frees all of them.

        Raises:
            InvalidRequestError: the chunks are not what the call announced.
            OverloadedError: too many bytes are being uploaded, or too many pictures wait.
            DrainingError, DuplicateError, CancelledError: see `Host.scope`.
        """
        with self._host.scope("Encode", call.key, last_resort=call.last_resort):
            try:
                prepared = await self._prepare_all(call, chunks)
                yield _decoded(prepared, clock)
                good = [i for i, p in enumerate(prepared) if isinstance(p.result, PreparedImage)]
                if len(good) < len(prepared) and not call.skip_corrupt:
                    return
                async with aclosing(self._encode(call, prepared, good, clock)) as replies:
                    async for reply in replies:
                        yield reply
            finally:
                self._host.engine.release_known(call.key)

    async def fetch(self, call: FetchCall) -> AsyncGenerator[bytes]:
        """The frames of one embedding, as soon as it is ready.

        Raises:
            GoneError, IncompatibleError: see `Offers.find`.
            Exception: why it could not be encoded.
        """
        layout = self._host.embed_layout
        outgoing = self._host.offers.find(call, fingerprint=layout.fingerprint)
        async with aclosing(self._host.send(outgoing, call)) as frames:
            async for frame in frames:
                yield frame

    # ---- from bytes to patches -----------------------------------------------------------------

    async def _prepare_all(self, call: EncodeCall, chunks: AsyncIterator[Chunk]) -> list[_Prepared]:
        num_bytes = sum(item.num_bytes for item in call.items)
        if num_bytes > MAX_UPLOAD_BYTES:
            raise InvalidRequestError(
                f"the pictures have {num_bytes} bytes, {MAX_UPLOAD_BYTES} may come in one request"
            )
        if self._upload_bytes + num_bytes > MAX_UPLOAD_BYTES:
            raise OverloadedError(
                f"{self._upload_bytes} bytes of pictures are being received",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        self._upload_bytes += num_bytes
        tasks: list[asyncio.Task[_Prepared]] = []
        try:
            async for item, data in _files(call, chunks):
                tasks.append(asyncio.create_task(self._prepare(call, item, data)))
            return list(await asyncio.gather(*tasks))
        finally:
            self._upload_bytes -= num_bytes
            for task in tasks:
                task.cancel()

    async def _prepare(self, call: EncodeCall, item: int, data: bytearray) -> _Prepared:
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
        return _Prepared(result, done=time.monotonic())

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

    # ---- from patches to embeddings ------------------------------------------------------------

    async def _encode(
        self, call: EncodeCall, prepared: Sequence[_Prepared], good: Sequence[int], clock: CallClock
    ) -> AsyncGenerator[Reply[EncodeEvent]]:
        """Encode the items `good`; the engine counts them from 0."""
        host = self._host
        images = [prepared[i].result for i in good]
        pictures = [image for image in images if isinstance(image, PreparedImage)]
        transfers = [call.items[i].transfer_id for i in good]
        rows: dict[int, memoryview] = {}
        offers = [
            self._offer(call.key, index, transfers[index], picture, rows)
            for index, picture in enumerate(pictures)
        ]
        num_left = len(good)
        # telling the caller that they are decoded is part of the wait
        queued = max(picture.done for picture in prepared)
        try:
            with host.offers.keep(transfers):
                await host.delay("encoder_queue")
                async for event in host.engine.encode(call.key, pictures):
                    index = event.item
                    num_left -= 1
                    if not isinstance(event, EngineItemReady):
                        offers[index].fail(event.error)
                        yield Reply(_failed(good[index], event.error), (), clock.now())
                        continue
                    if event.rows is not None:
                        rows[index] = event.rows
                    await host.delay("encode")
                    count = pictures[index].num_tokens
                    offers[index].finish(Commit(num_units=count, num_tokens=count))
                    spans = _encode_spans(event, good[index], queued, clock)
                    ready = ItemReady(good[index], event.cache_hit, event.num_bytes)
                    yield Reply(ready, spans, clock.now())
        finally:
            # with its last picture announced, the caller may leave; then the leases decide
            if num_left:
                host.run(host.abandon(call.key))

    def _offer(
        self,
        key: RequestKey,
        index: int,
        transfer_id: str,
        picture: PreparedImage,
        rows: dict[int, memoryview],
    ) -> Outgoing:
        """An item to be fetched: from `rows`, where the engine gave them, else from the engine."""
        layout = self._host.embed_layout

        async def export(first: int, count: int) -> memoryview:
            whole = rows.get(index)
            if whole is None:
                whole = await self._host.engine.export_embedding(key, index)
            if whole.nbytes != picture.num_tokens * layout.row_bytes:
                raise InvalidRequestError("the embedding has another size than its layout")
            return whole.cast("B")[first * layout.row_bytes : (first + count) * layout.row_bytes]

        identity = self._host.life.transfer_id(key, transfer_id, layout.fingerprint)
        outgoing = Outgoing(
            identity,
            unit_bytes=layout.row_bytes,
            max_units=picture.num_tokens,
            export=export,
            timers=self._host.timers,
        )
        self._host.offers.offer(transfer_id, key, outgoing, item=index)
        return outgoing


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


def _decoded(prepared: Sequence[_Prepared], clock: CallClock) -> Reply[EncodeEvent]:
    items = []
    spans = []
    for index, one in enumerate(prepared):
        # its way here belongs to it
        spans.append(clock.span("media", clock.arrived, one.done, item=index + 1))
        if isinstance(one.result, PreparedImage):
            picture = one.result
            items.append(DecodedItem(picture.num_tokens, picture.grid_thw, picture.image_key))
        else:
            items.append(DecodedItem(0, (0, 0, 0), b"", one.result))
    return Reply(Decoded(tuple(items)), tuple(spans), clock.now())


def _encode_spans(
    event: EngineItemReady, item: int, queued: float, clock: CallClock
) -> tuple[StageSpan, ...]:
    return (
        clock.span("encoder_queue", queued, event.started_at, item=item + 1),
        clock.span("encode", event.started_at, item=item + 1),
    )


def _failed(item: int, error: Exception) -> ItemFailed:
    code = error.code if isinstance(error, InvalidRequestError) else None
    return ItemFailed(item, code or "encode_failed", str(error))
