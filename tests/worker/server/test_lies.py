"""Messages that lie, sent to a server that has every stage: each gets its answer, none its end."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import grpc
import pytest
from worker.answers import answer_alone
from worker.idle import assert_idle
from worker.seeds import drawing
from worker.server.pairs import (
    TENTH,
    collect,
    request_of,
)
from worker.server.serving import Serving, serving
from worker.wire.lies import lie, server_doors

from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.types import RequestKey
from vlm_worker.wire.messages import (
    FirstToken,
    PrefillCall,
)
from vlm_worker.wire.rpc import METHODS, SEND_IMAGES


async def send(worker: Serving, name: str, message: Any) -> str:
    """A raw call; how it ended."""
    method = METHODS[name]
    async with grpc.aio.insecure_channel(worker.client.address) as channel:
        kinds = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, True): channel.stream_stream,
        }
        stub = kinds[method.client_streaming, method.server_streaming](
            method.path,
            request_serializer=method.request_to_bytes,
            response_deserializer=method.response_from_bytes,
        )
        try:
            if name == "Encode":
                await _encode(stub(timeout=2.0), message)
            elif method.server_streaming:
                async for _ in stub(message, timeout=2.0):
                    pass
            else:
                await stub(message, timeout=2.0)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return "OK"


async def _encode(call: Any, begin: Any) -> None:
    await call.write(pb.EncodeRequest(begin=begin))
    if SEND_IMAGES in dict(await call.initial_metadata()):
        await call.write(pb.EncodeRequest(chunk=pb.EncodeChunk(item=0, data=b"x" * 100)))
        await call.done_writing()
    async for _ in call:
        pass


async def no_lie_ends_a_worker(count: int) -> None:
    draw = drawing()
    doors = server_doors()
    names = sorted(doors)
    ends: dict[str, int] = {}
    async with serving("decode", "--stages=encoder,prefill,decode", TENTH) as worker:
        for start in range(0, count, 20):
            batch = [names[(start + n) % len(names)] for n in range(20)]
            lies = [lie(_of_its_own(doors[name][0], draw), draw) for name in batch]
            told = await asyncio.gather(
                *(send(worker, name, message) for name, message in zip(batch, lies, strict=True))
            )
            for end in told:
                ends[end] = ends.get(end, 0) + 1
        print(dict(sorted(ends.items())))
        assert not ends.keys() & {"UNKNOWN", "INTERNAL"}, "a defect, or an error that is not ours"
        assert ends["INVALID_ARGUMENT"] > count / 4
        await assert_idle(worker.server)
        assert worker.components.engine.healthy
        request = request_of(key=RequestKey("after", 1))
        call = PrefillCall(request, "after.kv", (), handoff=False)
        (first,) = [e for e in await collect(worker, call) if isinstance(e, FirstToken)]
        assert first.token_id == answer_alone(request)[0]
        await assert_idle(worker.server)


def _of_its_own(honest: Any, draw: random.Random) -> Any:
    """The message under another request id, so that it is not refused as a repetition."""
    message = type(honest)()
    message.CopyFrom(honest)
    for name in ("request_id", "transfer_id"):
        if name in message.DESCRIPTOR.fields_by_name:
            setattr(message, name, f"r-{draw.randrange(1 << 60):x}")
    return message


async def test_hundreds_of_messages_that_lie_end_no_worker() -> None:
    await no_lie_ends_a_worker(400)


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_ten_thousand_messages_that_lie_end_no_worker() -> None:
    await no_lie_ends_a_worker(10_000)
