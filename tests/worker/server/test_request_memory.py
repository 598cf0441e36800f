"""What requests hold in a worker stays within its declared bytes, and everybody gets an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest
from worker.gateway.image_files import png
from worker.idle import assert_idle
from worker.server.serving import FAMILY, Serving, page, serving

from vlm_worker.annotations import MAX_IMAGE_BYTES
from vlm_worker.errors import InvalidImageError, InvalidRequestError, OverloadedError
from vlm_worker.media.image_header import ImageLimits
from vlm_worker.pb import worker_pb2 as pb
from vlm_worker.serve.budget import image_bytes
from vlm_worker.types import RequestKey
from vlm_worker.wire.messages import ENCODE_CALL, Decoded, EncodeCall, EncodeItem, ItemReady

TIMEOUT = 60.0
SIDE = 448
CACHE = 1 << 20
ROW_BYTES = 8
OTHERS = 2 * CACHE
"""Of the declared bytes: the embedding cache, and the copies of what is held for peers."""


def budget(num_bytes: int) -> tuple[str, str]:
    """Flags for so many bytes of files and decoded images."""
    return f"--request-memory-bytes={OTHERS + num_bytes}", f"--embedding-cache-bytes={CACHE}"


def flat(*shades: int) -> list[bytes]:
    """Large images whose files are tiny."""
    return [png((shade % 256, shade // 256, 7), size=(SIDE, SIDE)) for shade in shades]


def call_of(name: str, files: Sequence[bytes], *, salt: bytes = bytes(32)) -> EncodeCall:
    items = tuple(
        EncodeItem(
            transfer_id=f"{name}.{number}",
            num_bytes=len(data),
            width=SIDE,
            height=SIDE,
            num_tokens=FAMILY.geometry(SIDE, SIDE).num_tokens,
            max_pixels=0,
            format="PNG",
        )
        for number, data in enumerate(files)
    )
    return EncodeCall(RequestKey(name, 1), items, salt)


async def answer(worker: Serving, name: str, files: Sequence[bytes]) -> list[Any]:
    replies = worker.client.encode(call_of(name, files), files, timeout=TIMEOUT)
    async with aclosing(replies):
        return [reply.event async for reply in replies]


async def _replies(worker: Serving, name: str, files: Sequence[bytes]) -> list[Any]:
    replies = worker.client.encode(call_of(name, files), files, timeout=TIMEOUT)
    async with aclosing(replies):
        return [reply async for reply in replies]


class Slow:
    """A caller that announces files and sends components of them when it is told to."""

    def __init__(self, worker: Serving, call: EncodeCall) -> None:
        self._components: asyncio.Queue[pb.EncodeRequest] = asyncio.Queue()
        self._components.put_nowait(pb.EncodeRequest(begin=ENCODE_CALL.encode(call)))
        self._call = worker.client._stub("Encode")(self._requests(), timeout=TIMEOUT)

    async def _requests(self) -> AsyncIterator[pb.EncodeRequest]:
        while True:
            yield await self._components.get()

    async def taken(self) -> None:
        """The worker has taken the call: it asks for the files."""
        await self._call.initial_metadata()

    def send(self, data: bytes) -> None:
        self._components.put_nowait(pb.EncodeRequest(chunk=pb.EncodeChunk(item=0, data=data)))

    def leave(self) -> None:
        self._call.cancel()


async def test_interleaved_calls_of_large_images_take_turns_within_the_memory() -> None:
    """Twenty calls of four images, each with its first file here before any has its last."""
    call_bytes = 4 * image_bytes(FAMILY)
    async with serving("encoder", *budget((21 << 20) + call_bytes * 8 // 7)) as worker:
        memory = worker.components.context.memory
        assert call_bytes <= memory.images.largest < 2 * call_bytes, "one call at a time"
        most = waited = 0

        async def watch() -> None:
            nonlocal most, waited
            while True:
                most = max(most, memory.images.used)
                waited = max(waited, memory.images.num_waiting)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        shades = [[4 * number + one for one in range(4)] for number in range(20)]
        calls = (answer(worker, f"r-{n}", flat(*some)) for n, some in enumerate(shades))
        async with asyncio.timeout(100):
            answers = await asyncio.gather(*calls)
        watching.cancel()
        for events in answers:
            assert isinstance(events[0], Decoded)
            assert [type(event) for event in events[1:]] == [ItemReady] * 4
        assert 0 < most <= memory.images.capacity
        assert waited >= 4, "nobody had to wait: the test shows nothing"
        assert (memory.images.used, memory.uploads.used) == (0, 0)
        for number in range(20):
            await worker.client.cancel(RequestKey(f"r-{number}", 1))
        await assert_idle(worker.server)


async def test_a_wait_for_image_memory_is_a_wait_for_the_encoder() -> None:
    """The images that hold the memory wait to be encoded: more encoders would shorten it."""
    async with serving("encoder", *budget((21 << 20) + image_bytes(FAMILY) * 8 // 7)) as worker:
        host = worker.components.context
        second_waits = asyncio.Event()
        delay = host.delay

        async def hold(stage: str) -> None:
            await delay(stage)
            if stage == "encode":
                await second_waits.wait()

        host.delay = hold  # type: ignore[method-assign]
        calls = [
            asyncio.create_task(_replies(worker, f"r-{number}", flat(number)))
            for number in range(2)
        ]
        async with asyncio.timeout(TIMEOUT):
            while host.memory.images.num_waiting == 0:  # noqa: ASYNC110
                await asyncio.sleep(0)
            seen_waiting = time.monotonic()
            await asyncio.sleep(0.05)
            held_seconds = time.monotonic() - seen_waiting
            second_waits.set()
            answers = await asyncio.gather(*calls)
        found = [[span for reply in replies for span in reply.spans] for replies in answers]
        queues, medias = (
            [[span for span in spans if span.stage == stage] for spans in found]
            for stage in ("encoder_queue", "media")
        )
        second = max(range(2), key=lambda call: queues[call][0].end - queues[call][0].start)
        queue, media = queues[second], medias[second]
        assert queue[0].end - queue[0].start >= held_seconds
        assert media[0].end == queue[0].start
        assert media[1].start == queue[0].end


async def test_callers_that_announce_much_and_send_nothing_block_no_other() -> None:
    async with serving("encoder", *budget(64 << 20)) as worker:
        item = EncodeItem("t", MAX_IMAGE_BYTES, SIDE, SIDE, 64, 0, "PNG")
        slow = [
            Slow(worker, EncodeCall(RequestKey(f"slow-{n}", 1), (item,), bytes(32)))
            for n in range(16)
        ]
        for caller in slow:
            await caller.taken()
        events = await answer(worker, "good", flat(1))
        assert isinstance(events[-1], ItemReady)
        assert worker.components.context.memory.uploads.used == 0
        for caller in slow:
            caller.leave()


async def test_files_are_counted_as_they_arrive_and_refused_beyond_the_memory() -> None:
    async with serving("encoder", *budget(64 << 20)) as worker:
        uploads = worker.components.context.memory.uploads
        item = EncodeItem("t", MAX_IMAGE_BYTES, SIDE, SIDE, 64, 0, "PNG")
        slow = Slow(worker, EncodeCall(RequestKey("slow", 1), (item,), bytes(32)))
        await slow.taken()
        num_parts = (MAX_IMAGE_BYTES >> 20) - 1
        for _ in range(num_parts):
            slow.send(bytes(1 << 20))
        async with asyncio.timeout(TIMEOUT):
            while uploads.used < num_parts << 20:  # noqa: ASYNC110  the worker's own state
                await asyncio.sleep(0.01)
        left = uploads.capacity - uploads.used
        assert left < 3 << 20
        late = Slow(worker, call_of("late", [bytes(left + 1)]))
        with pytest.raises(Exception, match="files of images"):
            await late._call.read()  # it has sent no byte
        with pytest.raises(OverloadedError, match="files of images") as refused:
            await answer(worker, "late-2", [bytes(left + 1)])
        assert refused.value.retry_after_seconds > 0
        _, metrics = await page(worker.server, "/metrics")
        assert 'triptych_refused_total{bound="uploads"} 2.0' in metrics
        name = 'triptych_request_memory_bytes{kind="uploads"} '
        (line,) = [line for line in metrics.splitlines() if line.startswith(name)]
        assert float(line.removeprefix(name)) == num_parts << 20
        slow.leave()
        async with asyncio.timeout(TIMEOUT):
            while uploads.used:  # noqa: ASYNC110  as above
                await asyncio.sleep(0.01)
        assert isinstance((await answer(worker, "good", flat(1)))[-1], ItemReady)


async def test_files_that_fill_the_memory_while_they_come_end_their_call_and_no_other() -> None:
    """Two callers that each would fit alone: one of them is refused, and the other goes on."""
    async with serving("encoder", *budget(64 << 20)) as worker:
        uploads = worker.components.context.memory.uploads
        size = MAX_IMAGE_BYTES * 3 // 4
        item = EncodeItem("t", size, SIDE, SIDE, 64, 0, "PNG")
        callers = []
        for number in range(2):
            call = EncodeCall(RequestKey(f"r-{number}", 1), (item,), bytes(32))
            callers.append(Slow(worker, call))
            await callers[-1].taken()
        most = 0
        for _ in range(size >> 20):
            for caller in callers:
                caller.send(bytes(1 << 20))
            await asyncio.sleep(0)
            most = max(most, uploads.used)
        async with asyncio.timeout(TIMEOUT):
            while not uploads.num_refused or uploads.used:
                most = max(most, uploads.used)
                await asyncio.sleep(0.01)
        assert 0 < most <= uploads.capacity
        assert uploads.num_refused == 1
        assert isinstance((await answer(worker, "good", flat(1)))[-1], ItemReady)
        for caller in callers:
            caller.leave()


async def test_a_call_that_never_fits_says_which_number_to_change() -> None:
    async with serving("encoder", *budget((21 << 20) + image_bytes(FAMILY) * 2)) as worker:
        with pytest.raises(InvalidRequestError, match="--request-memory-bytes"):
            await answer(worker, "big", flat(*range(8)))
        assert isinstance((await answer(worker, "good", flat(1)))[-1], ItemReady)


async def test_a_file_above_the_decoders_limit_is_refused_when_it_is_announced() -> None:
    assert ImageLimits().max_bytes == MAX_IMAGE_BYTES
    async with serving("encoder") as worker:
        items = (
            EncodeItem("a", 10, SIDE, SIDE, 64, 0, "PNG"),
            EncodeItem("b", MAX_IMAGE_BYTES + 1, SIDE, SIDE, 64, 0, "PNG"),
        )
        slow = Slow(worker, EncodeCall(RequestKey("r", 1), items, bytes(32)))
        with pytest.raises(Exception, match="image has 20971521 bytes"):
            await slow._call.read()
    with pytest.raises(InvalidImageError) as refused:
        ENCODE_CALL.decode(ENCODE_CALL.encode(EncodeCall(RequestKey("r", 1), items, bytes(32))))
    assert (refused.value.item, refused.value.code) == (1, "image_too_large")


async def test_unfetched_embeddings_are_bounded_and_refuse_before_the_upload() -> None:
    """Waiting requests keep their leases alive; what does not fit is told when to come back."""
    num_tokens = FAMILY.geometry(SIDE, SIDE).num_tokens
    fit = 3
    cache = f"--embedding-cache-bytes={fit * num_tokens * ROW_BYTES}"
    async with serving("encoder", cache, "--max-model-len=512") as worker:
        for number in range(fit):
            events = await answer(worker, f"r-{number}", flat(number))
            assert isinstance(events[-1], ItemReady)
        held = worker.components.engine.stats()
        assert held.held_embedding_bytes == held.max_held_embedding_bytes
        slow = Slow(worker, call_of("late", flat(99)))
        with pytest.raises(Exception, match="queued or held for peers"):
            await slow._call.read()
        with pytest.raises(OverloadedError):
            await answer(worker, "late-2", flat(99))
        _, metrics = await page(worker.server, "/metrics")
        assert 'triptych_refused_total{bound="embeddings"} 2.0' in metrics
        await worker.client.cancel(RequestKey("r-0", 1))
        assert isinstance((await answer(worker, "next", flat(98)))[-1], ItemReady)


async def test_the_declaration_is_exported_by_kind() -> None:
    async with serving("encoder", *budget(64 << 20)) as worker:
        _, metrics = await page(worker.server, "/metrics")
        prefix = "triptych_request_memory_limit_bytes{kind="
        lines = [line for line in metrics.splitlines() if line.startswith(prefix)]
        assert sum(float(line.split()[-1]) for line in lines) == OTHERS + (64 << 20)
