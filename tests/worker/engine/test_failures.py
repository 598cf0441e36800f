"""A defect fails the requests that it touches; a dead engine says so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from worker.answers import answer_alone
from worker.engine.talk import IMAGE, about_image, events, tokens

from vlm_worker.engine.engine import Engine
from vlm_worker.engine.events import NeedItems, PrefillEvent
from vlm_worker.errors import EngineError
from vlm_worker.testing import ChecksumRunner, embed
from vlm_worker.types import (
    FailedEvent,
    FinishedEvent,
    Request,
    RequestKey,
    SamplingParams,
)

BAD = 13


def text(name: str, *, token: int = 1, length: int = 6, max_tokens: int = 8) -> Request:
    token_ids = (*[20] * (length - 1), token)
    return Request(
        RequestKey(name, 0), token_ids, length, SamplingParams(max_tokens, ignore_eos=True)
    )


async def submit_together(
    engine: Engine, runner: ChecksumRunner, until: Any, requests: list[Request]
) -> list[list[PrefillEvent]]:
    """All of them in one step: they come in while another step is in flight."""
    runner.gate.clear()
    blocker = engine.submit_prefill(text("blocker", max_tokens=1), for_peer=False)
    await until(lambda: runner.num_steps == 1)
    streams = [engine.submit_prefill(request, for_peer=False) for request in requests]
    runner.gate.set()
    told = await asyncio.gather(*(events(stream) for stream in streams))
    await events(blocker)
    return told


async def test_a_crashing_step_fails_one_half_and_spares_the_other(start: Any, until: Any) -> None:
    runner = ChecksumRunner()
    runner.faults.crash_token = BAD
    engine: Engine = start(runner, max_num_batched_tokens=64)
    requests = [text(str(number), token=number + 1) for number in range(3)]
    bad = text("bad", token=BAD)
    told = await submit_together(engine, runner, until, [bad, *requests])
    for failed in told[:2]:  # the half that the bad one is in
        assert isinstance(failed[-1], FailedEvent)
        assert isinstance(failed[-1].error, EngineError)
    for request, said in zip(requests[1:], told[2:], strict=True):
        assert tokens(said) == answer_alone(request)
    assert engine._thread.state.step_loop.failures_in_a_row == 0
    assert engine.healthy
    after = await events(engine.submit_prefill(text("after"), for_peer=False))
    assert tokens(after) == answer_alone(text("after"))


async def test_logits_that_are_not_finite_fail_their_request_alone(start: Any, until: Any) -> None:
    runner = ChecksumRunner()
    runner.faults.poison_token = BAD
    engine: Engine = start(runner, max_num_batched_tokens=64)
    good, bad = text("good"), text("bad", token=BAD)
    told = await submit_together(engine, runner, until, [good, bad])
    assert tokens(told[0]) == answer_alone(good)
    assert tokens(told[1]) == []
    assert isinstance(told[1][-1], FailedEvent)
    assert isinstance(told[1][-1].error, EngineError)


async def test_poisoned_kv_is_never_served_again(start: Any) -> None:
    runner = ChecksumRunner()
    runner.faults.poison_token = BAD
    engine: Engine = start(runner)
    bad = text("bad", token=BAD, length=12)
    await events(engine.submit_prefill(bad, for_peer=False))
    runner.faults.poison_token = None
    again = await events(engine.submit_prefill(text("again", token=BAD, length=12), for_peer=False))
    assert tokens(again) == answer_alone(bad)
    assert engine.stats().count("prefix_cache_hits") == 0


async def test_three_failed_steps_in_a_row_make_the_engine_unhealthy(start: Any) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    for number in range(3):
        assert engine.healthy
        runner.faults.crash_steps = 1
        told = await events(engine.submit_prefill(text(str(number)), for_peer=False))
        assert isinstance(told[-1], FailedEvent)
    assert engine.unhealthy_reason == "3 steps in a row failed"
    await events(engine.submit_prefill(text("well"), for_peer=False))
    assert engine.healthy  # a step that computes something ends the row


async def test_a_stuck_step_makes_the_engine_unhealthy(start: Any, until: Any) -> None:
    runner = ChecksumRunner()
    runner.gate.clear()
    engine: Engine = start(runner, stuck_step_seconds=0.05)
    stream = engine.submit_prefill(text("stuck"), for_peer=False)
    assert engine.healthy
    await until(lambda: not engine.healthy)
    assert "it is stuck" in (engine.unhealthy_reason or "")
    runner.gate.set()
    await events(stream)
    assert engine.healthy


class WrongRunner(ChecksumRunner):
    """Answers with something that is not a token per row."""

    def execute(self, inputs: Any) -> Any:
        super().execute(inputs)
        return None


async def test_a_runner_that_returns_nonsense_is_not_believed(start: Any) -> None:
    told = await events(start(WrongRunner()).submit_prefill(text("r"), for_peer=False))
    assert isinstance(told[-1], FailedEvent)
    assert "sampled rows" in str(told[-1].error)


class BrokenRunner(ChecksumRunner):
    """Breaks the thread itself, where no request can be blamed."""

    def embedding_bytes(self, embedding: Any) -> int:
        raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_an_ended_thread_fails_all_requests_and_reports_its_cause(start: Any) -> None:
    engine: Engine = start(BrokenRunner(), dies=True)
    imaged = engine.submit_prefill(about_image("imaged"), for_peer=False)
    assert await anext(imaged) == NeedItems((0,))
    endless = engine.submit_prefill(text("endless", max_tokens=50), for_peer=False)
    rows = memoryview(embed(IMAGE).tobytes())
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        await engine.put_embedding(RequestKey("imaged", 0), 0, rows)
    told = await events(endless)
    assert isinstance(told[-1], FailedEvent | FinishedEvent)
    with pytest.raises(ZeroDivisionError):
        await engine.stop()
    assert "it died: ZeroDivisionError" in (engine.unhealthy_reason or "")


@pytest.mark.parametrize("strict", [True, False])
async def test_a_leak_is_found_when_the_engine_rests(start: Any, until: Any, strict: bool) -> None:
    engine: Engine = start(dies=True, strict=strict)
    await events(engine.submit_prefill(text("r"), for_peer=False))
    state = engine._thread.state
    state.sequences.pool.take(2)  # nobody will give these back
    await engine.release(RequestKey("wake up", 0))
    if strict:
        await until(lambda: not engine.healthy)
        with pytest.raises(AssertionError, match="KV blocks in use: 2"):
            await engine.stop()
    else:
        await until(lambda: engine.stats().invariant_violations > 0)
        await engine.stop()
