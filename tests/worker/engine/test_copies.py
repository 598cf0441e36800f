"""Bytes that peers send are written between steps, and hold up nobody's tokens for long."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from worker.answers import answer_alone
from worker.engine.talk import events, first_token, text, tokens

from vlm_worker.core.step_values import StepInputs, StepOutput
from vlm_worker.engine.engine import Engine
from vlm_worker.engine.events import EventStream, PrefillEvent
from vlm_worker.errors import CorruptTransferError, EngineError, GoneError
from vlm_worker.testing import ChecksumRunner
from vlm_worker.types import Request, RequestKey, SamplingParams

BLOCK_BYTES = 4 * 8


class Copying(ChecksumRunner):
    """Notes its steps and the blocks that it writes; writes none until it may."""

    def __init__(self, num_blocks: int = 65) -> None:
        super().__init__(num_blocks)
        self.may_copy = threading.Event()
        self.may_copy.set()
        self.calls: list[str] = []

    def execute(self, inputs: StepInputs) -> StepOutput:
        self.calls.append("step")
        return super().execute(inputs)

    def import_blocks(self, block_ids: Sequence[int], data: memoryview) -> None:
        self.calls += ["block"] * len(block_ids)
        self.may_copy.wait()
        super().import_blocks(block_ids, data)


async def receive(engine: Engine, *, num_blocks: int) -> RequestKey:
    """Let a peer's prompt of so many blocks be received."""
    length = num_blocks * 4
    request = Request(RequestKey("peer", 0), (3,) * length, length, SamplingParams(2))
    await engine.reserve(request.key, length + 1)
    assert (await engine.receive(request)).first_block == 0
    return request.key


async def begin(
    engine: Engine, runner: Copying, until: Any, request: Request
) -> EventStream[PrefillEvent]:
    """Answer a request; its first step ends when `runner.gate` is set."""
    runner.gate.clear()
    answer = engine.submit_prefill(request, for_peer=False)
    await until(lambda: runner.num_steps == 1)
    return answer


async def send(engine: Engine, key: RequestKey, *sizes: int) -> list[asyncio.Task[None]]:
    """Hand in messages of so many blocks each; the engine has them in its queue."""
    starts = itertools.accumulate(sizes, initial=0)
    sending = [
        asyncio.create_task(engine.import_blocks(key, start, memoryview(bytes(size * BLOCK_BYTES))))
        for start, size in zip(starts, sizes, strict=False)
    ]
    await asyncio.sleep(0)
    return sending


async def test_what_a_step_brought_is_told_before_a_copy_begins(start: Any, until: Any) -> None:
    runner = Copying()
    engine: Engine = start(runner)
    key = await receive(engine, num_blocks=2)
    answer = await begin(engine, runner, until, text())
    runner.may_copy.clear()
    sending = await send(engine, key, 1, 1)
    runner.gate.set()
    try:
        first = await first_token(answer)
        assert not any(one.done() for one in sending)
    finally:
        runner.may_copy.set()
    await asyncio.gather(*sending)
    assert [first.token_id, *tokens(await events(answer))] == answer_alone(text())
    await engine.release(key)


async def test_steps_go_on_between_the_copies_of_a_long_hand_over(start: Any, until: Any) -> None:
    runner = Copying(num_blocks=500)
    engine: Engine = start(runner, max_model_len=1600, max_copy_bytes=16 * BLOCK_BYTES)
    key = await receive(engine, num_blocks=350)
    answer = await begin(engine, runner, until, text(max_tokens=60))
    sending = await send(engine, key, *[1] * 350)
    runner.gate.set()
    await asyncio.gather(*sending)
    between = [len(list(run)) for call, run in itertools.groupby(runner.calls) if call == "block"]
    assert between == [16] * 21 + [14]
    assert tokens(await events(answer)) == answer_alone(text(max_tokens=60))
    await engine.release(key)


async def test_a_message_larger_than_the_bound_is_written_alone(start: Any, until: Any) -> None:
    runner = Copying()
    engine: Engine = start(runner, max_copy_bytes=1)
    key = await receive(engine, num_blocks=3)
    answer = await begin(engine, runner, until, text())
    sending = await send(engine, key, 2, 1)
    runner.gate.set()
    await asyncio.gather(*sending)
    assert runner.calls[:5] == ["step", "block", "block", "step", "block"]
    await events(answer)
    await engine.release(key)


async def test_a_cancelled_request_is_not_copied(start: Any, until: Any) -> None:
    runner = Copying()
    engine: Engine = start(runner)
    key = await receive(engine, num_blocks=2)
    answer = await begin(engine, runner, until, text())
    sending = await send(engine, key, 1, 1)
    cancelling = asyncio.create_task(engine.cancel(key))  # comes last, and is done first
    await asyncio.sleep(0)
    runner.gate.set()
    await cancelling
    assert [type(one) for one in await asyncio.gather(*sending, return_exceptions=True)] == [
        GoneError,
        GoneError,
    ]
    assert "block" not in runner.calls
    await events(answer)


async def test_a_copy_without_a_waiting_request_is_not_started(start: Any, until: Any) -> None:
    runner = Copying()
    engine: Engine = start(runner)
    key = await receive(engine, num_blocks=2)
    answer = await begin(engine, runner, until, text())
    first, second = await send(engine, key, 1, 1)
    first.cancel()
    await asyncio.sleep(0)
    runner.gate.set()
    await second
    assert runner.calls.count("block") == 1
    with pytest.raises(CorruptTransferError, match=r"blocks \[0\] never came"):
        await engine.start_decode(key, 5)
    await events(answer)
    await engine.release(key)


async def test_copies_that_an_engine_leaves_undone_are_refused(start: Any, until: Any) -> None:
    runner = Copying()
    engine: Engine = start(runner, max_copy_bytes=1)
    key = await receive(engine, num_blocks=3)
    await begin(engine, runner, until, text())
    sending = await send(engine, key, 1, 1, 1)
    stopping = asyncio.create_task(engine.stop())
    await asyncio.sleep(0)
    runner.gate.set()
    await stopping
    done, *undone = await asyncio.gather(*sending, return_exceptions=True)
    assert done is None
    assert [str(one) for one in undone] == ["the engine does not run"] * 2
    assert all(isinstance(one, EngineError) for one in undone)
