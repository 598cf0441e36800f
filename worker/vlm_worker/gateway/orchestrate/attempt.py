"""One attempt at a request, on one route: ends in a finish reason or raises who was lost.

_pictures ─ decoded ─┐
_reserve  ───────────┴▶ _prefill ─ accepted ─▶ _decode ─▶ Answer
_renew    keeps the reservation and the embeddings until their consumer has queued the request
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

from vlm_worker.errors import DrainingError, GoneError, PeerLostError, WorkerError
from vlm_worker.gateway.orchestrate.background import Background
from vlm_worker.gateway.orchestrate.encoding import Encoding
from vlm_worker.gateway.orchestrate.engaged import Engaged
from vlm_worker.gateway.orchestrate.job import Answer, Job, build_request
from vlm_worker.gateway.orchestrate.recovery import Place
from vlm_worker.gateway.orchestrate.reserving import reserve
from vlm_worker.gateway.orchestrate.trace import Trace
from vlm_worker.gateway.registry import Registry
from vlm_worker.route import Choice, Route
from vlm_worker.types import FinishReason, Request, RequestKey, Source
from vlm_worker.wire.calls import (
    Accepted,
    DecodeCall,
    Finished,
    FirstToken,
    PrefillCall,
    Reservation,
    ReserveCall,
    Tokens,
)


class Attempt:
    """One try; `run` is called once."""

    def __init__(
        self,
        job: Job,
        route: Route,
        *,
        number: int,
        answer: Answer,
        trace: Trace,
        registry: Registry,
        background: Background,
        place: Place,
    ) -> None:
        self._job = job
        self._route = route
        self._decode_choice = route.decode
        self._key = RequestKey(job.request_id, number)
        self._answer = answer
        self._trace = trace
        self._registry = registry
        self._timers = registry.timers
        self._place = place
        self._ended: asyncio.Future[FinishReason] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pods = Engaged(self._key, registry=registry, background=background)
        self._reservation: Reservation | None = None
        self._accepted = False
        self._clean = False

    @property
    def blamed(self) -> set[bytes]:
        """After a failure, the boot ids of the pods to avoid next time."""
        return self._pods.blamed

    async def run(self) -> FinishReason:
        """Serve; every call is over when this returns or raises.

        Raises:
            WorkerError: of the call that failed first.
        """
        with self._pods:
            try:
                if self._route.decode is not None:
                    # counted before anybody else chooses, so that requests of one moment spread
                    self._pods.client(self._route.decode.pod)
                self._start(self._serve())
                return await self._ended
            finally:
                for task in self._tasks:
                    task.cancel()
                if not self._clean:
                    self._pods.cancel_everywhere()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- the steps -----------------------------------------------------------------------------

    async def _serve(self) -> None:
        encoding = None
        if self._route.encoder is not None:
            encoding = Encoding(self._job, self._key, self._route.encoder, self._trace)
            self._start(self._pictures(encoding, self._route.encoder))
        self._start(self._renew(encoding))
        self._trace.gateway_waits()
        if self._route.reserve:
            await self._reserve()
            self._place.leave()
        items = await encoding.decoded if encoding is not None else ()
        self._trace.gateway_works()
        request, kept = build_request(self._job, self._key, self._answer, items)
        sources = tuple(encoding.source(item) for item in kept) if encoding is not None else ()
        await self._prefill(request, sources)

    async def _pictures(self, encoding: Encoding, choice: Choice) -> None:
        with self._pods.blame(choice.pod):
            await encoding.run(self._pods.client(choice.pod))

    async def _reserve(self) -> None:
        demand = self._job.demand(len(self._answer.token_ids))
        deadline = self._trace.clock() + self._job.max_wait_seconds

        async def reserve_on(choice: Choice) -> Reservation:
            call = ReserveCall(self._key, demand.num_tokens, last_resort=choice.last_resort)
            with self._pods.blame(choice.pod):
                return await self._pods.client(choice.pod).reserve(call)

        with self._trace.stage("decode_reserve"):
            self._decode_choice, self._reservation = await reserve(
                self._route,
                demand,
                reserve_on,
                registry=self._registry,
                may_wait=lambda: self._trace.clock() < deadline,
            )

    async def _prefill(self, request: Request, sources: tuple[Source, ...]) -> None:
        choice = self._route.prefill
        call = PrefillCall(
            request=request,
            transfer_id=f"{self._key.request_id}.{self._key.attempt}.kv",
            sources=sources,
            hand_over=self._decode_choice is not None,
            last_resort=choice.last_resort,
        )
        self._trace.gateway_waits()
        open_call = self._trace.call()
        encoder = (self._route.encoder.pod,) if self._route.encoder else ()
        with self._pods.blame(choice.pod, *encoder):
            client = self._pods.client(choice.pod)
            first_token = False
            async with aclosing(client.prefill(call, timeout=self._timers.prefill)) as replies:
                try:
                    async for reply in replies:
                        open_call.report(reply)
                        match reply.event:
                            case Accepted() as accepted:
                                self._hand_over(request, accepted)
                            case FirstToken() as first:
                                first_token = True
                                await self._take_first(first)
                except PeerLostError:
                    # From here on decode knows best whether it has all it needs.
                    if not first_token:
                        raise
            if not first_token:
                raise PeerLostError("prefill ended its stream without a token")

    def _hand_over(self, request: Request, accepted: Accepted) -> None:
        self._accepted = True
        self._place.leave()
        if self._decode_choice is not None:
            self._start(self._decode(request, accepted, self._decode_choice))

    async def _take_first(self, first: FirstToken) -> None:
        self._trace.gateway_works()
        if first.index == 0:
            self._answer.num_cached_tokens = first.num_cached_tokens
        await self._answer.take(first.index, (first.token_id,), (first.logprobs,))
        if self._answer.complete:
            self._end(FinishReason.STOP)
        elif first.finish_reason is not None:
            self._end(first.finish_reason)
        elif self._decode_choice is None:
            self._end(FinishReason.LENGTH)

    async def _decode(self, request: Request, accepted: Accepted, choice: Choice) -> None:
        prefill = self._route.prefill.pod
        reservation = self._reservation
        call = DecodeCall(
            request=request,
            # Where it was prefilled the KV stays where it is, and nothing was reserved.
            reservation_id=reservation.reservation_id if reservation else accepted.transfer_id,
            kv=Source(
                address=prefill.address,
                boot_id=accepted.boot_id,
                transfer_id=accepted.transfer_id,
                fingerprint=accepted.layout_fingerprint,
            ),
            boot_id=reservation.boot_id if reservation else choice.pod.boot_id,
        )
        self._reservation = None
        with self._pods.blame(choice.pod, prefill):
            client = self._pods.client(choice.pod)
            async with aclosing(client.decode(call, timeout=self._timers.decode)) as replies:
                async for reply in replies:
                    match reply.event:
                        case Tokens() as tokens:
                            self._pods.decoding = True
                            await self._answer.take(
                                tokens.first_index, tokens.token_ids, tokens.logprobs
                            )
                            if self._answer.complete:
                                self._end(FinishReason.STOP)
                                return
                        case Finished() as finished:
                            await self._finish(finished)
                            return
            raise PeerLostError("decode ended its stream without a last word")

    async def _finish(self, finished: Finished) -> None:
        if finished.reason is FinishReason.DRAINED:
            raise DrainingError("the decode pod reached its drain deadline")
        try:
            async with asyncio.timeout(self._timers.control):
                await self._answer.wait_for(finished.num_tokens)
        except TimeoutError:
            raise PeerLostError("decode finished, but a token of the answer is missing") from None
        self._clean = True
        self._end(finished.reason)

    async def _renew(self, encoding: Encoding | None) -> None:
        """Until the consumers take over, when they have queued the request."""
        while not self._accepted:
            await asyncio.sleep(self._timers.renew)
            if self._reservation is not None and self._decode_choice is not None:
                held = self._reservation
                client = self._pods.client(self._decode_choice.pod)
                with self._pods.blame(self._decode_choice.pod):
                    if await client.renew(held.boot_id, [held.reservation_id]):
                        raise GoneError("the reservation on the decode pod is gone")
            if encoding is not None and self._route.encoder is not None and not self._accepted:
                pod = self._route.encoder.pod
                # What is gone here, prefill will notice.
                with contextlib.suppress(WorkerError):
                    await self._pods.client(pod).renew(pod.boot_id, encoding.transfer_ids)

    # ---- helpers -------------------------------------------------------------------------------

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not self._ended.done():
            self._ended.set_exception(error)

    def _end(self, reason: FinishReason) -> None:
        if not self._ended.done():
            self._ended.set_result(reason)
