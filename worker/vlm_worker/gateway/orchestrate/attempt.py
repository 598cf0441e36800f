"""One attempt at a request, on one route: ends with a finish reason or raises.

_reserve ─▶ _encode_images ─ decoded ─▶ _prefill ─ accepted ─▶ _decode ─▶ DeliveredTokens
_renew   keeps the reservation and the embeddings until their consumer has queued the request

The attempt reserves KV before it sends images, so a request that waits for decode uses no encoder.
Reservations have no queue: each attempt retries, on the routed decode pod or on another one. While
it waits it counts in `held_for`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

from vlm_worker.client import WorkerClient
from vlm_worker.errors import (
    DrainingError,
    EngineError,
    GoneError,
    InvalidImageError,
    OverloadedError,
    PeerLostError,
    WorkerError,
)
from vlm_worker.gateway.orchestrate.prepared_request import (
    DeliveredTokens,
    PreparedRequest,
    build_request,
)
from vlm_worker.gateway.orchestrate.ttft_trace import Trace
from vlm_worker.gateway.pod_registry import PodsInUse, Registry
from vlm_worker.route import Choice, Route, another_decode
from vlm_worker.types import (
    FinishReason,
    PromptLogprobs,
    Request,
    RequestKey,
    Role,
    Source,
)
from vlm_worker.wire.messages import (
    Accepted,
    DecodeCall,
    Decoded,
    DecodedItem,
    EncodeCall,
    EncodeItem,
    Finished,
    FirstToken,
    ItemFailed,
    ItemReady,
    PrefillCall,
    Reservation,
    ReserveCall,
    Tokens,
)


class Attempt:
    """One attempt; `run` is called once. It calls `on_admitted` when a pod admits the request.

    `request` is what the workers got; None before the images are decoded.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        route: Route,
        *,
        number: int,
        delivered: DeliveredTokens,
        trace: Trace,
        registry: Registry,
        on_admitted: Callable[[], None],
    ) -> None:
        self._prepared = prepared
        self._route = route
        self._decode_choice = route.decode
        self._key = RequestKey(prepared.request_id, number)
        self._delivered = delivered
        self._trace = trace
        self._registry = registry
        self._on_admitted = on_admitted
        self._ended: asyncio.Future[FinishReason] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._renewal: asyncio.TimerHandle | None = None
        self.pods = PodsInUse(self._key, registry)
        self._encoding: Encoding | None = None
        self._reservation: Reservation | None = None
        self.request: Request | None = None
        self._accepted = False
        self._clean = False

    async def run(self) -> FinishReason:
        """Run the attempt; raises the error of the call, or of the delivery, that failed first.

        All its calls have ended when it returns or raises.
        """
        with self.pods, contextlib.ExitStack() as borrowed:
            try:
                if self._route.lent is not None:
                    num_tokens = self._prepared.num_tokens(len(self._delivered.token_ids))
                    name = self._route.lent.pod.name
                    borrowed.enter_context(self._registry.borrows(name, num_tokens=num_tokens))
                if self._route.decode is not None:
                    # count it before other requests choose a route, so that they spread
                    self.pods.client(self._route.decode.pod)
                self._start(self._serve())
                reason = await self._outcome()
                self._record_answer()
                return reason
            finally:
                self._cancel_tasks()
                if not self._clean:
                    self.pods.cancel_everywhere()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _outcome(self) -> FinishReason:
        """Wait for the end, and for a token in delivery: no later attempt would send it."""
        try:
            return await self._ended
        finally:
            if not self._ended.cancelled():  # else the request ends, and nobody reads the token
                async with self._delivered.turn:
                    self._cancel_tasks()
                if self._delivered.failure is not None:
                    raise self._delivered.failure

    def _cancel_tasks(self) -> None:
        if self._renewal is not None:
            self._renewal.cancel()
        for task in self._tasks:
            task.cancel()

    async def _serve(self) -> None:
        # most attempts are accepted before the first renewal, and need no task for it
        loop, seconds = asyncio.get_running_loop(), self._registry.timers.renew
        self._renewal = loop.call_later(seconds, lambda: self._start(self._renew()))
        self._trace.gateway_waits()
        if self._route.reserve:
            await self._reserve()
            self._on_admitted()
        encoding = None
        if self._route.encoder is not None:
            encoding = Encoding(self._prepared, self._key, self._route.encoder, self._trace)
            self._encoding = encoding
            self._start(self._encode_images(encoding, self._route.encoder))
        items = await encoding.decoded if encoding is not None else ()
        self._trace.gateway_works()
        request, kept = build_request(self._prepared, self._key, self._delivered, items)
        self.request = request
        sources = tuple(encoding.source(item) for item in kept) if encoding is not None else ()
        await self._prefill(request, sources)

    async def _encode_images(self, encoding: Encoding, choice: Choice) -> None:
        encodes = self._registry.encodes(choice.pod.name, len(self._prepared.images))
        with encodes, self.pods.record_failure(choice.pod):
            await encoding.run(self.pods.client(choice.pod))
        self.pods.record_held(choice.pod, encoding.encoded())

    async def _reserve(self) -> None:
        """Reserve KV on the first decode pod that accepts; if all are overloaded, wait and retry.

        Raises:
            WorkerError: the error of the last pod, if the request may not wait or no pod is left.
        """
        route, registry = self._route, self._registry
        assert route.decode is not None
        demand = self._prepared.demand(len(self._delivered.token_ids), registry.caches)
        deadline = self._trace.clock() + self._prepared.max_wait_seconds
        choice = route.decode
        refused: set[bytes] = set()
        with self._trace.stage("decode_reserve"):
            while self._reservation is None:
                call = ReserveCall(self._key, demand.num_tokens, last_resort=choice.last_resort)
                try:
                    with self.pods.record_failure(choice.pod):
                        reservation = await self.pods.client(choice.pod).reserve(call)
                    self._decode_choice, self._reservation = choice, reservation
                except (OverloadedError, DrainingError, PeerLostError) as error:
                    refused.add(choice.pod.boot_id)
                    other = another_decode(registry.candidates(), demand, route, frozenset(refused))
                    if other is None:
                        may_wait = self._trace.clock() < deadline
                        if not isinstance(error, OverloadedError) or not may_wait:
                            raise
                        with registry.held_for_pool(Role.DECODE):
                            await asyncio.sleep(wait_seconds(error))
                        refused.clear()
                        other = another_decode(registry.candidates(), demand, route, frozenset())
                    choice = other or choice

    async def _prefill(self, request: Request, sources: tuple[Source, ...]) -> None:
        choice = self._route.prefill
        call = PrefillCall(
            request=request,
            transfer_id=f"{self._key.request_id}.{self._key.attempt}.kv",
            sources=sources,
            handoff=self._decode_choice is not None,
            last_resort=choice.last_resort,
        )
        self._trace.gateway_waits()
        open_call = self._trace.call()
        encoder = (self._route.encoder.pod,) if self._route.encoder else ()
        with self.pods.record_failure(choice.pod, *encoder):
            client = self.pods.client(choice.pod)
            first_token = False
            async with aclosing(client.prefill(call, timeout=client.timers.prefill)) as replies:
                try:
                    async for reply in replies:
                        open_call.report(reply)
                        match reply.event:
                            case Accepted() as accepted:
                                self._hand_over(request, accepted)
                            case PromptLogprobs() as part:
                                self._delivered.take_scores(part)
                            case FirstToken() as first:
                                # else the last delivered token ends the answer: nothing ran
                                is_new = first.index >= request.num_delivered_tokens
                                if is_new and not first_token:
                                    self._record_prompt(request, first)
                                first_token = True
                                await self._take_first(first)
                except PeerLostError:
                    # After the first token, decode detects a failed transfer itself.
                    if not first_token:
                        raise
            if not first_token:
                raise PeerLostError("prefill ended its stream without a token")

    def _record_prompt(self, request: Request, first: FirstToken) -> None:
        """Record that the prefill pod holds the prompt, and what it had of the first attempt's."""
        if len(request.items) == len(self._prepared.images):  # else the digests are of another
            self.pods.record_prefix(self._route.prefill.pod, self._prepared.digests.marks)
        if first.index == 0:
            if self._prepared.sampling.num_prompt_logprobs is not None:
                self._delivered.end_scores()
            self._delivered.num_cached_tokens = first.num_cached_tokens

    def _record_answer(self) -> None:
        """Record that the decode pod holds prompt and answer: the next turn begins with them."""
        delivered, choice = self._delivered, self._decode_choice
        prompt = self._prepared.prompt_without(frozenset())
        if choice is not None and self.pods.decoding and delivered.prompt == prompt:
            marks = self._prepared.digests.with_answer(prompt, delivered.token_ids)
            self.pods.record_prefix(choice.pod, marks)

    def _hand_over(self, request: Request, accepted: Accepted) -> None:
        self._accepted = True
        self._on_admitted()
        if self._decode_choice is not None:
            self._start(self._decode(request, accepted, self._decode_choice))

    async def _take_first(self, first: FirstToken) -> None:
        self._trace.gateway_works()
        await self._delivered.deliver(first.index, (first.token_id,), (first.logprobs,))
        if self._delivered.complete:
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
            # If prefill and decode are one pod, the KV stays there and nothing was reserved.
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
        with self.pods.record_failure(choice.pod, prefill):
            client = self.pods.client(choice.pod)
            async with aclosing(client.decode(call, timeout=client.timers.decode)) as replies:
                async for reply in replies:
                    match reply.event:
                        case Tokens() as tokens:
                            self.pods.decoding = True
                            await self._delivered.deliver(
                                tokens.first_index, tokens.token_ids, tokens.logprobs
                            )
                            if self._delivered.complete:
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
            async with asyncio.timeout(self._registry.timers.control):
                await self._delivered.wait_for(finished.num_tokens)
        except TimeoutError:
            raise PeerLostError("decode finished, but a token of the answer is missing") from None
        self._clean = True
        self._end(finished.reason)

    async def _renew(self) -> None:
        """Renew the leases until the consumers do, once they have queued the request."""
        while not self._accepted:
            if self._reservation is not None and self._decode_choice is not None:
                held = self._reservation
                client = self.pods.client(self._decode_choice.pod)
                with self.pods.record_failure(self._decode_choice.pod):
                    if await client.renew(held.boot_id, [held.reservation_id]):
                        raise GoneError("the reservation on the decode pod is gone")
            encoding = self._encoding
            if encoding is not None and self._route.encoder is not None and not self._accepted:
                pod = self._route.encoder.pod
                # Prefill reports lost embeddings itself.
                with contextlib.suppress(WorkerError):
                    await self.pods.client(pod).renew(pod.boot_id, encoding.transfer_ids)
            await asyncio.sleep(self._registry.timers.renew)

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


