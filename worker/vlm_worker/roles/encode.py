"""Stage encoder: receives image bytes and holds their embeddings for a prefill worker.

chunks ─▶ media pool ─▶ Decoded ─▶ engine.encode ─▶ Ready, Ready, ...
              │           │ each item may be fetched from now on; a fetch waits until it is ready
              │           └ the last message if it has an error and the call skips no items
              └ not for a known file whose embedding is in the cache
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from vlm_worker.core.fair_order import Rank
from vlm_worker.engine.events import ItemReady as EngineItemReady
from vlm_worker.errors import InvalidRequestError
from vlm_worker.roles.attempt_registry import AttemptHandle
from vlm_worker.roles.context import CallTimer, RoleContext
from vlm_worker.roles.request_memory import CallMemory
from vlm_worker.roles.uploads import Chunk, DecodedUpload, Media, Uploads
from vlm_worker.transfer.producer import Producer
from vlm_worker.types import PreparedImage, StageSpan
from vlm_worker.wire.frames import Commit, FrameBatches
from vlm_worker.wire.messages import (
    Decoded,
    DecodedItem,
    EncodeCall,
    EncodeEvent,
    FetchCall,
    ItemError,
    ItemFailed,
    ItemReady,
    Reply,
)


class EncoderRole:
    """Serves Encode and FetchEmbedding."""

    def __init__(self, context: RoleContext, media: Media) -> None:
        self._context = context
        self._uploads = Uploads(context, media)

    async def encode(
        self, call: EncodeCall, chunks: AsyncIterator[Chunk], timer: CallTimer
    ) -> AsyncGenerator[Reply[EncodeEvent]]:
        """Encode one request's images. Closing the stream early frees all of them.

        Raises:
            InvalidRequestError, OverloadedError: see `Uploads.prepare`.
            DrainingError, DuplicateError, CancelledError: see `RoleContext.call`.
        """
        context = self._context
        tracked = context.call("Encode", call.key, last_resort=call.last_resort)
        call_memory = contextlib.closing(CallMemory(context.memory, call.cache_salt))
        with tracked as handle, call_memory as memory:
            try:
                prepared = await self._uploads.prepare(call, chunks, memory)
                good = [i for i, p in enumerate(prepared) if isinstance(p.result, PreparedImage)]
                if len(good) < len(prepared) and not call.skip_corrupt:
                    yield _decoded(prepared, timer)
                    return
                async with aclosing(self._encode(call, handle, prepared, good, timer)) as replies:
                    async for reply in replies:
                        yield reply
            finally:
                context.engine.unpin_cached(call.key)

    def fetch(self, call: FetchCall, *, large: bool) -> FrameBatches:
        """The frames of one embedding, as soon as it is ready. Raises the error of the encoding."""
        fingerprint = self._context.embed_layout.fingerprint
        return self._context.fetch(call, fingerprint=fingerprint, large=large)

    async def _encode(
        self,
        call: EncodeCall,
        handle: AttemptHandle,
        prepared: Sequence[DecodedUpload],
        good: Sequence[int],
        timer: CallTimer,
    ) -> AsyncGenerator[Reply[EncodeEvent]]:
        """Offer, announce and encode the items `good`; the engine numbers them from 0.

        Offers precede the announcement: a consumer may fetch before this call continues.
        """
        context = self._context
        images = [p.result for p in prepared if isinstance(p.result, PreparedImage)]
        transfers = [call.items[i].transfer_id for i in good]
        rows: dict[int, memoryview] = {}
        producers = [self._offer(handle, i, transfers[i], p, rows) for i, p in enumerate(images)]
        num_pending = len(good)
        # the time of sending Decoded is part of the queue time
        queued = max(image.done for image in prepared)
        try:
            with context.attempts.renew_while(transfers):
                yield _decoded(prepared, timer)
                await context.delay("encoder_queue")
                seconds = call.weighted_seconds / len(call.items)
                rank = Rank(call.priority, call.cache_salt, seconds)
                events = context.engine.encode(
                    call.key, images, rank=rank, pins_session=call.pins_session
                )
                async for event in events:
                    index = event.item
                    num_pending -= 1
                    if not isinstance(event, EngineItemReady):
                        producers[index].fail(event.error)
                        yield Reply(_failed(good[index], event.error), (), timer.now())
                        continue
                    if event.rows is not None:
                        rows[index] = event.rows
                    await context.delay("encode")
                    count = images[index].kept_tokens
                    producers[index].finish(Commit(num_units=count, num_tokens=count))
                    if event.rows is not None:  # only a peer can consume it
                        context.prebuild_frames(producers[index])
                    spans = (
                        timer.span("encoder_queue", queued, event.started_at, item=good[index] + 1),
                        timer.span("encode", event.started_at, item=good[index] + 1),
                    )
                    ready = ItemReady(good[index], event.cache_hit, event.num_bytes)
                    yield Reply(ready, spans, timer.now())
        finally:
            # after the last image is announced, the caller may leave; then the leases decide
            if num_pending:
                context.give_up(handle)
            else:  # no sweep frees the items whose lease ended before the engine pinned them
                for index, transfer_id in enumerate(transfers):
                    if not context.attempts.holds(transfer_id):
                        context.engine.release_embedding(call.key, index)

    def _offer(
        self,
        handle: AttemptHandle,
        index: int,
        transfer_id: str,
        image: PreparedImage,
        rows: dict[int, memoryview],
    ) -> Producer:
        """Offer an item to consumers: from `rows` if the engine gave them, else by an export."""
        layout = self._context.embed_layout
        num_rows, row_bytes = image.kept_tokens, layout.row_bytes_of(image.reduction)

        async def prepare() -> None:
            if index not in rows:
                rows[index] = await self._context.engine.export_embedding(handle.key, index)

        def export(first: int, count: int, _: memoryview) -> memoryview:
            whole = rows[index]
            if whole.nbytes != num_rows * row_bytes:
                raise InvalidRequestError("the embedding has another size than its layout")
            return whole.cast("B")[first * row_bytes : (first + count) * row_bytes]

        identity = self._context.incarnation.transfer_id(
            handle.key, transfer_id, layout.fingerprint, content=image.kept_key
        )
        producer = Producer(
            identity,
            unit_bytes=row_bytes,
            max_units=num_rows,
            export=export,
            prepare=prepare,
            timers=self._context.timers,
            copier=self._context.copier,
        )
        handle.offer(transfer_id, producer, item=index)
        return producer


def _decoded(prepared: Sequence[DecodedUpload], timer: CallTimer) -> Reply[EncodeEvent]:
    spans = (span for i, upload in enumerate(prepared) for span in _media_spans(upload, i, timer))
    return Reply(Decoded(tuple(map(_decoded_item, prepared))), tuple(spans), timer.now())


def _media_spans(upload: DecodedUpload, item: int, timer: CallTimer) -> tuple[StageSpan, ...]:
    """Spans of upload and decoding, without the wait for memory held by other images."""
    since, until = upload.waited
    if until <= since:
        return (timer.span("media", timer.arrived, upload.done, item=item + 1),)
    return (
        timer.span("media", timer.arrived, since, item=item + 1),
        timer.span("encoder_queue", since, until, item=item + 1),
        timer.span("media", until, upload.done, item=item + 1),
    )


def _decoded_item(upload: DecodedUpload) -> DecodedItem:
    image = upload.result
    if isinstance(image, PreparedImage):
        return DecodedItem(image.kept_tokens, image.grid_thw, image.kept_key)
    return DecodedItem(0, (0, 0, 0), b"", ItemError(image.code or "", str(image)))


def _failed(item: int, error: Exception) -> ItemFailed:
    code = error.code if isinstance(error, InvalidRequestError) else None
    return ItemFailed(item, code or "encode_failed", str(error))
