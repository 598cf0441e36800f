"""What one worker refuses, over real gRPC, and that nothing of it is left behind."""

from __future__ import annotations

import grpc
import pytest
from worker.server.serving import (
    FAMILY,
    KEY,
    TIMEOUT,
    prefill_until_accepted,
    request_of,
    serving,
)

from vlm_worker.errors import (
    CancelledError,
    ContextTooLongError,
    DuplicateError,
    GoneError,
    IncompatibleError,
    InvalidRequestError,
    OverloadedError,
)
from vlm_worker.server.state import CallOutcome
from vlm_worker.types import RequestKey, Source
from vlm_worker.wire.data_protocol import Fetch
from vlm_worker.wire.messages import (
    CancelOutcome,
    DecodeCall,
    Decoded,
    EncodeCall,
    EncodeItem,
    FetchCall,
    PrefillCall,
    ReserveCall,
)
from vlm_worker.wire.rpc import METHODS


async def test_the_same_attempt_twice_is_a_duplicate() -> None:
    async with serving("prefill") as worker:
        call = PrefillCall(request_of(), "t-1", ())
        assert [reply async for reply in worker.client.prefill(call, timeout=TIMEOUT)]
        with pytest.raises(DuplicateError):
            _ = [reply async for reply in worker.client.prefill(call, timeout=TIMEOUT)]


async def test_a_cancel_that_overtakes_its_call_still_counts() -> None:
    async with serving("prefill") as worker:
        assert await worker.client.cancel(KEY) is CancelOutcome.NOT_FOUND
        call = PrefillCall(request_of(), "t-1", ())
        with pytest.raises(CancelledError):
            _ = [reply async for reply in worker.client.prefill(call, timeout=TIMEOUT)]


async def test_an_upload_that_ends_before_its_first_message_is_cancelled() -> None:
    encode = METHODS["Encode"]
    async with (
        serving("encoder") as worker,
        grpc.aio.insecure_channel(worker.client.address) as channel,
    ):
        stub = channel.stream_stream(
            encode.path,
            request_serializer=encode.request_to_bytes,
            response_deserializer=encode.response_from_bytes,
        )
        call = stub(timeout=TIMEOUT)
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.CANCELLED
        assert worker.server.state.outcomes == {CallOutcome.CANCELLED: 1}


async def test_a_stage_that_is_not_loaded_is_incompatible() -> None:
    async with serving("decode") as worker:
        with pytest.raises(IncompatibleError, match="prefill is not loaded"):
            await prefill_until_accepted(worker, request_of())


async def test_a_prompt_that_never_fits_is_answered_with_the_numbers() -> None:
    async with serving("decode", "--stages=prefill,decode") as worker:
        with pytest.raises(ContextTooLongError, match="512"):
            await prefill_until_accepted(worker, request_of(600))
        with pytest.raises(ContextTooLongError):
            await worker.client.reserve(ReserveCall(KEY, 5000))
        await worker.until_idle()


async def test_a_reservation_beyond_the_free_blocks_gets_a_retry_time() -> None:
    async with serving("decode") as worker:
        await worker.client.reserve(ReserveCall(RequestKey("a", 1), 480))
        with pytest.raises(OverloadedError) as refused:
            await worker.client.reserve(ReserveCall(RequestKey("b", 1), 480))
        assert refused.value.retry_after_seconds > 0


async def test_handles_of_another_incarnation_or_of_none_are_gone() -> None:
    async with serving("decode", "--stages=prefill,decode") as worker:
        hello = await worker.client.hello()
        other = b"x" * 16
        for boot_id in (other, hello.boot_id):
            call = FetchCall("t-9", boot_id, hello.layout_fingerprint, KEY)
            with pytest.raises(GoneError):
                _ = [f async for f in worker.client.fetch(Fetch.KV, call, timeout=TIMEOUT)]
        assert await worker.client.renew(other, ["t-1"]) == {"t-1"}
        source = Source("127.0.0.1:1", other, "t-1", hello.layout_fingerprint)
        decode = DecodeCall(request_of(), "nothing", source, hello.boot_id)
        with pytest.raises(GoneError):
            _ = [r async for r in worker.client.decode(decode, timeout=TIMEOUT)]


async def test_an_unlike_layout_is_refused_before_a_byte_moves() -> None:
    async with serving("prefill") as worker:
        accepted = await prefill_until_accepted(worker, request_of())
        call = FetchCall("t-1", accepted.boot_id, b"other layout 16b", KEY)
        with pytest.raises(IncompatibleError):
            _ = [f async for f in worker.client.fetch(Fetch.KV, call, timeout=TIMEOUT)]


async def test_another_request_cannot_fetch_what_is_not_its_own() -> None:
    async with serving("prefill") as worker:
        accepted = await prefill_until_accepted(worker, request_of())
        thief = RequestKey("r-2", 1)
        call = FetchCall("t-1", accepted.boot_id, accepted.layout_fingerprint, thief)
        with pytest.raises(GoneError):
            _ = [f async for f in worker.client.fetch(Fetch.KV, call, timeout=TIMEOUT)]


def image_call(data: bytes, *, num_bytes: int | None = None) -> EncodeCall:
    item = EncodeItem("e-1", num_bytes or len(data), 56, 56, FAMILY.geometry(56, 56).num_tokens,
                      0, "PNG")  # fmt: skip
    return EncodeCall(KEY, (item,), bytes(32))


async def test_bytes_that_are_no_image_are_an_error_of_that_item() -> None:
    async with serving("encoder") as worker:
        call = image_call(b"not an image at all")
        replies = worker.client.encode(call, [b"not an image at all"], timeout=TIMEOUT)
        (reply,) = [reply async for reply in replies]
        assert isinstance(reply.event, Decoded)
        error = reply.event.items[0].error
        assert error is not None
        assert error.code == "unsupported_image_format"
        await worker.until_idle()


@pytest.mark.parametrize("num_bytes", [5, 500])
async def test_an_upload_of_another_size_than_announced_is_refused(num_bytes: int) -> None:
    async with serving("encoder") as worker:
        call = image_call(b"z" * 50, num_bytes=num_bytes)
        with pytest.raises(InvalidRequestError, match="item 0"):
            _ = [r async for r in worker.client.encode(call, [b"z" * 50], timeout=TIMEOUT)]
        await worker.until_idle()
