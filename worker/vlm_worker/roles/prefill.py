"""Stage prefill: computes a prompt with its embeddings, and holds its KV for a decode worker.

submit ─▶ Accepted            decode may be called from now on
  NeedItems ─▶ fetch from the encoder, or take over from this process
  BlocksReady ─▶ these blocks may be fetched, while the rest is computed
  first token ─▶ commit, FirstToken, Done; the KV stays under its lease
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from vlm_worker.core.kv_cache import content_of
from vlm_worker.engine.events import EventStream, NeedItems, PrefillEvent
from vlm_worker.errors import EngineError
from vlm_worker.roles.attempt_registry import AttemptHandle, check_fingerprint
from vlm_worker.roles.context import CallTimer, RoleContext
from vlm_worker.roles.embedding_fetch import EmbeddingFetcher
from vlm_worker.transfer.producer import Producer
from vlm_worker.types import (
    BlocksReady,
    FailedEvent,
    FinishedEvent,
    FinishReason,
    KVLayout,
    ScheduledEvent,
    StageSpan,
    TokenEvent,
)
from vlm_worker.wire import messages as calls
from vlm_worker.wire.frames import Commit, FrameBatches
from vlm_worker.wire.messages import (
    Accepted,
    FetchCall,
    FirstToken,
    PrefillCall,
    PrefillDone,
    Reply,
)


@dataclasses.dataclass(slots=True)
class _Progress:
    submitted: float
    scheduled: float | None = None
    token: TokenEvent | None = None
    first_token_at: float = 0.0
    finish: FinishReason | None = None


class PrefillRole:
    """Serves Prefill and FetchKV."""

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
                    stream = self._submit(call)
                    yield Reply(self._accepted(call), (), timer.now())
                    progress = _Progress(submitted=queued)
                    await self._compute(call, stream, embeddings, producer, progress)
                    spans = (*embeddings.spans(timer), *_spans(progress, timer))
                # from now on the lease decides when the KV is freed, not the caller
                finished = True
                if not context.attempts.holds(call.transfer_id):
                    # the lease ended during the prefill; a KV that was adopted stays
                    context.run(context.engine.release(key))
                yield Reply(_first_token(progress), spans, timer.now())
                yield Reply(PrefillDone(), (), timer.now())
            finally:
                if not finished:
                    context.give_up(handle)

    def fetch(self, call: FetchCall, *, large: bool) -> FrameBatches:
        """The frames of a prompt's KV, as blocks are written."""
        return self._context.fetch(call, fingerprint=self._layout.fingerprint, large=large)

    def _submit(self, call: PrefillCall) -> EventStream[PrefillEvent]:
        request = call.request
        if not call.handoff:
            max_tokens = request.num_delivered_tokens + 1
            sampling = dataclasses.replace(request.sampling, max_tokens=max_tokens)
            request = dataclasses.replace(request, sampling=sampling)
        return self._context.engine.submit_prefill(request, for_peer=call.handoff)

    def _offer(self, call: PrefillCall, handle: AttemptHandle) -> Producer:
        key = call.request.key
        identity = self._context.incarnation.transfer_id(
            key, call.transfer_id, self._layout.fingerprint, content=content_of(call.request)
        )
        producer = Producer(
            identity,
            unit_bytes=self._layout.block_bytes,
            max_units=-(-len(call.request.token_ids) // self._layout.block_size),
            export=functools.partial(self._context.engine.readable_blocks.read, key),
            lend=functools.partial(self._context.engine.lend_blocks, key),
            timers=self._context.timers,
            copier=self._context.copier,
        )
        if call.handoff:
            handle.offer(call.transfer_id, producer)
        return producer

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
                    case TokenEvent():
                        await self._context.delay("prefill")
                        progress.token = event
                        progress.first_token_at = time.monotonic()
                    case FinishedEvent(reason):
                        progress.finish = reason
                    case FailedEvent(error):
                        producer.fail(error)
                        raise error
        if progress.token is None:
            raise EngineError("the engine ended the prompt without a token")
        num_tokens = len(call.request.token_ids)
        num_units = -(-num_tokens // self._layout.block_size)
        producer.finish(Commit(num_units, num_tokens, progress.token.token_id, progress.finish))


def _first_token(progress: _Progress) -> FirstToken:
    token = progress.token
    assert token is not None
    return FirstToken(
        token.index, token.token_id, token.num_cached_tokens, progress.finish, token.logprobs
    )


def _spans(progress: _Progress, timer: CallTimer) -> tuple[StageSpan, ...]:
    scheduled = progress.scheduled or progress.submitted
    return (
        timer.span("prefill_queue", progress.submitted, scheduled),
        timer.span("prefill", scheduled, progress.first_token_at),
    )
