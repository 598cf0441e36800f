"""Stage encoder: picture bytes come in, embeddings are held for whoever prefills.

chunks ─▶ media pool ─▶ Decoded ─▶ engine.encode ─▶ Ready, Ready, ...
              │           │ each item may be fetched by now; a fetch waits until it is ready
              │           └ with an error in it, and nothing to skip: the last word
              └ not for a file that was seen before, while its embedding is in the cache
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from vlm_worker.engine.events import ItemReady as EngineItemReady
from vlm_worker.errors import InvalidRequestError
from vlm_worker.roles.host import Host
from vlm_worker.roles.times import CallClock
from vlm_worker.roles.uploads import Chunk, Media, Prepared, Uploads
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
from vlm_worker.wire.frames import Commit, Runs


class EncoderRole:
    """Encode and FetchEmbedding."""

    def __init__(self, host: Host, media: Media) -> None:
        self._host = host
        self._uploads = Uploads(host, media)

    async def encode(
        self, call: EncodeCall, chunks: AsyncIterator[Chunk], clock: CallClock
    ) -> AsyncGenerator[Reply[EncodeEvent]]:
        """One request's pictures. Giving up early frees all of them.

        Raises:
            InvalidRequestError, OverloadedError: see `Uploads.prepare`.
            DrainingError, DuplicateError, CancelledError: see `Host.scope`.
        """
        host = self._host
        scope = host.scope("Encode", call.key, last_resort=call.last_resort)
        with scope, host.memory.call(call.cache_salt) as memory:
            try:
                prepared = await self._uploads.prepare(call, chunks, memory)
                good = [i for i, p in enumerate(prepared) if isinstance(p.result, PreparedImage)]
                if len(good) < len(prepared) and not call.skip_corrupt:
                    yield _decoded(prepared, clock)
                    return
                async with aclosing(self._encode(call, prepared, good, clock)) as replies:
                    async for reply in replies:
                        yield reply
            finally:
                host.engine.release_known(call.key)

    def fetch(self, call: FetchCall, *, large: bool) -> Runs:
        """The frames of one embedding, as soon as it is ready.

        Raises:
            GoneError, IncompatibleError: see `Offers.find`.
            Exception: why it could not be encoded.
        """
        layout = self._host.embed_layout
        outgoing = self._host.offers.find(call, fingerprint=layout.fingerprint)
        return self._host.send(outgoing, call, large=large)

    async def _encode(
        self, call: EncodeCall, prepared: Sequence[Prepared], good: Sequence[int], clock: CallClock
    ) -> AsyncGenerator[Reply[EncodeEvent]]:
        """Offer, announce and encode the items `good`; the engine counts them from 0.

        In this order: a consumer may hear of them, and be here, before this call goes on.
        """
        host = self._host
        pictures = [one.result for one in prepared if isinstance(one.result, PreparedImage)]
        transfers = [call.items[i].transfer_id for i in good]
        rows: dict[int, memoryview] = {}
        offers = [self._offer(call.key, i, transfers[i], p, rows) for i, p in enumerate(pictures)]
        num_left = len(good)
        # telling the caller that they are decoded is part of the wait
        queued = max(picture.done for picture in prepared)
        try:
            with host.offers.keep(transfers):
                yield _decoded(prepared, clock)
                await host.delay("encoder_queue")
                asked = host.engine.encode(call.key, pictures, priority=call.priority)
                async for event in asked:
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
                    if event.rows is not None:  # nobody but its consumers has a use for it
                        host.make_ahead(offers[index])
                    spans = _encode_spans(event, good[index], queued, clock)
                    ready = ItemReady(good[index], event.cache_hit, event.num_bytes)
                    yield Reply(ready, spans, clock.now())
        finally:
            # with its last picture announced, the caller may leave; then the leases decide
            if num_left:
                host.run(host.abandon(call.key))
            else:
                self._let_go(call.key, transfers)

    def _let_go(self, key: RequestKey, transfers: Sequence[str]) -> None:
        """Free the items whose lease ended before the engine pinned them: nobody else will."""
        for index, transfer_id in enumerate(transfers):
            if not self._host.offers.holds(transfer_id):
                self._host.engine.release_embedding(key, index)

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

        async def prepare() -> None:
            if index not in rows:
                rows[index] = await self._host.engine.export_embedding(key, index)

        def export(first: int, count: int, _: memoryview) -> memoryview:
            whole = rows[index]
            if whole.nbytes != picture.num_tokens * layout.row_bytes:
                raise InvalidRequestError("the embedding has another size than its layout")
            return whole.cast("B")[first * layout.row_bytes : (first + count) * layout.row_bytes]

        identity = self._host.life.transfer_id(
            key, transfer_id, layout.fingerprint, content=picture.image_key
        )
        outgoing = Outgoing(
            identity,
            unit_bytes=layout.row_bytes,
            max_units=picture.num_tokens,
            export=export,
            prepare=prepare,
            timers=self._host.timers,
            copier=self._host.copier,
        )
        self._host.offers.offer(transfer_id, key, outgoing, item=index)
        return outgoing


def _decoded(prepared: Sequence[Prepared], clock: CallClock) -> Reply[EncodeEvent]:
    # a picture's way here belongs to it
    spans = (clock.span("media", clock.arrived, p.done, item=i + 1) for i, p in enumerate(prepared))
    return Reply(Decoded(tuple(map(_decoded_item, prepared))), tuple(spans), clock.now())


def _decoded_item(one: Prepared) -> DecodedItem:
    picture = one.result
    if isinstance(picture, PreparedImage):
        return DecodedItem(picture.num_tokens, picture.grid_thw, picture.image_key)
    return DecodedItem(0, (0, 0, 0), b"", picture)


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
