"""Stage decode: reserves KV blocks, fetches the KV of a prompt, generates the rest of the answer.

Reserve ─▶ KV blocks, under a lease
Decode  ─┬─ KV of our own boot id: adopt it, no copy
         └─ elsewhere: receive ─▶ fetch blocks into place while prefill writes them
                               ─▶ commit ─▶ start
         ─▶ Tokens, Tokens, ..., Finished
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from vlm_worker.core.block_kinds import BlockKinds
from vlm_worker.core.kv_cache import content_of
from vlm_worker.core.limits import fits
from vlm_worker.engine.events import EventStream, PrefillEvent
from vlm_worker.errors import CorruptTransferError, EngineError, GoneError, OverloadedError
from vlm_worker.roles.attempt_registry import AttemptHandle, check_fingerprint
from vlm_worker.roles.context import CallTimer, RoleContext, TransferStats
from vlm_worker.transfer.consumer import Pull, WriteWindow
from vlm_worker.types import FailedEvent, FinishedEvent, KVLayout, RequestKey, StageSpan, TokenEvent
from vlm_worker.wire.buffers import DestinationBuffers
from vlm_worker.wire.data_protocol import Fetch
from vlm_worker.wire.frames import Commit, Units
from vlm_worker.wire.messages import (
    DecodeCall,
    DecodeEvent,
    Finished,
    Reply,
    Reservation,
    ReserveCall,
    Tokens,
)

SHARE_RETRY_SECONDS: Final = 0.1
OTHERS_SHARE: Final = 8
"""One peer reserves at most its first request, or all KV but 1 / OTHERS_SHARE."""


class DecodeRole:
    """Serves Reserve and Decode."""

    def __init__(self, context: RoleContext) -> None:
        assert context.kv_layout is not None
        self._context = context
        self._layout: KVLayout = context.kv_layout
        self._reserved: dict[str, tuple[str, int]] = {}  # reservation id to peer and tokens

    async def reserve(self, call: ReserveCall, *, peer: str = "") -> Reservation:
        """Reserve KV blocks for a prompt, until Decode or the end of the lease.

        `peer` is the address of the caller.

        Raises:
            OverloadedError: too few blocks are free now, or the rest is kept for other peers.
            ContextTooLongError: the prompt can never fit.
            DrainingError, DuplicateError, CancelledError: see `RoleContext.call`.
        """
        context = self._context
        with context.call("Reserve", call.key, last_resort=call.last_resort) as handle:
            await context.delay("decode_reserve")
            self._check_share(peer, call.num_tokens)
            reserved = False
            try:
                await context.engine.reserve(call.key, call.num_tokens)
                reservation = Reservation(
                    uuid.uuid4().hex, context.incarnation.boot_id, context.timers.reservation
                )
                handle.offer(reservation.reservation_id, None)
                self._reserved[reservation.reservation_id] = (peer, call.num_tokens)
                reserved = True
            finally:
                if not reserved:
                    context.run(context.engine.release(call.key))
            return reservation

    def _check_share(self, peer: str, num_tokens: int) -> None:
        """Raise OverloadedError if a peer would reserve so much that too little is for others."""
        holds = self._context.attempts.holds
        self._reserved = {name: of for name, of in self._reserved.items() if holds(name)}
        reserved = sum(tokens for owner, tokens in self._reserved.values() if owner == peer)
        kv = self._context.engine.stats().kv
        capacity = kv.capacity_tokens if kv else 0
        if not fits(reserved, num_tokens, maximum=capacity - capacity // OTHERS_SHARE):
            raise OverloadedError(
                f"{reserved} of {capacity} tokens of KV are reserved by this peer; "
                "what is left is for others",
                retry_after_seconds=SHARE_RETRY_SECONDS,
            )

    async def decode(
        self, call: DecodeCall, timer: CallTimer
    ) -> AsyncGenerator[Reply[DecodeEvent]]:
        """Continue one answer after its first token. Closing the stream early frees everything.

        Raises:
            GoneError: the reservation or the KV is no longer held.
            PeerLostError, CorruptTransferError: the KV could not be fetched.
            WorkerError: an error of the engine.
        """
        context, key = self._context, call.request.key
        local = call.kv.boot_id == context.incarnation.boot_id
        with context.call("Decode", key) as handle:
            finished = False
            try:
                context.incarnation.check(call.boot_id)
                replies = (self._adopted if local else self._pulled)(call, handle, timer)
                async with aclosing(replies):
                    async for reply in replies:
                        finished = isinstance(reply.event, Finished)
                        yield reply
            finally:
                if not finished:
                    context.give_up(handle)

    async def _adopted(
        self, call: DecodeCall, handle: AttemptHandle, timer: CallTimer
    ) -> AsyncGenerator[Reply[DecodeEvent]]:
        """Continue a prompt that this process has prefilled or prefills; needs no reservation."""
        context, key = self._context, call.request.key
        content = content_of(call.request)
        prefilled = context.attempts.local(call.kv.transfer_id, key.request_id, content=content)
        if not handle.take_over(call.kv.transfer_id):
            raise GoneError(f"transfer {call.kv.transfer_id} is not held here")
        stream = context.engine.adopt_local(call.request)
        try:
            async with aclosing(answer_of(stream)) as answer:
                async for event in answer:
                    yield Reply(event, (), timer.now())
        except GoneError:
            commit = await prefilled.settled()
            if commit.finish_reason is None:
                raise
            yield ended_by_first_token(call, commit, (), timer)

    async def _pulled(
        self, call: DecodeCall, handle: AttemptHandle, timer: CallTimer
    ) -> AsyncGenerator[Reply[DecodeEvent]]:
        """Continue a prompt that another worker has prefilled or prefills."""
        context, key = self._context, call.request.key
        if not handle.take_over(call.reservation_id):
            raise GoneError(f"reservation {call.reservation_id} is not held here")
        started = timer.arrived + timer.now()
        commit = await self._pull(call)
        spans: tuple[StageSpan, ...] = (timer.span("kv_transfer", started),)
        if commit.finish_reason is not None:
            await context.engine.cancel(key)
            yield ended_by_first_token(call, commit, spans, timer)
            return
        if commit.first_token_id is None:
            raise CorruptTransferError("the commit lacks the first token")
        stream = await context.engine.start_decode(key, commit.first_token_id)
        async with aclosing(answer_of(stream)) as answer:
            async for event in answer:
                yield Reply(event, spans, timer.now())
                spans = ()

    async def _pull(self, call: DecodeCall) -> Commit:
        """Fetch all blocks that are not in our prefix cache, and pass them on as they arrive."""
        context, request, source = self._context, call.request, call.kv
        matcher = await context.matcher(request)
        check_fingerprint(source.fingerprint, self._layout.fingerprint)
        shape = BlockKinds.of_layout(self._layout).of_items(request.items)
        async with context.peers.hold(source) as peer:
            try:
                received = await context.engine.receive(request, in_place=True, matcher=matcher)
                memory = received.memory
                transfer = peer.pull(
                    Fetch.KV,
                    source,
                    request.key,
                    transport=context.transport,
                    on_refused=context.refused,
                    fingerprint=self._layout.fingerprint,
                    content=content_of(request),
                    unit_bytes=self._layout.block_bytes,
                    first_unit=received.first_block,
                    end_unit=shape.num_blocks(len(request.token_ids)),
                    into=None
                    if memory is None
                    else DestinationBuffers(memory, reports_progress=True),
                )
                started = await self._write(request.key, transfer, in_place=memory is not None)
            finally:
                context.engine.return_blocks(request.key)  # the transfer ended: no thread writes
            await context.delay("kv_transfer")
        num_tokens, expected = transfer.commit.num_tokens, len(request.token_ids)
        if num_tokens != expected:
            raise CorruptTransferError(f"KV of {num_tokens} tokens, the request has {expected}")
        context.on_transfer(TransferStats("kv", time.monotonic() - started, transfer.num_bytes))
        return transfer.commit

    async def _write(self, key: RequestKey, transfer: Pull, *, in_place: bool) -> float:
        """Confirm blocks that are in place to the engine, or pass it the bytes of the others.

        Returns:
            When the first ones arrived, by `time.monotonic`.
        """
        engine, started = self._context.engine, None

        async def write(units: Units) -> None:
            if in_place:
                await engine.confirm_blocks(key, units.first_unit, units.num_units)
            else:
                await engine.import_blocks(key, units.first_unit, units.data)

        async with WriteWindow(write) as window, aclosing(transfer.units()) as received:
            async for units in received:
                started = started or time.monotonic()
                await window.put(units)
            await window.flush()
        return started or time.monotonic()


def ended_by_first_token(
    call: DecodeCall, commit: Commit, spans: tuple[StageSpan, ...], timer: CallTimer
) -> Reply[DecodeEvent]:
    """The reply if the first token, which the gateway has from prefill, ended the answer.

    Without a first token, the last delivered one ended it.
    """
    assert commit.finish_reason is not None
    num_tokens = call.request.num_delivered_tokens + (commit.first_token_id is not None)
    return Reply(Finished(commit.finish_reason, num_tokens), spans, timer.now())


async def answer_of(stream: EventStream[PrefillEvent]) -> AsyncGenerator[Tokens | Finished]:
    """The engine's events as messages of the wire, until the last one."""
    async for event in stream:
        match event:
            case TokenEvent(index, token_id, logprobs=logprobs):
                yield Tokens(index, (token_id,), () if logprobs is None else (logprobs,))
            case FinishedEvent(reason, num_tokens):
                yield Finished(reason, num_tokens)
                return
            case FailedEvent(error):
                raise error
    raise EngineError("the engine ended the answer without its last event")
