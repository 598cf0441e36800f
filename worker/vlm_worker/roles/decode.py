"""Stage decode: room first, then the KV of a prompt, then tokens to the end of the answer.

Reserve ─▶ room, under a lease
Decode  ─┬─ KV of our own boot id: adopt it, no copy
         └─ elsewhere: receive ─▶ pull blocks into their place while prefill writes them
                               ─▶ commit ─▶ start
         ─▶ Tokens, Tokens, ..., Finished
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

from vlm_worker.core.prefix import content_of
from vlm_worker.errors import CorruptTransferError, GoneError
from vlm_worker.roles.answers import answer_of, ended_by_first_token
from vlm_worker.roles.host import Host, Transfer
from vlm_worker.roles.offers import check_fingerprint
from vlm_worker.roles.pulling import pull
from vlm_worker.roles.times import CallClock
from vlm_worker.transfer.incoming import Pull
from vlm_worker.transfer.landing import Landing
from vlm_worker.types import KVLayout, RequestKey, StageSpan
from vlm_worker.wire.calls import (
    DecodeCall,
    DecodeEvent,
    Finished,
    Reply,
    Reservation,
    ReserveCall,
)
from vlm_worker.wire.data import Fetch
from vlm_worker.wire.frames import Commit, Units
from vlm_worker.wire.rooms import Rooms


class DecodeRole:
    """Reserve and Decode."""

    def __init__(self, host: Host) -> None:
        assert host.kv_layout is not None
        self._host = host
        self._layout: KVLayout = host.kv_layout

    async def reserve(self, call: ReserveCall) -> Reservation:
        """Hold room for a prompt until Decode, or until its lease ends.

        Raises:
            OverloadedError: no room now.
            ContextTooLongError: there never will be.
            DrainingError, DuplicateError, CancelledError: see `Host.scope`.
        """
        host = self._host
        with host.scope("Reserve", call.key, last_resort=call.last_resort):
            await host.delay("decode_reserve")
            reserved = False
            try:
                await host.engine.reserve(call.key, call.num_tokens)
                reservation = Reservation(
                    uuid.uuid4().hex, host.life.boot_id, host.timers.reservation
                )
                host.offers.reserve(reservation.reservation_id, call.key)
                reserved = True
            finally:
                if not reserved:
                    host.run(host.engine.release(call.key))
            return reservation

    async def decode(
        self, call: DecodeCall, clock: CallClock
    ) -> AsyncGenerator[Reply[DecodeEvent]]:
        """Continue one answer after its first token. Giving up early frees everything.

        Raises:
            GoneError: the reservation or the KV is no longer held.
            PeerLostError, CorruptTransferError: the KV could not be pulled.
            WorkerError: what the engine failed with.
        """
        host, key = self._host, call.request.key
        local = call.kv.boot_id == host.life.boot_id
        with host.scope("Decode", key):
            finished = False
            try:
                host.life.check(call.boot_id)
                replies = self._adopted(call, clock) if local else self._pulled(call, clock)
                async with aclosing(replies):
                    async for reply in replies:
                        finished = isinstance(reply.event, Finished)
                        yield reply
            finally:
                if not finished:
                    host.run(host.abandon(key))

    async def _adopted(
        self, call: DecodeCall, clock: CallClock
    ) -> AsyncGenerator[Reply[DecodeEvent]]:
        """Continue what this process itself has prefilled, or still does; needs no reservation."""
        host, key = self._host, call.request.key
        content = content_of(call.request)
        prefilled = host.offers.local(call.kv.transfer_id, key.request_id, content=content)
        if not host.offers.claim(call.kv.transfer_id, key):
            raise GoneError(f"transfer {call.kv.transfer_id} is not held here")
        stream = host.engine.adopt_local(call.request)
        try:
            async with aclosing(answer_of(stream)) as answer:
                async for event in answer:
                    yield Reply(event, (), clock.now())
        except GoneError:
            commit = await prefilled.settled()
            if commit.finish_reason is None:
                raise
            yield ended_by_first_token(call, commit, (), clock)

    async def _pulled(
        self, call: DecodeCall, clock: CallClock
    ) -> AsyncGenerator[Reply[DecodeEvent]]:
        """Continue what another worker has prefilled, or still does."""
        host, key = self._host, call.request.key
        if not host.offers.claim(call.reservation_id, key):
            raise GoneError(f"reservation {call.reservation_id} is not held here")
        begun = clock.arrived + clock.now()
        commit = await self._pull(call)
        spans: tuple[StageSpan, ...] = (clock.span("kv_transfer", begun),)
        if commit.finish_reason is not None:
            await host.engine.cancel(key)
            yield ended_by_first_token(call, commit, spans, clock)
            return
        if commit.first_token_id is None:
            raise CorruptTransferError("the commit lacks the first token")
        stream = await host.engine.start_decode(key, commit.first_token_id)
        async with aclosing(answer_of(stream)) as answer:
            async for event in answer:
                yield Reply(event, spans, clock.now())
                spans = ()

    async def _pull(self, call: DecodeCall) -> Commit:
        """All blocks that are not in our own prefix cache, written as they come."""
        host, request, source = self._host, call.request, call.kv
        check_fingerprint(source.fingerprint, self._layout.fingerprint)
        async with host.peers.hold(source) as peer:
            try:
                receipt = await host.engine.receive(request, in_place=True)
                transfer = pull(
                    host,
                    peer,
                    Fetch.KV,
                    source,
                    request.key,
                    fingerprint=self._layout.fingerprint,
                    content=content_of(request),
                    unit_bytes=self._layout.block_bytes,
                    first_unit=receipt.first_block,
                    end_unit=-(-len(request.token_ids) // self._layout.block_size),
                    into=None
                    if receipt.memory is None
                    else Rooms(receipt.memory, is_followed=True),
                )
                begun = await self._land(request.key, transfer, in_place=receipt.memory is not None)
            finally:
                host.engine.return_blocks(request.key)  # the transfer has ended: nobody writes
            await host.delay("kv_transfer")
        num_tokens, due = transfer.commit.num_tokens, len(request.token_ids)
        if num_tokens != due:
            raise CorruptTransferError(f"KV of {num_tokens} tokens, the request has {due}")
        host.on_transfer(Transfer("kv", time.monotonic() - begun, transfer.num_bytes))
        return transfer.commit

    async def _land(self, key: RequestKey, transfer: Pull, *, in_place: bool) -> float:
        """Tell the engine of blocks that lie in their place, or give it those that do not.

        Returns:
            When the first ones came, by `time.monotonic`.
        """
        engine, begun = self._host.engine, None

        async def write(units: Units) -> None:
            if in_place:
                await engine.confirm_blocks(key, units.first_unit, units.num_units)
            else:
                await engine.import_blocks(key, units.first_unit, units.data)

        async with Landing(write) as landing, aclosing(transfer.units()) as received:
            async for units in received:
                begun = begun or time.monotonic()
                await landing.put(units)
            await landing.settle()
        return begun or time.monotonic()
