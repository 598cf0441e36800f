"""Stage prefill: computes a prompt with its embeddings, and holds its KV for a decode worker.

submit ─▶ Accepted            decode may be called from now on
  NeedItems ─▶ fetch from the encoder, or take over from this process
  BlocksReady ─▶ these blocks may be fetched, while the rest is computed
  first token ─▶ commit, PromptLogprobs if wanted, FirstToken, Done; the KV stays under its lease

The embeddings of a prompt (`EmbeddingFetcher`):

  NeedItems ─▶ need(items) ─┬─ our own boot id: wait until it is encoded, no copy over the wire
                            └─ elsewhere: FetchEmbedding, checked frame by frame

All leases are held from the start, because the prompt may wait in the queue longer than they last.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any, Self

from vlm_worker.core.block_kinds import BlockKinds
from vlm_worker.core.grammars import Matcher
from vlm_worker.core.kv_cache import content_of
from vlm_worker.engine.events import EventStream, NeedItems, PrefillEvent
from vlm_worker.errors import CorruptTransferError, DrainingError, EngineError, Refusal
from vlm_worker.roles.attempt_registry import AttemptHandle, check_fingerprint
from vlm_worker.roles.context import CallTimer, RoleContext, TransferStats
from vlm_worker.transfer.producer import Producer
from vlm_worker.types import (
    BlocksReady,
    FailedEvent,
    FinishedEvent,
    FinishReason,
    KVLayout,
    PromptLogprobs,
    Request,
    ScheduledEvent,
    Source,
    StageSpan,
    TokenEvent,
)
from vlm_worker.wire import messages as calls
from vlm_worker.wire.buffers import DestinationBuffers, allocate_buffer
from vlm_worker.wire.data_protocol import Fetch
from vlm_worker.wire.frames import Commit, FrameBatches
from vlm_worker.wire.messages import (
    Accepted,
    FetchCall,
    FirstToken,
    PrefillCall,
    PrefillDone,
    Reply,
)
from vlm_worker.wire.prefetch_messages import PrefetchCall, PrefetchResult


@dataclasses.dataclass(slots=True)
class _Progress:
    submitted: float
    scheduled: float | None = None
    token: TokenEvent | None = None
    first_token_at: float = 0.0
    finish: FinishReason | None = None
    prompt: list[PromptLogprobs] = dataclasses.field(default_factory=list)


class PrefillRole:
    """Serves Prefill, Prefetch and FetchKV."""

    def __init__(self, context: RoleContext) -> None:
        assert context.kv_layout is not None
        self._context = context
        self._layout: KVLayout = context.kv_layout

    async def prefill(
        self, call: PrefillCall, timer: CallTimer
    ) -> AsyncGenerator[Reply[calls.PrefillEvent]]:
        """Compute one prompt. Closing the stream before its last message frees everything.

        Raises:
            PeerLostError, GoneError, CorruptTransferError: an embedding could not be fetched.
            WorkerError: a refusal or an error of the engine.
        """
        context, key = self._context, call.request.key
        with context.call("Prefill", key, last_resort=call.last_resort) as handle:
            for source in call.sources:
                check_fingerprint(source.fingerprint, context.embed_layout.fingerprint)
            producer = self._offer(call, handle)
            finished = False
            try:
                async with EmbeddingFetcher(context, call) as embeddings:
                    queued = timer.arrived + timer.now()
                    await context.delay("prefill_queue")
                    stream = self._submit(call, await context.matcher(call.request))
                    yield Reply(self._accepted(call), (), timer.now())
                    progress = _Progress(submitted=queued)
                    await self._compute(call, stream, embeddings, producer, progress)
                    spans = (*embeddings.spans(timer), *_spans(progress, timer))
                # from now on the lease decides when the KV is freed, not the caller
                finished = True
                if not context.attempts.holds(call.transfer_id):
                    # the lease ended during the prefill; a KV that was adopted stays
                    context.run(context.engine.release(key))
                for part in progress.prompt:
                    yield Reply(part, (), timer.now())
                yield Reply(_first_token(call.request, progress), spans, timer.now())
                yield Reply(PrefillDone(), (), timer.now())
            finally:
                if not finished:
                    context.give_up(handle)

    async def prefetch(self, call: PrefetchCall) -> PrefetchResult:
        """Compute the beginning of a prompt into the prefix cache while no request is here.

        It is no call in flight: routing, draining and the autoscaler do not see it.

        Raises:
            DrainingError: this worker takes no new work.
            WorkerError: the request cannot run here.
        """
        if not self._context.accepting:
            raise DrainingError("this worker is draining and takes no new work")
        return await self._context.engine.prefetch(call.request)

    def fetch(self, call: FetchCall, *, large: bool) -> FrameBatches:
        """The frames of a prompt's KV, as blocks are written."""
        return self._context.fetch(call, fingerprint=self._layout.fingerprint, large=large)

    def _submit(self, call: PrefillCall, matcher: Matcher | None) -> EventStream[PrefillEvent]:
        request = call.request
        if not call.handoff:
            max_tokens = request.num_delivered_tokens + 1
            sampling = dataclasses.replace(request.sampling, max_tokens=max_tokens)
            request = dataclasses.replace(request, sampling=sampling)
        return self._context.engine.submit_prefill(request, for_peer=call.handoff, matcher=matcher)

    def _offer(self, call: PrefillCall, handle: AttemptHandle) -> Producer:
        key = call.request.key
        identity = self._context.incarnation.transfer_id(
            key, call.transfer_id, self._layout.fingerprint, content=content_of(call.request)
        )
        producer = Producer(
            identity,
            unit_bytes=self._layout.block_bytes,
            max_units=self._num_blocks(call.request),
            export=functools.partial(self._context.engine.readable_blocks.read, key),
            lend=functools.partial(self._context.engine.lend_blocks, key),
            timers=self._context.timers,
            copier=self._context.copier,
        )
        if call.handoff:
            handle.offer(call.transfer_id, producer)
        return producer

    def _num_blocks(self, request: Request) -> int:
        """KV blocks of the request's tokens."""
        shape = BlockKinds.of_layout(self._layout).of_items(request.items)
        return shape.num_blocks(len(request.token_ids))

    def _accepted(self, call: PrefillCall) -> Accepted:
        return Accepted(
            transfer_id=call.transfer_id,
            boot_id=self._context.incarnation.boot_id,
            layout_fingerprint=self._layout.fingerprint,
            lease_seconds=self._context.timers.lease,
        )

    async def _compute(
        self,
        call: PrefillCall,
        stream: EventStream[PrefillEvent],
        embeddings: EmbeddingFetcher,
        producer: Producer,
        progress: _Progress,
    ) -> None:
        """Follow the engine to the first token, or to the end if that token ends the answer."""
        async with aclosing(embeddings.watch(stream)) as events:
            async for event in events:
                match event:
                    case NeedItems(items):
                        embeddings.need(items)
                    case ScheduledEvent(at):
                        progress.scheduled = progress.scheduled or at
                    case BlocksReady(num_blocks):
                        producer.advance(num_blocks)
                    case PromptLogprobs():
                        progress.prompt.append(event)
                    case TokenEvent():
                        await self._context.delay("prefill")
                        progress.token = event
                        progress.first_token_at = time.monotonic()
                    case FinishedEvent(reason):
                        progress.finish = reason
                    case FailedEvent(error):
                        producer.fail(error)
                        raise error
        num_tokens, token = len(call.request.token_ids), progress.token
        if token is not None:
            num_units = self._num_blocks(call.request)
            producer.finish(Commit(num_units, num_tokens, token.token_id, progress.finish))
        elif progress.finish is not None:  # the last delivered token ends the answer: no KV follows
            producer.finish(Commit(0, num_tokens, finish_reason=progress.finish))
        else:
            raise EngineError("the engine ended the prompt without a token")


def _first_token(request: Request, progress: _Progress) -> FirstToken:
    """The first token; the last delivered one if it ends the answer, which gateways know."""
    token = progress.token
    if token is None:
        return FirstToken(
            request.num_delivered_tokens - 1, request.token_ids[-1], 0, progress.finish
        )
    return FirstToken(
        token.index, token.token_id, token.num_cached_tokens, progress.finish, token.logprobs
    )


def _spans(progress: _Progress, timer: CallTimer) -> tuple[StageSpan, ...]:
    scheduled = progress.scheduled or progress.submitted
    return (
        timer.span("prefill_queue", progress.submitted, scheduled),
        timer.span("prefill", scheduled, progress.first_token_at or None),
    )


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
        num_rows, row_bytes = image.num_tokens, layout.row_bytes_of(image.reduction)
        rows = allocate_buffer(num_rows * row_bytes)
        async with self._context.peers.hold(source) as peer:
            transfer = peer.pull(
                Fetch.EMBEDDING,
                source,
                key,
                transport=self._context.transport,
                on_refused=self._context.refused,
                fingerprint=layout.fingerprint,
                content=image.image_key,
                unit_bytes=row_bytes,
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
