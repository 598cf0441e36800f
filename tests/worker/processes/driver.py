"""Plays the gateway in tests: one request through encoder, prefill and decode, over real gRPC."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from contextlib import AsyncExitStack, aclosing

from vlm_worker.client import WorkerClient
from vlm_worker.core.families import Family
from vlm_worker.media.image_header import read_header
from vlm_worker.types import (
    FinishReason,
    ImageItem,
    Request,
    RequestKey,
    SamplingParams,
    Source,
    StageSpan,
)
from vlm_worker.wire.messages import (
    Accepted,
    DecodeCall,
    Decoded,
    EncodeCall,
    EncodeItem,
    Finished,
    FirstToken,
    Hello,
    ItemFailed,
    ItemReady,
    PrefillCall,
    ReserveCall,
    Tokens,
)

TIMEOUT = 60.0
_numbers = itertools.count()


@dataclasses.dataclass
class Prompt:
    """Tokens with one placeholder an image, and the images' files."""

    token_ids: list[int]
    images: list[bytes] = dataclasses.field(default_factory=list)
    max_tokens: int = 16


@dataclasses.dataclass
class Answer:
    """What came of it."""

    token_ids: list[int]
    reason: FinishReason
    spans: list[StageSpan]


class Driver:
    """A gateway for one route. `encoder` None sends no images; roles may be the same worker."""

    def __init__(self, family: Family) -> None:
        self.family = family

    def key(self, attempt: int = 1) -> RequestKey:
        return RequestKey(f"request-{next(_numbers)}", attempt)

    def encode_call(self, key: RequestKey, images: list[bytes]) -> EncodeCall:
        items = []
        for index, data in enumerate(images):
            header = read_header(data, item=index)
            geometry = self.family.geometry(header.height, header.width)
            items.append(
                EncodeItem(
                    transfer_id=f"{key.request_id}.{key.attempt}.e{index}",
                    num_bytes=len(data),
                    width=header.width,
                    height=header.height,
                    num_tokens=geometry.num_tokens,
                    max_pixels=0,
                    format=header.format,
                )
            )
        return EncodeCall(key=key, items=tuple(items), cache_salt=bytes(32))

    async def answer(
        self,
        prompt: Prompt,
        *,
        encoder: str | None,
        prefill: str,
        decode: str,
        key: RequestKey | None = None,
        delivered: tuple[int, ...] = (),
    ) -> Answer:
        """Run one attempt to its end; raises what a worker raised."""
        attempt = Attempt(self, prompt, key or self.key(), delivered)
        async with AsyncExitStack() as stack:
            clients = {
                address: await stack.enter_async_context(WorkerClient(address))
                for address in {encoder or prefill, prefill, decode}
            }
            return await attempt.run(
                clients[encoder] if encoder else None,
                clients[prefill],
                clients[decode],
            )