# Error codes of invalid images; any other code is a failure of the encoder.
IMAGE_CODES = frozenset(
    {
        "invalid_image",
        "image_too_large",
        "image_aspect_ratio",
        "image_type_mismatch",
        "unsupported_image_format",
        "animated_not_supported",
    }
)


class Encoding:
    """One Encode call. `decoded` is set before the images are encoded; prefill may then start."""

    def __init__(
        self, prepared: PreparedRequest, key: RequestKey, choice: Choice, trace: Trace
    ) -> None:
        self._prepared = prepared
        self._choice = choice
        self._trace = trace
        self._key = key
        self.transfer_ids = tuple(
            f"{key.request_id}.{key.attempt}.e{i}" for i in range(len(prepared.images))
        )
        self.decoded: asyncio.Future[tuple[DecodedItem, ...]] = (
            asyncio.get_running_loop().create_future()
        )

    async def run(self, client: WorkerClient) -> None:
        """Send the images and wait until every image is ready.

        Raises:
            InvalidImageError: an image is invalid and may not be skipped.
            WorkerError: the encoder rejected the call or was lost.
        """
        call = self._trace.call(outbound="media")
        images = [image.data for image in self._prepared.images]
        replies = client.encode(self._call(), images, timeout=client.timers.encode)
        num_remaining: int | None = None
        async with aclosing(replies):
            async for reply in replies:
                call.report(reply)
                match reply.event:
                    case Decoded() as decoded:
                        num_remaining = self._take(decoded)
                    case ItemReady() if num_remaining is not None:
                        num_remaining -= 1
                    case ItemFailed() as failed:
                        raise _of_item(failed)
                if num_remaining == 0:
                    return
        raise PeerLostError("the encoder ended its stream before every image was ready")

    def encoded(self) -> list[bytes]:
        """The keys of the images that the pod has encoded, once `run` has returned."""
        keys, items = self._prepared.digests.images, self.decoded.result()
        return [key for key, item in zip(keys, items, strict=True) if item.error is None]

    def source(self, item: int) -> Source:
        pod = self._choice.pod
        return Source(
            address=pod.address,
            boot_id=pod.boot_id,
            transfer_id=self.transfer_ids[item],
            fingerprint=pod.embed_fingerprint,
        )

    def _call(self) -> EncodeCall:
        return EncodeCall(
            key=self._key,
            items=tuple(
                EncodeItem(
                    transfer_id=transfer_id,
                    num_bytes=len(image.data),
                    width=image.width,
                    height=image.height,
                    num_tokens=image.num_tokens,
                    max_pixels=image.max_pixels,
                    format=image.format,
                    reduction=image.reduction,
                    grid_thw=image.grid_thw or (),
                )
                for transfer_id, image in zip(self.transfer_ids, self._prepared.images, strict=True)
            ),
            cache_salt=self._prepared.cache_salt,
            last_resort=self._choice.last_resort,
            pins_session=self._prepared.pins_session,
            skip_corrupt=self._prepared.skip_corrupt,
            priority=self._prepared.priority,
            weighted_seconds=self._prepared.weighted_seconds,
        )

    def _take(self, decoded: Decoded) -> int:
        """Set `decoded`; return the number of images to encode. Raises as `run` does."""
        if len(decoded.items) != len(self._prepared.images):
            raise EngineError("the encoder answered for another number of images")
        errors = [(i, one.error) for i, one in enumerate(decoded.items) if one.error is not None]
        for item, error in errors:
            # The gateway has checked an embedding, so a client takes it for a part of the prompt.
            is_given = self._prepared.images[item].grid_thw is not None
            if is_given or not self._prepared.skip_corrupt:
                raise InvalidImageError(error.message, item=item, code=error.code)
        self.decoded.set_result(decoded.items)
        return len(decoded.items) - len(errors)


def _of_item(failed: ItemFailed) -> Exception:
    if failed.code in IMAGE_CODES:
        return InvalidImageError(failed.message, item=failed.item, code=failed.code)
    return EngineError(f"image {failed.item}: {failed.code}: {failed.message}")


MIN_WAIT_SECONDS = 0.02
MAX_WAIT_SECONDS = 1.0


def wait_seconds(error: OverloadedError) -> float:
    """Return the retry time of an overloaded pod in seconds, from 0.02 to 1."""
    return min(max(error.retry_after_seconds, MIN_WAIT_SECONDS), MAX_WAIT_SECONDS)
