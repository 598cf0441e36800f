"""A prefill and a decode worker as servers, and the way of a request through them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from worker.answers import make_image
from worker.idle import assert_idle
from worker.server.serving import Serving, serving

from vlm_worker.roles.context import CallTimer
from vlm_worker.roles.encode import EncoderRole
from vlm_worker.testing import IMAGE_TOKEN
from vlm_worker.types import ImageItem, Narrow, Request, RequestKey, SamplingParams, Source
from vlm_worker.wire.messages import (
    Accepted,
    DecodeCall,
    EncodeCall,
    EncodeEvent,
    EncodeItem,
    Finished,
    FirstToken,
    PrefillCall,
    Reply,
    ReserveCall,
    Tokens,
)

TENTH = "--timer-scale=0.1"
TIMEOUT = 60.0
KEY = RequestKey("r-1", 1)
IMAGES = [make_image(number, num_tokens=6) for number in (1, 2)]


def request_of(
    num_tokens: int = 21, key: RequestKey = KEY, *, first: int = 100, max_tokens: int = 8
) -> Request:
    tokens = tuple(range(first, first + num_tokens))
    return Request(key, tokens, num_tokens, SamplingParams(max_tokens, ignore_eos=True))


@dataclasses.dataclass
class Pair:
    """A prefill and a decode worker, and the way of a request through them."""

    prefill: Serving
    decode: Serving

    async def answer(self, request: Request, *sources: Source) -> list[int]:
        call = ReserveCall(request.key, len(request.token_ids) + 1)
        reservation = await self.decode.client.reserve(call)
        tokens: dict[int, int] = {}
        accepted: asyncio.Future[Accepted] = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._prefill(request, sources, accepted, tokens))
            kv = self.source(await accepted)
            decoding = DecodeCall(request, reservation.reservation_id, kv, reservation.boot_id)
            async with aclosing(self.decode.client.decode(decoding, timeout=TIMEOUT)) as replies:
                async for reply in replies:
                    if isinstance(reply.event, Tokens):
                        tokens |= dict(enumerate(reply.event.token_ids, reply.event.first_index))
                    else:
                        assert isinstance(reply.event, Finished)
        first = request.num_delivered_tokens
        return [tokens[index] for index in range(first, first + len(tokens))]

    async def _prefill(
        self,
        request: Request,
        sources: tuple[Source, ...],
        accepted: asyncio.Future[Accepted],
        tokens: dict[int, int],
    ) -> None:
        call = PrefillCall(request, f"{request.key.request_id}.kv", sources)
        async with aclosing(self.prefill.client.prefill(call, timeout=TIMEOUT)) as replies:
            async for reply in replies:
                if isinstance(reply.event, Accepted):
                    accepted.set_result(reply.event)
                if isinstance(reply.event, FirstToken):
                    tokens[reply.event.index] = reply.event.token_id

    def source(self, accepted: Accepted) -> Source:
        return Source(
            self.prefill.client.address,
            accepted.boot_id,
            accepted.transfer_id,
            accepted.layout_fingerprint,
        )

    async def idle(self) -> None:
        for worker in (self.prefill, self.decode):
            await assert_idle(worker.server)


@contextlib.asynccontextmanager
async def pair(*flags: str, narrow: Narrow | None = None) -> AsyncIterator[Pair]:
    async with (
        serving("prefill", TENTH, *flags, narrow=narrow) as p,
        serving("decode", TENTH, *flags, narrow=narrow) as d,
    ):
        yield Pair(p, d)


async def kill(worker: Serving) -> None:
    """As a process that dies: every connection is cut, nobody is told."""
    await worker.server._data.close()
    await worker.server._grpc.stop(grace=None)


async def until(holds: Any) -> None:
    async with asyncio.timeout(TIMEOUT):
        while not holds():  # noqa: ASYNC110  state of another task or thread
            await asyncio.sleep(0.002)


async def accept(worker: Serving, request: Request, *sources: Source) -> Accepted:
    """Prefill to the end, and leave the KV to its lease."""
    call = PrefillCall(request, "t-1", sources)
    events = [r.event async for r in worker.client.prefill(call, timeout=TIMEOUT)]
    (accepted,) = [event for event in events if isinstance(event, Accepted)]
    return accepted


async def collect(worker: Serving, call: PrefillCall) -> list[Any]:
    return [reply.event async for reply in worker.client.prefill(call, timeout=TIMEOUT)]


def about(images: list[Any], key: RequestKey = KEY) -> Request:
    """A prompt of 12 tokens before each image and 12 after the last."""
    tokens: list[int] = []
    items = []
    for number, image in enumerate(images):
        tokens += range(200 + 20 * number, 212 + 20 * number)
        items.append(ImageItem(image.image_key, len(tokens), image.num_tokens, image.grid_thw))
        tokens += [IMAGE_TOKEN] * image.num_tokens
    tokens += range(300, 312)
    sampling = SamplingParams(8, ignore_eos=True)
    return Request(key, tuple(tokens), len(tokens), sampling, tuple(items))


def encoding(
    worker: Serving, image: Any, key: RequestKey = KEY, *, transfer_id: str = "e-1"
) -> tuple[Source, asyncio.Task[Any]]:
    """An image that a worker encodes, behind its media pool; and where to fetch it."""

    async def run() -> None:
        async with aclosing(encode(worker, image, key, transfer_id=transfer_id)) as replies:
            _ = [reply async for reply in replies]

    context = worker.components.context
    fingerprint = context.embed_layout.fingerprint
    source = Source(worker.client.address, context.incarnation.boot_id, transfer_id, fingerprint)
    return source, asyncio.create_task(run())


def encode(
    worker: Serving, image: Any, key: RequestKey = KEY, *, transfer_id: str = "e-1"
) -> AsyncGenerator[Reply[EncodeEvent]]:
    """What a worker says of an image, behind its media pool; it goes on when it is asked to."""
    item = EncodeItem(transfer_id, 1, 28, 28, image.num_tokens, 0, "PNG")

    async def chunks() -> AsyncIterator[tuple[int, bytes]]:
        yield 0, b"x"

    class Known:
        async def known_key(self, data: Any, spec: Any) -> None:
            return None

        async def prepare(self, data: Any, spec: Any) -> Any:
            return image

        def image_bytes(self, spec: Any) -> int:
            return int(image.patches.nbytes)

    role = EncoderRole(worker.components.context, Known())
    return role.encode(EncodeCall(key, (item,), bytes(32)), chunks(), CallTimer())
