"""The embeddings of one prompt, from where they are to the engine. Used by prefill.

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
from vlm_worker.roles.host import Host, Transfer
from vlm_worker.roles.pulling import pull
from vlm_worker.roles.times import CallClock
from vlm_worker.transfer.pieces import room_of
from vlm_worker.types import Source, StageSpan
from vlm_worker.wire.calls import PrefillCall
from vlm_worker.wire.data import Fetch
from vlm_worker.wire.rooms import Rooms

_ATTEMPTS = 2
_FOR_GOOD = frozenset({Refusal.EPOCH, Refusal.IDENTITY})
"""Bytes of another life or request: this producer has nothing for us."""


class Embeddings:
    """Fetches what `need` names, concurrently; an error ends `watch`."""

    def __init__(self, host: Host, call: PrefillCall) -> None:
        self._host = host
        self._call = call
        self._stack = contextlib.AsyncExitStack()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._times: dict[int, tuple[float, float]] = {}

    async def __aenter__(self) -> Self:
        """Hold the leases of all items."""
        for source in self._call.sources:
            if source.boot_id == self._host.life.boot_id:
                self._stack.enter_context(self._host.offers.keep([source.transfer_id]))
            else:
                await self._stack.enter_async_context(self._host.peers.hold(source))
        return self

    async def __aexit__(self, *exc: object) -> None:
        """End what still fetches, and release the leases, even where we are cancelled once more."""
        for task in self._tasks.values():
            task.cancel()
        try:
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        finally:
            for source in self._call.sources:
                self._host.offers.release(source.boot_id, source.transfer_id)
            await self._stack.aclose()

    def need(self, items: Iterable[int]) -> None:
        """Fetch these items and put them into the engine."""
        for item in items:
            known = self._tasks.get(item)
            if known is None or known.done():
                self._tasks[item] = asyncio.create_task(self._fetch(item))

    async def watch(self, stream: EventStream[PrefillEvent]) -> AsyncGenerator[PrefillEvent]:
        """The engine's events; raises what a fetch failed with."""
        following: asyncio.Task[Any] | None = None
        try:
            while True:
                following = following or asyncio.create_task(_next(stream))
                running = {task for task in self._tasks.values() if not task.done()}
                await asyncio.wait({following, *running}, return_when=asyncio.FIRST_COMPLETED)
                self._raise_failed()
                if following.done():
                    event = following.result()
                    following = None
                    if event is None:
                        return
                    yield event
        finally:
            if following is not None:
                following.cancel()

    def spans(self, clock: CallClock) -> tuple[StageSpan, ...]:
        """When each fetched item was asked for and had arrived."""
        return tuple(
            clock.span("embed_transfer", start, end, item=item + 1)
            for item, (start, end) in sorted(self._times.items())
        )

    def _raise_failed(self) -> None:
        for task in self._tasks.values():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _fetch(self, item: int) -> None:
        begun = time.monotonic()
        source = self._call.sources[item]
        await self._host.delay("embed_transfer")
        rows = (
            await self._local(item, source)
            if source.boot_id == self._host.life.boot_id
            else await self._remote(item, source)
        )
        # The engine answers after its present step, which belongs to prefill.
        self._times[item] = (begun, time.monotonic())
        await self._host.engine.put_embedding(self._call.request.key, item, rows)

    async def _local(self, item: int, source: Source) -> memoryview:
        """From the encoder in this process, without frames."""
        request = self._call.request
        picture = request.items[item]
        outgoing = self._host.offers.local(
            source.transfer_id, request.key.request_id, content=picture.image_key
        )
        return await outgoing.whole(picture.num_tokens)

    async def _remote(self, item: int, source: Source) -> memoryview:
        """Over the wire; what arrives corrupt is fetched once more."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await self._pull(item, source)
            except CorruptTransferError as error:
                if attempt == _ATTEMPTS or error.refusal in _FOR_GOOD:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _pull(self, item: int, source: Source) -> memoryview:
        begun = time.monotonic()
        key = self._call.request.key
        layout = self._host.embed_layout
        picture = self._call.request.items[item]
        num_rows = picture.num_tokens
        rows = room_of(num_rows * layout.row_bytes)
        async with self._host.peers.hold(source) as peer:
            transfer = pull(
                self._host,
                peer,
                Fetch.EMBEDDING,
                source,
                key,
                fingerprint=layout.fingerprint,
                content=picture.image_key,
                unit_bytes=layout.row_bytes,
                first_unit=0,
                end_unit=num_rows,
                into=Rooms([rows]),
            )
            async with aclosing(transfer.units()) as received:
                async for _ in received:
                    pass
        self._host.on_transfer(Transfer("embed", time.monotonic() - begun, transfer.num_bytes))
        return rows


async def _next(stream: EventStream[PrefillEvent]) -> PrefillEvent | None:
    return await anext(stream, None)
