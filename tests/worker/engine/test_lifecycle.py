"""Every request gets its last word, and everything that it had comes back."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from worker.answers import answer_alone
from worker.engine.talk import IMAGE, about_image, error, events, first_token, text, tokens

from vlm_worker.engine.engine import Engine
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.errors import (
    CancelledError,
    ContextTooLongError,
    DrainingError,
    DuplicateError,
    EngineError,
    GoneError,
    InvalidRequestError,
    OverloadedError,
)
from vlm_worker.testing import ChecksumRunner, plain_positions
from vlm_worker.types import (
    BlocksReady,
    FinishedEvent,
    FinishReason,
    RequestKey,
    ScheduledEvent,
    TokenEvent,
)
from vlm_worker.wire.messages import CancelOutcome


async def test_the_runner_uses_idle_time_until_a_request_arrives(start: Any, until: Any) -> None:
    runner = ChecksumRunner()
    runner.num_idle_steps = most = 1 << 60
    engine: Engine = start(runner)
    await until(lambda: runner.num_idle_steps < most)
    told = await events(engine.submit_prefill(text(), for_peer=False))
    assert isinstance(told[-1], FinishedEvent)
    assert runner.num_idle_steps > 0, "it was interrupted"


# ---- finishing -----------------------------------------------------------------------------------


async def test_events_come_in_their_order(start: Any) -> None:
    told = await events(start(max_num_batched_tokens=6).submit_prefill(text(), for_peer=True))
    kinds = [type(event) for event in told]
    assert kinds == [ScheduledEvent, BlocksReady, BlocksReady, TokenEvent]
    assert [e.num_blocks for e in told if isinstance(e, BlocksReady)] == [1, 3]


@pytest.mark.parametrize(
    ("sampling", "settings", "reason"),
    [
        pytest.param({"max_tokens": 6}, {}, FinishReason.LENGTH, id="max_tokens"),
        pytest.param({"max_tokens": 999}, {}, FinishReason.LENGTH, id="max_model_len"),
        pytest.param({"stop_token_ids": (3,)}, {}, FinishReason.STOP, id="stop_token_ids"),
        pytest.param({"ignore_eos": False}, {"eos": True}, FinishReason.STOP, id="eos"),
        pytest.param({}, {"eos": True}, FinishReason.LENGTH, id="eos ignored"),
    ],
)
async def test_an_answer_ends_where_it_should(
    start: Any, sampling: dict[str, Any], settings: dict[str, Any], reason: FinishReason
) -> None:
    free = answer_alone(text(max_tokens=6))
    if "stop_token_ids" in sampling:
        sampling = {"stop_token_ids": (free[2],)}
    eos = (free[3],) if settings else ()
    request = text(**sampling)
    told = await events(start(eos_token_ids=eos).submit_prefill(request, for_peer=False))
    alone = answer_alone(request, max_model_len=64, eos_token_ids=eos)
    assert tokens(told) == alone
    assert told[-1] == FinishedEvent(reason, len(alone))


@pytest.mark.parametrize("by", ["eos", "stop_token_ids"])
async def test_no_token_ends_an_answer_before_its_min_tokens(start: Any, by: str) -> None:
    """Nor if the answer is continued: after each of its tokens it goes on identically."""
    free = answer_alone(text(max_tokens=6, ignore_eos=False))
    ends = {"stop_token_ids": (free[0],)} if by == "stop_token_ids" else {}
    engine: Engine = start(eos_token_ids=(free[0],) if by == "eos" else ())
    asked = {"ignore_eos": False, **ends}
    assert tokens(await events(engine.submit_prefill(text(**asked), for_peer=False))) == free[:1]
    for min_tokens in (1, 4, 6):
        request = text(f"at least {min_tokens}", min_tokens=min_tokens, **asked)
        whole = tokens(await events(engine.submit_prefill(request, for_peer=False)))
        assert free[0] not in whole[:min_tokens]
        assert len(whole) >= min_tokens
        for number in range(1, len(whole)):
            ids = (*request.token_ids, *whole[:number])
            key = RequestKey(f"{min_tokens} after {number}", 0)
            later = dataclasses.replace(request, key=key, token_ids=ids)
            told = await events(engine.submit_prefill(later, for_peer=False))
            assert tokens(told) == whole[number:]


async def test_min_tokens_beyond_max_tokens_are_refused_by_name(start: Any) -> None:
    refused = error(await events(start().submit_prefill(text(min_tokens=7), for_peer=False)))
    assert isinstance(refused, InvalidRequestError)
    assert refused.param == "min_tokens"


async def test_an_answer_that_ends_with_its_first_token_holds_nothing(start: Any) -> None:
    engine: Engine = start()
    told = await events(engine.submit_prefill(text(max_tokens=1), for_peer=True))
    assert told[-1] == FinishedEvent(FinishReason.LENGTH, 1)
    assert engine.stats().inflight == 0
    assert isinstance(error(await events(engine.adopt_local(text()))), GoneError)


async def test_an_answer_continued_elsewhere_is_the_same_answer(start: Any) -> None:
    engine: Engine = start()
    whole = answer_alone(text(temperature=1.0, seed=5))
    for delivered in range(1, 6):
        request = text(f"after {delivered}", temperature=1.0, seed=5)
        request = dataclasses.replace(request, token_ids=(*request.token_ids, *whole[:delivered]))
        assert (
            tokens(await events(engine.submit_prefill(request, for_peer=False)))
            == whole[delivered:]
        )


# ---- refusals ------------------------------------------------------------------------------------


async def test_what_never_fits_is_answered_with_the_numbers(start: Any) -> None:
    engine: Engine = start()
    refused = error(await events(engine.submit_prefill(text(length=64), for_peer=False)))
    assert isinstance(refused, ContextTooLongError)
    assert "64 tokens" in str(refused)
    with pytest.raises(ContextTooLongError):
        await engine.reserve(RequestKey("r", 0), 65)


async def test_a_full_queue_answers_overloaded(start: Any, until: Any) -> None:
    runner = ChecksumRunner()
    runner.gate.clear()
    engine: Engine = start(runner, max_num_seqs=1, max_waiting=1)
    running = engine.submit_prefill(text("running"), for_peer=False)
    await until(lambda: runner.num_steps == 1)
    waiting = engine.submit_prefill(text("waiting"), for_peer=False)
    refused = engine.submit_prefill(text("refused"), for_peer=False)
    runner.gate.set()
    said = error(await events(refused))
    assert isinstance(said, OverloadedError)
    assert said.retry_after_seconds > 0
    for stream in (running, waiting):
        assert isinstance((await events(stream))[-1], FinishedEvent)


async def test_a_key_is_used_once(start: Any) -> None:
    engine: Engine = start()
    await events(engine.submit_prefill(text(), for_peer=False))
    told = await events(engine.submit_prefill(text(), for_peer=False))
    assert isinstance(error(told), DuplicateError)
    with pytest.raises(DuplicateError):
        await engine.reserve(text().key, 10)


async def test_a_pool_smaller_than_one_sequence_is_refused_at_the_start() -> None:
    shape = EngineSettings(max_model_len=64)
    with pytest.raises(ValueError, match="holds 60 tokens, fewer than max_model_len"):
        Engine(ChecksumRunner(16), settings=shape, positions=plain_positions)


async def test_positions_that_fail_fail_their_request_alone(start: Any) -> None:
    def positions(token_ids: Any, items: Any) -> Any:
        if len(token_ids) == 3:
            raise ZeroDivisionError
        return plain_positions(token_ids, items)

    engine = Engine(
        ChecksumRunner(), settings=EngineSettings(max_model_len=64), positions=positions
    )
    engine.start(asyncio.get_running_loop())
    bad = await events(engine.submit_prefill(text("bad", length=3), for_peer=False))
    assert isinstance(error(bad), EngineError)
    assert tokens(await events(engine.submit_prefill(text(), for_peer=False)))
    await engine.stop()


async def test_an_encoder_has_no_sequences(start: Any) -> None:
    engine: Engine = start(ChecksumRunner(has_kv=False))
    assert isinstance(
        error(await events(engine.submit_prefill(text(), for_peer=False))), EngineError
    )
    assert engine.stats().kv is None


# ---- cancel, release, drain, stop ----------------------------------------------------------------


async def test_cancel_says_what_it_found(start: Any, until: Any) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    assert await engine.cancel(RequestKey("unknown", 0)) is CancelOutcome.NOT_FOUND
    await events(engine.submit_prefill(text("done"), for_peer=False))
    assert await engine.cancel(RequestKey("done", 0)) is CancelOutcome.ALREADY_COMPLETE
    await events(engine.submit_prefill(text("held"), for_peer=True))
    before = CancelOutcome.CANCELLED_BEFORE_ADVERTISED
    assert await engine.cancel(RequestKey("held", 0)) is before
    await events(engine.submit_prefill(text("read"), for_peer=True))
    await asyncio.to_thread(engine.readable_blocks.copy, RequestKey("read", 0), 0, 1)
    in_flight = CancelOutcome.CANCEL_REQUESTED_IN_FLIGHT
    assert await engine.cancel(RequestKey("read", 0)) is in_flight


async def test_cancel_ends_whatever_state_a_request_is_in(start: Any, until: Any) -> None:
    runner = ChecksumRunner()
    runner.gate.clear()
    engine: Engine = start(runner, max_num_seqs=1)
    streams = {
        "running": engine.submit_prefill(text("running", max_tokens=50), for_peer=False),
        "waiting": engine.submit_prefill(text("waiting"), for_peer=False),
        "asking": engine.submit_prefill(about_image("asking"), for_peer=False),
    }
    await until(lambda: runner.num_steps == 1)
    cancelled = asyncio.gather(*(engine.cancel(RequestKey(name, 0)) for name in streams))
    await asyncio.sleep(0)  # the commands are sent
    runner.gate.set()
    assert set(await cancelled) == {CancelOutcome.CANCELLED_BEFORE_ADVERTISED}
    for stream in streams.values():
        assert isinstance(error(await events(stream)), CancelledError)
    assert engine.stats().inflight == 0


async def test_release_frees_what_is_held_and_spares_what_runs(start: Any) -> None:
    engine: Engine = start()
    stream = engine.submit_prefill(text(max_tokens=20), for_peer=False)
    await first_token(stream)
    await engine.release(text().key)
    assert isinstance((await events(stream))[-1], FinishedEvent)
    await events(engine.submit_prefill(text("held"), for_peer=True))
    assert engine.stats().num_held == 1
    await engine.release(RequestKey("held", 0))
    await engine.release(RequestKey("held", 0))
    await engine.release(RequestKey("unknown", 0))
    assert engine.stats().inflight == 0


async def test_drain_hands_decodes_over_and_refuses_the_rest(start: Any, until: Any) -> None:
    runner = ChecksumRunner()
    runner.faults.step_seconds = 0.005  # fifty tokens outlast the first one's delivery
    engine: Engine = start(runner)
    decoding = engine.submit_prefill(text("decoding", max_tokens=50), for_peer=False)
    first = await first_token(decoding)
    runner.gate.clear()
    prefilling = engine.submit_prefill(text("prefilling"), for_peer=True)
    draining = asyncio.ensure_future(engine.drain())
    await asyncio.sleep(0)  # the command is sent
    runner.gate.set()
    assert await draining == 2
    told = await events(decoding)
    said = [first.token_id, *tokens(told)]
    assert told[-1] == FinishedEvent(FinishReason.DRAINED, len(said))
    assert said == answer_alone(text(max_tokens=len(said)))
    assert isinstance(error(await events(prefilling)), DrainingError)
    late = await events(engine.submit_prefill(text("late"), for_peer=False))
    assert isinstance(error(late), DrainingError)


async def test_stop_gives_everybody_a_last_word(start: Any, until: Any) -> None:
    runner = ChecksumRunner()
    runner.gate.clear()
    engine: Engine = start(runner, dies=True)
    running = engine.submit_prefill(text("running"), for_peer=False)
    encoding = engine.encode(RequestKey("encoding", 0), [IMAGE])
    await until(lambda: runner.num_steps + len(runner.batch_sizes) > 0)
    stopping = asyncio.ensure_future(engine.stop())
    await asyncio.sleep(0)  # the command is sent
    late = engine.submit_prefill(text("late"), for_peer=False)
    runner.gate.set()
    await stopping
    assert isinstance(error(await events(running)), DrainingError)
    assert isinstance(error(await events(late)), DrainingError | EngineError)
    assert len([event async for event in encoding]) == 1
    assert isinstance(
        error(await events(engine.submit_prefill(text("later"), for_peer=False))), EngineError
    )
    with pytest.raises(EngineError):
        await engine.cancel(RequestKey("running", 0))
    assert not engine.healthy
