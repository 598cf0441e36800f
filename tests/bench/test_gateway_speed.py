"""The stand-in worker of the gateway's benchmark speaks the wire, and its clients count exactly."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from worker.gateway.stack import gateway_settings, serving

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import gateway_clients
import gateway_speed
import tables
from gateway_stand_in import BOOT_ID, Connection, Replies

from vlm_worker.client import WorkerClient
from vlm_worker.errors import WorkerError
from vlm_worker.types import FinishReason, Request, RequestKey, SamplingParams, Source
from vlm_worker.wire import messages

# more bytes than the windows of a connection and of a stream allow at first
MANY = 5_000


@contextlib.asynccontextmanager
async def stand_in(*, step_seconds: float = 0.0) -> AsyncIterator[str]:
    """The address of a stand-in in this process."""
    replies, connections = Replies(step_seconds=step_seconds), list[Connection]()

    def accepted() -> Connection:
        connections.append(Connection(replies))
        return connections[-1]

    server = await asyncio.get_running_loop().create_server(accepted, "127.0.0.1", 0)
    steps = asyncio.create_task(replies.run()) if step_seconds else None
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for connection in connections:
            connection.close()
        await asyncio.sleep(0)  # the transports close in the next turn of the loop
        if steps is not None:
            steps.cancel()


def request(max_tokens: int) -> Request:
    return Request(
        key=RequestKey("r", 1),
        token_ids=(40, 41, 42),
        num_prompt_tokens=3,
        sampling=SamplingParams(max_tokens=max_tokens),
        items=(),
        cache_salt=bytes(32),
    )


async def decoded(worker: WorkerClient, address: str, max_tokens: int) -> list[int]:
    """The indices of the tokens of a decode, after its last message was checked."""
    source = Source(address, BOOT_ID, "r.kv", bytes(16))
    call = messages.DecodeCall(request(max_tokens), "r.kv", source, BOOT_ID)
    events = [reply.event async for reply in worker.decode(call, timeout=60)]
    assert events[-1] == messages.Finished(FinishReason.LENGTH, max_tokens)
    return [event.first_index for event in events[:-1] if isinstance(event, messages.Tokens)]


@pytest.mark.parametrize("step_seconds", [0.0, 1e-6], ids=["at once", "by steps"])
async def test_grpcs_client_gets_each_token_of_an_answer_as_one_message(
    step_seconds: float,
) -> None:
    async with stand_in(step_seconds=step_seconds) as address, WorkerClient(address) as worker:
        assert (await worker.hello(timeout=10)).boot_id == BOOT_ID
        async with contextlib.aclosing(worker.watch_load()) as loads:
            assert (await anext(loads)).accepting
        call = messages.PrefillCall(request(MANY), "r.kv", ())
        events = [reply.event async for reply in worker.prefill(call, timeout=60)]
        assert [type(event).__name__ for event in events] == [
            "Accepted",
            "FirstToken",
            "PrefillDone",
        ]
        answers = await asyncio.gather(*(decoded(worker, address, MANY) for _ in range(3)))
        assert answers == [list(range(1, MANY))] * 3


async def test_a_call_that_the_stand_in_lacks_fails() -> None:
    async with stand_in() as address, WorkerClient(address) as worker:
        with pytest.raises(WorkerError):
            await worker.reserve(messages.ReserveCall(RequestKey("r", 1), 4), timeout=10)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_clients_count_the_answers_and_tokens_of_a_gateway(*, stream: bool) -> None:
    num_tokens, num_answers = 7, 6
    async with stand_in() as address:
        settings = dataclasses.replace(gateway_settings([]), workers=(address,))
        async with serving(settings) as gateway:
            load = CountingLoad(num_tokens, num_answers, stream=stream)
            await load.start(int(gateway.url.rpartition(":")[2]), 2)
            await load.ended.wait()
            load.close()
            tally = load.tally
            assert (tally.answers, tally.failed) == (num_answers, 0)
            assert tally.tokens == (num_answers * num_tokens if stream else 0)
            assert len(tally.seconds) == num_answers
            assert gateway.context.meters.num_output_tokens == num_answers * num_tokens


class CountingLoad(gateway_clients.Load):
    """Stops after some answers."""

    def __init__(self, num_tokens: int, num_answers: int, *, stream: bool) -> None:
        request = gateway_clients.request_bytes(num_tokens=num_tokens, stream=stream)
        super().__init__(request, stream=stream, rate=0.0)
        self.ended = asyncio.Event()
        self._left = num_answers
        self._num_answers = num_answers

    def free(self, client: gateway_clients.Client) -> None:
        if self._left:
            self._left -= 1
            super().free(client)
        elif self.tally.answers == self._num_answers:
            self.ended.set()


async def test_a_refused_stream_counts_as_failed() -> None:
    load = CountingLoad(2, 0, stream=True)
    client = gateway_clients.Client(load)
    client.data_received(b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}")
    assert (load.tally.answers, load.tally.failed, load.tally.tokens) == (1, 1, 0)


@pytest.mark.parametrize("size", [1, 5, 6, 7, 1000])
def test_events_are_counted_wherever_they_are_cut(size: int) -> None:
    load = CountingLoad(2, 0, stream=True)
    client = gateway_clients.Client(load)
    events = b"".join(b"c\r\ndata: {'x': 1}\n\n\r\n" for _ in range(4))
    text = b"HTTP/1.1 200 OK\r\n\r\n" + events + b"e\r\n" + gateway_clients.LAST_BYTES
    pieces = [text[:20], *(text[at : at + size] for at in range(20, len(text), size))]
    for piece in pieces:
        client.data_received(piece)
    assert (load.tally.answers, load.tally.failed, load.tally.tokens) == (1, 0, 3)


def test_lines_have_medians_goals_and_ratios_by_round() -> None:
    def measured(count: int) -> dict[str, float]:
        used = [{"main": 1.0, "others": 0.5}, {"main": 0.25, "others": 0.0}]
        return gateway_speed.figures(
            {
                "seconds": 2.0,
                "answers": count,
                "used": [*used, {"main": 0.25, "others": 0.0}],
                "used_by_others": 0.5,
                "p50_ms": 1.0,
                "p95_ms": 2.0,
                "failed": 0,
            },
            "answers",
        )

    ours, theirs = [measured(n) for n in (3000, 1000, 2000)], [measured(1000)] * 3
    line = gateway_speed.line("requests", ours)
    assert (line["per_second"], line["met"]) == (1000.0, True)
    assert line["gateway_us"] == pytest.approx(750.0)
    found = gateway_speed.against(ours, theirs)
    assert found["ratio_per_round"]["per_second"] == [3.0, 1.0, 2.0]
    assert found["ratio"]["per_second"] == 2.0
    head, row = tables.gateway([line])
    assert len(head) == len(row)
    assert row[:3] == ("answers of 4 tokens", "1000", "1000, met")
