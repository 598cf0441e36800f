"""Queues are bounded by number, tokens and pixels; refusals say when to come back."""

from __future__ import annotations

from typing import Any

import pytest
from worker.answers import make_image
from worker.engine.encode_helpers import encode_first
from worker.engine.talk import error, events, text, tokens

from vlm_worker.core.admission_policy import AdmissionReason
from vlm_worker.core.limits import QueueLimit
from vlm_worker.core.sequence import Lane
from vlm_worker.core.step_time import LimitReason
from vlm_worker.engine.engine import Engine
from vlm_worker.engine.events import EncodeEvent, EventStream, ItemFailed
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.errors import OverloadedError
from vlm_worker.settings import AdmissionPolicy, AdmissionSettings
from vlm_worker.testing import IMAGE_TOKEN, ChecksumRunner
from vlm_worker.types import (
    FinishedEvent,
    ImageItem,
    PreparedImage,
    Request,
    RequestKey,
    SamplingParams,
)


def prepared_image(number: int) -> PreparedImage:
    return make_image(number, num_tokens=4)


def about_unseen_image() -> Request:
    image = prepared_image(9)
    item = ImageItem(image.image_key, 0, 4, image.grid_thw)
    token_ids = (*[IMAGE_TOKEN] * 4, 1, 2)
    return Request(RequestKey("unseen", 0), token_ids, 6, SamplingParams(max_tokens=4), (item,))


async def refusals(stream: EventStream[EncodeEvent]) -> list[Exception]:
    return [event.error async for event in stream if isinstance(event, ItemFailed)]


async def test_a_queue_full_of_tokens_refuses_and_takes_in_one_longer_than_itself_alone(
    start: Any, until: Any
) -> None:
    runner = ChecksumRunner()
    runner.gate.clear()
    engine: Engine = start(runner, max_num_seqs=1, max_waiting_tokens=15)
    running = engine.submit_prefill(text("running"), for_peer=False)
    await until(lambda: runner.num_steps == 1)
    waiting = engine.submit_prefill(text("waiting", length=20), for_peer=False)
    refused = engine.submit_prefill(text("refused", length=1), for_peer=False)
    runner.gate.set()
    said = error(await events(refused))
    assert isinstance(said, OverloadedError)
    assert str(said) == "20 tokens wait, 15 may"
    assert 0.1 <= said.retry_after_seconds <= 30
    for stream in (running, waiting):
        assert isinstance((await events(stream))[-1], FinishedEvent)
    refused_for = {bound: count for bound, count in engine.stats().queue.refused.items() if count}
    assert refused_for == {QueueLimit.TOKENS: 1}


async def test_a_queue_full_of_pixels_refuses_and_takes_in_one_call_whatever_its_pixels(
    start: Any, until: Any
) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner, max_waiting_pixels=1)
    first = await encode_first(engine, runner, until)
    second = engine.encode(RequestKey("second", 0), [prepared_image(2), prepared_image(3)])
    third = engine.encode(RequestKey("third", 0), [prepared_image(4)])
    runner.gate.set()
    assert await refusals(first) == await refusals(second) == []
    (said,) = await refusals(third)
    assert isinstance(said, OverloadedError)
    assert str(said).endswith("pixels wait for the encoder, 1 may")
    assert 0.1 <= said.retry_after_seconds <= 30
    await until(lambda: engine.stats().queue.refused[QueueLimit.PIXELS] == 1)
    for name in ("first", "second"):
        await engine.cancel(RequestKey(name, 0))


async def test_stats_count_waiting_requests_by_lane_and_admissions_by_reason(
    start: Any, until: Any
) -> None:
    runner = ChecksumRunner()
    runner.gate.clear()
    rules = AdmissionSettings(AdmissionPolicy.DUAL_QUEUE, ageing_seconds=3600.0)
    engine: Engine = start(runner, max_num_seqs=1, admission=rules)
    streams = [engine.submit_prefill(text("running"), for_peer=False)]
    await until(lambda: runner.num_steps == 1)
    streams += [engine.submit_prefill(text(f"{number}"), for_peer=False) for number in range(2)]
    unseen = engine.submit_prefill(about_unseen_image(), for_peer=False)
    runner.gate.set()
    await until(lambda: engine.stats().queue.waiting == {Lane.TEXT: 0, Lane.VISION: 1})
    queue = engine.stats().queue
    assert queue.waiting_tokens == 6
    assert queue.oldest_wait_seconds > 0
    for stream in streams:
        assert len(tokens(await events(stream))) == 6
    await engine.cancel(RequestKey("unseen", 0))
    await events(unseen)
    await until(lambda: engine.stats().num_waiting == 0)
    queue = engine.stats().queue
    assert {why: n for why, n in queue.admitted.items() if n} == {AdmissionReason.BALANCED: 3}
    assert (queue.running_limit, queue.running_limit_reason) == (1, LimitReason.FIXED)


async def test_steps_slower_than_their_target_let_fewer_run(start: Any, until: Any) -> None:
    engine: Engine = start(max_num_seqs=4, target_step_ms=1e-6)
    streams = [engine.submit_prefill(text(str(n), max_tokens=40), for_peer=False) for n in range(4)]
    for stream in streams:
        assert len(tokens(await events(stream))) == 40
    await until(lambda: engine.stats().queue.running_limit == 1)
    assert engine.stats().queue.running_limit_reason in (
        LimitReason.SLOWER,
        LimitReason.AT_BOUND,
    )


def test_a_step_that_cannot_hold_the_largest_image_whole_is_refused_at_the_start() -> None:
    bounds = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    EngineSettings(**bounds, max_image_tokens=12, whole_images=True)
    EngineSettings(**bounds, max_image_tokens=13)
    with pytest.raises(ValueError, match="13 tokens never fits"):
        EngineSettings(**bounds, max_image_tokens=13, whole_images=True)
