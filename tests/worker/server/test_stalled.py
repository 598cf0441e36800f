"""Peers that stand still in the middle of a stream, and images that nobody asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from worker.idle import assert_idle
from worker.server.pairs import KEY, TENTH, TIMEOUT
from worker.server.serving import serving

from vlm_worker.errors import DrainingError, PeerLostError
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.wire.frames import Frame, FrameBatches
from vlm_worker.wire.messages import ENCODE_CALL, EncodeCall, EncodeItem
from vlm_worker.wire.rpc import METHODS, SEND_IMAGES

CALL = EncodeCall(KEY, (EncodeItem("e-1", 100, 8, 8, 4, 0, "PNG"),), bytes(32))


class Kept(list[bytes]):
    """Images that nobody may send."""

    def __iter__(self) -> Iterator[bytes]:
        raise AssertionError("an image was sent")


async def test_a_call_that_is_refused_sends_no_image_and_keeps_its_reason() -> None:
    async with serving("encoder") as worker:
        worker.components.context.accepting = False
        with pytest.raises(DrainingError):
            _ = [r async for r in worker.client.encode(CALL, Kept([b"x"]), timeout=TIMEOUT)]


async def test_a_stalled_upload_ends_and_leaves_nothing() -> None:
    async with (
        serving("encoder", TENTH) as worker,
        grpc.aio.insecure_channel(worker.client.address) as channel,
    ):
        method = METHODS["Encode"]
        call = channel.stream_stream(
            method.path, method.request_to_bytes, method.response_from_bytes
        )()
        await call.write(pb.EncodeRequest(begin=ENCODE_CALL.encode(CALL)))
        assert SEND_IMAGES in dict(await call.initial_metadata())
        await call.write(pb.EncodeRequest(chunk=pb.EncodeChunk(item=0, data=b"x")))
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert "no bytes of the images arrived for 0.8 s" in await call.details()
        await assert_idle(worker.server)


async def test_a_consumer_that_takes_no_frame_loses_its_stream() -> None:
    async with serving("prefill", "--timer-scale=0.01") as worker:
        ended = False

        async def runs() -> FrameBatches:
            nonlocal ended
            try:
                yield iter([Frame(b"frame", memoryview(b""))])
            finally:
                ended = True

        class Stuck:
            async def send_initial_metadata(self, metadata: Any) -> None:
                assert dict(metadata) == {"vlm-data-port": str(worker.server.data_port)}

            async def write(self, _: Any) -> None:
                await asyncio.Event().wait()

        with pytest.raises(PeerLostError, match="no frame was taken"):
            await worker.server._service._send(runs(), Stuck())
        assert ended
