"""Fetches the embeddings of one prompt and puts them into the engine. Used by prefill.

    NeedItems ─▶ need(items) ─┬─ our own boot id: wait until it is encoded, no copy over the wire
                              └─ elsewhere: FetchEmbedding, checked frame by frame

All leases are held from the start, because the prompt may wait in the queue longer than they last.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, Self

from vlm_worker.engine.events import EventStream, PrefillEvent
from vlm_worker.errors import CorruptTransferError, Refusal
from vlm_worker.roles.context import CallTimer, RoleContext, TransferStats
from vlm_worker.types import Source, StageSpan
from vlm_worker.wire.buffers import DestinationBuffers, allocate_buffer
from vlm_worker.wire.data_protocol import Fetch
from vlm_worker.wire.messages import PrefillCall

_PERMANENT = frozenset({Refusal.EPOCH, Refusal.IDENTITY})
"""Bytes of another incarnation or request: this producer has no usable data, so do not retry."""


class EmbeddingFetcher:
    """Fetches the items given to `need`, concurrently; an error of a fetch ends `watch`."""

    def __init__(self, context: RoleContext, call: PrefillCall) -> None:
        self._context = context
        self._call = call
        self._stack = contextlib.AsyncExitStack()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._times: dict[int, tuple[float, float]] = {}

    async def __aenter__(self) -> Self:
        """Hold the leases of all items."""
        context = self._context
        try:
            for source in self._call.sources:
                if source.boot_id == context.incarnation.boot_id:
                    self._stack.enter_context(context.attempts.renew_while([source.transfer_id]))
                else:
                    await self._stack.enter_async_context(context.peers.hold(source))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Stop the fetches and release the leases, even if the task is cancelled once more."""
        for task in self._tasks.values():
            task.cancel()
        try:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        finally:
            for source in self._call.sources:
                self._context.attempts.release(source.boot_id, source.transfer_id)
            await self._stack.aclose()

    def need(self, items: Iterable[int]) -> None:
        for item in items:
            if item not in self._tasks or self._tasks[item].done():
                self._tasks[item] = asyncio.create_task(self._fetch(item))

    async def watch(self, stream: EventStream[PrefillEvent]) -> AsyncGenerator[PrefillEvent]:
        """The engine's events; raises the error of a failed fetch."""
        following: asyncio.Task[Any] | None = None
        try:
            while True:
                following = following or asyncio.create_task(_next(stream))
                running = {task for task in self._tasks.values() if not task.done()}
                await asyncio.wait({following, *running}, return_when=asyncio.FIRST_COMPLETED)
                for task in self._tasks.values():
                    if task.done() and not task.cancelled() and (error := task.exception()):
                        raise error
                if following.done():
                    event = following.result()
                    following = None
                    if event is None:
                        return
                    yield event
        finally:
            if following is not None:
                following.cancel()

    def spans(self, timer: CallTimer) -> tuple[StageSpan, ...]:
        """One span per fetched item, from its request to its arrival."""
        return tuple(
            timer.span("embed_transfer", start, end, item=item + 1)
            for item, (start, end) in sorted(self._times.items())
        )

    async def _fetch(self, item: int) -> None:
        started = time.monotonic()
        source = self._call.sources[item]
        await self._context.delay("embed_transfer")
        rows = (
            await self._local(item, source)
            if source.boot_id == self._context.incarnation.boot_id
            else await self._remote(item, source)
        )
        # The engine answers after its current step, whose time belongs to prefill.
        self._times[item] = (started, time.monotonic())
        await self._context.engine.put_embedding(self._call.request.key, item, rows)

    async def _local(self, item: int, source: Source) -> memoryview:
        """Get an item from the encoder in this process, without frames."""
        request = self._call.request
        image = request.items[item]
        producer = self._context.attempts.local(
            source.transfer_id, request.key.request_id, content=image.image_key
        )
        return await producer.whole(image.num_tokens)

    async def _remote(self, item: int, source: Source) -> memoryview:
        """Fetch an item over the wire; a corrupt transfer is retried once."""
        try:
            return await self._pull(item, source)
        except CorruptTransferError as error:
            if error.refusal in _PERMANENT:
                raise
        return await self._pull(item, source)

    async def _pull(self, item: int, source: Source) -> memoryview:
        started = time.monotonic()
        key = self._call.request.key
        layout = self._context.embed_layout
        image = self._call.request.items[item]
        num_rows = image.num_tokens
        rows = allocate_buffer(num_rows * layout.row_bytes)
        async with self._context.peers.hold(source) as peer:
            transfer = peer.pull(
                Fetch.EMBEDDING,
                source,
                key,
                transport=self._context.transport,
                on_refused=self._context.refused,
                fingerprint=layout.fingerprint,
                content=image.image_key,
                unit_bytes=layout.row_bytes,
                first_unit=0,
                end_unit=num_rows,
                into=DestinationBuffers([rows]),
            )
            async with aclosing(transfer.units()) as received:
                async for _ in received:
                    pass
        self._context.on_transfer(
            TransferStats("embed", time.monotonic() - started, transfer.num_bytes)
        )
        return rows


async def _next(stream: EventStream[PrefillEvent]) -> PrefillEvent | None:
    return await anext(stream, None)
