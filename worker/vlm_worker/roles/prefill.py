"""Stage prefill: a prompt and the embeddings it names become KV and the first token.

submit ─▶ Accepted            decode may be called from here on
  NeedItems ─▶ fetch from the encoder, or take over from our own
  BlocksReady ─▶ may be fetched, while the rest is computed
  first token ─▶ commit, FirstToken, Done; the KV stays under its lease
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from vlm_worker.core.prefix import content_of
from vlm_worker.engine.events import EventStream, NeedItems, PrefillEvent
from vlm_worker.errors import EngineError
from vlm_worker.roles.embeddings import Embeddings
from vlm_worker.roles.host import Host
from vlm_worker.roles.offers import check_fingerprint
from vlm_worker.roles.times import CallClock
from vlm_worker.transfer.outgoing import Outgoing
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
from vlm_worker.wire import calls
from vlm_worker.wire.calls import Accepted, FetchCall, FirstToken, PrefillCall, PrefillDone, Reply
from vlm_worker.wire.frames import Commit, Runs


@dataclasses.dataclass(slots=True)
class _Progress:
    """What the engine has said so far of one prefill."""

    submitted: float
    scheduled: float | None = None
    token: TokenEvent | None = None
    first_token_at: float = 0.0
    finish: FinishReason | None = None


class PrefillRole:
    """Prefill and FetchKV."""

    def __init__(self, host: Host) -> None:
        assert host.kv_layout is not None
        self._host = host
        self._layout: KVLayout = host.kv_layout

    async def prefill(
        self, call: PrefillCall, clock: CallClock
    ) -> AsyncGenerator[Reply[calls.PrefillEvent]]:
        """One prompt. Giving up before the last word frees everything.

        Raises:
            PeerLostError, GoneError, CorruptTransferError: an embedding could not be fetched.
            WorkerError: what the engine refused or failed with.
        """
        host, key = self._host, call.request.key
        with host.scope("Prefill", key, last_resort=call.last_resort):
            for source in call.sources:
                check_fingerprint(source.fingerprint, host.embed_layout.fingerprint)
            outgoing = self._offer(call)
            finished = False
            try:
                async with Embeddings(host, call) as embeddings:
                    queued = clock.arrived + clock.now()
                    await host.delay("prefill_queue")
                    stream = self._submit(call)
                    yield Reply(self._accepted(call), (), clock.now())
                    progress = await self._compute(
                        call, stream, embeddings, outgoing, submitted=queued
                    )
                    spans = (*embeddings.spans(clock), *_spans(progress, clock))
                # from here on the lease decides, not whether this caller stays
                finished = True
                if not host.offers.holds(call.transfer_id):
                    # it ended while the prompt was computed; what was adopted stays
                    host.run(host.engine.release(key))
                yield Reply(_first_token(progress), spans, clock.now())
                yield Reply(PrefillDone(), (), clock.now())
            finally:
                if not finished:
                    host.run(host.abandon(key))

    def fetch(self, call: FetchCall, *, large: bool) -> Runs:
        """The frames of a prompt's KV, as it is written.

        Raises:
            GoneError, IncompatibleError: see `Offers.find`.
        """
        outgoing = self._host.offers.find(call, fingerprint=self._layout.fingerprint)
        return self._host.send(outgoing, call, large=large)

    def _submit(self, call: PrefillCall) -> EventStream[PrefillEvent]:
        request = call.request
        if not call.hand_over:
            one = request.num_delivered_tokens + 1
            sampling = dataclasses.replace(request.sampling, max_tokens=one)
            request = dataclasses.replace(request, sampling=sampling)
        return self._host.engine.submit_prefill(request, hold=call.hand_over)

    def _offer(self, call: PrefillCall) -> Outgoing:
        key = call.request.key
        identity = self._host.life.transfer_id(
            key,
            call.transfer_id,
            self._layout.fingerprint,
            content=content_of(call.request),
        )
        outgoing = Outgoing(
            identity,
            unit_bytes=self._layout.block_bytes,
            max_units=-(-len(call.request.token_ids) // self._layout.block_size),
            export=functools.partial(self._host.engine.read_blocks, key),
            timers=self._host.timers,
            copier=self._host.copier,
        )
        if call.hand_over:
            self._host.offers.offer(call.transfer_id, key, outgoing)
        return outgoing

    def _accepted(self, call: PrefillCall) -> Accepted:
        return Accepted(
            transfer_id=call.transfer_id,
            boot_id=self._host.life.boot_id,
            layout_fingerprint=self._layout.fingerprint,
            lease_seconds=self._host.timers.lease,
        )

    async def _compute(
        self,
        call: PrefillCall,
        stream: EventStream[PrefillEvent],
        embeddings: Embeddings,
        outgoing: Outgoing,
        *,
        submitted: float,
    ) -> _Progress:
        """Follow the engine to the first token, or to the end where that is one."""
        progress = _Progress(submitted)
        async with aclosing(embeddings.watch(stream)) as events:
            async for event in events:
                match event:
                    case NeedItems(items):
                        embeddings.need(items)
                    case ScheduledEvent(at):
                        progress.scheduled = progress.scheduled or at
                    case BlocksReady(num_blocks):
                        outgoing.advance(num_blocks)
                    case TokenEvent():
                        await self._host.delay("prefill")
                        progress.token = event
                        progress.first_token_at = time.monotonic()
                    case FinishedEvent(reason):
                        progress.finish = reason
                    case FailedEvent(error):
                        outgoing.fail(error)
                        raise error
        if progress.token is None:
            raise EngineError("the engine ended the prompt without a token")
        num_tokens = len(call.request.token_ids)
        outgoing.finish(
            Commit(
                num_units=-(-num_tokens // self._layout.block_size),
                num_tokens=num_tokens,
                first_token_id=progress.token.token_id,
                finish_reason=progress.finish,
            )
        )
        return progress


def _first_token(progress: _Progress) -> FirstToken:
    token = progress.token
    assert token is not None
    return FirstToken(
        token.index, token.token_id, token.num_cached_tokens, progress.finish, token.logprobs
    )


def _spans(progress: _Progress, clock: CallClock) -> tuple[StageSpan, ...]:
    scheduled = progress.scheduled or progress.submitted
    return (
        clock.span("prefill_queue", progress.submitted, scheduled),
        clock.span("prefill", scheduled, progress.first_token_at),
    )