class Attempt:
    """One attempt, step by step, so that a test can stop between two."""

    def __init__(
        self, driver: Driver, prompt: Prompt, key: RequestKey, delivered: tuple[int, ...] = ()
    ) -> None:
        self.driver, self.prompt, self.key, self.delivered = driver, prompt, key, delivered
        self.tokens: dict[int, int] = {}
        self.spans: list[StageSpan] = []
        self.decoded: asyncio.Future[Decoded] = asyncio.get_running_loop().create_future()
        self.accepted: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        self.first_finish: FinishReason | None = None
        self.second_token = asyncio.Event()

    async def run(
        self, encoder: WorkerClient | None, prefill: WorkerClient, decode: WorkerClient
    ) -> Answer:
        encoder = encoder if self.prompt.images else None
        async with asyncio.TaskGroup() as group:
            encoder_hello = None
            if encoder is not None:
                encoder_hello = await encoder.hello()
                group.create_task(self.encode(encoder))
            request, sources = await self.request(encoder, encoder_hello)
            local = prefill.address == decode.address
            reserved = None if local else await self.reserve(decode, request)
            computing = group.create_task(self.prefill(prefill, request, sources))
            accepted = await self.accepted
            boot_id = reserved[1] if reserved else accepted.boot_id
            reservation = reserved[0] if reserved else accepted.transfer_id
            reason = await self.decode(decode, prefill, request, reservation, boot_id)
            await computing
        assert sorted(self.tokens) == list(range(len(self.delivered), max(self.tokens) + 1))
        answer = [*self.delivered, *(self.tokens[i] for i in sorted(self.tokens))]
        return Answer(answer, self.first_finish or reason, self.spans)

    async def encode(self, client: WorkerClient) -> None:
        call = self.driver.encode_call(self.key, self.prompt.images)
        num_ready = 0
        try:
            async with aclosing(
                client.encode(call, self.prompt.images, timeout=TIMEOUT)
            ) as replies:
                async for reply in replies:
                    self.spans += reply.spans
                    match reply.event:
                        case Decoded() as decoded:
                            for item in decoded.items:
                                assert item.error is None, item.error
                            self.decoded.set_result(decoded)
                        case ItemReady():
                            num_ready += 1
                        case ItemFailed(item, code, message):
                            raise AssertionError(f"item {item}: {code}: {message}")
            assert num_ready == len(self.prompt.images)
        except BaseException as error:
            if not self.decoded.done():
                self.decoded.set_exception(error)
                self.decoded.exception()
            raise

    async def request(
        self, encoder: WorkerClient | None, hello: Hello | None
    ) -> tuple[Request, tuple[Source, ...]]:
        tokens, items, sources = list(self.prompt.token_ids), [], []
        if encoder is not None and hello is not None:
            decoded = await self.decoded
            call = self.driver.encode_call(self.key, self.prompt.images)
            counts = [item.num_tokens for item in decoded.items]
            tokens, offsets = self.driver.family.expand(tokens, counts)
            for item, offset, sent in zip(decoded.items, offsets, call.items, strict=True):
                items.append(ImageItem(item.image_key, offset, item.num_tokens, item.grid_thw))
                sources.append(
                    Source(
                        encoder.address, hello.boot_id, sent.transfer_id, hello.embed_fingerprint
                    )
                )
        request = Request(
            key=self.key,
            token_ids=(*tokens, *self.delivered),
            num_prompt_tokens=len(tokens),
            sampling=SamplingParams(max_tokens=self.prompt.max_tokens),
            items=tuple(items),
            cache_salt=bytes(32),
        )
        return request, tuple(sources)

    async def reserve(self, client: WorkerClient, request: Request) -> tuple[str, bytes]:
        reservation = await client.reserve(ReserveCall(self.key, len(request.token_ids) + 1))
        return reservation.reservation_id, reservation.boot_id

    async def prefill(
        self, client: WorkerClient, request: Request, sources: tuple[Source, ...]
    ) -> None:
        call = PrefillCall(request, f"{self.key.request_id}.{self.key.attempt}.kv", sources)
        try:
            async with aclosing(client.prefill(call, timeout=TIMEOUT)) as replies:
                async for reply in replies:
                    self.spans += reply.spans
                    match reply.event:
                        case Accepted() as accepted:
                            self.accepted.set_result(accepted)
                        case FirstToken() as first:
                            self.tokens[first.index] = first.token_id
                            self.first_finish = first.finish_reason
        except BaseException as error:
            if not self.accepted.done():
                self.accepted.set_exception(error)
                self.accepted.exception()
            raise

    async def decode(
        self,
        client: WorkerClient,
        prefill: WorkerClient,
        request: Request,
        reservation_id: str,
        boot_id: bytes,
    ) -> FinishReason:
        accepted = await self.accepted
        source = Source(
            prefill.address,
            accepted.boot_id,
            accepted.transfer_id,
            accepted.layout_fingerprint,
        )
        call = DecodeCall(request, reservation_id, source, boot_id)
        async with aclosing(client.decode(call, timeout=TIMEOUT)) as replies:
            async for reply in replies:
                self.spans += reply.spans
                match reply.event:
                    case Tokens(first_index, token_ids):
                        self.tokens.update(enumerate(token_ids, first_index))
                        self.second_token.set()
                    case Finished(reason, _):
                        return reason
        raise AssertionError("decode ended without a last word")
