"""What the engine tells of its work: KV by request, patches, states that add up, no memory left."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import threading
from typing import Any

import numpy as np
import pytest
from worker.answers import make_image
from worker.engine.talk import IMAGE, about_image, error, events, text, tokens

from vlm_worker.core.step_values import StepInputs
from vlm_worker.engine.engine import Engine
from vlm_worker.engine.events import ItemReady
from vlm_worker.engine.runner import DeviceErrors
from vlm_worker.errors import EngineError
from vlm_worker.testing import ChecksumRunner
from vlm_worker.types import FailedEvent, Modality, RequestKey, ScheduledEvent


class Starved(ChecksumRunner):
    """Has no memory for so many coming steps, and for no image while `blind`."""

    num_starved = 0
    blind = False

    def execute(self, inputs: StepInputs) -> Any:
        if self.num_starved:
            self.num_starved -= 1
            raise MemoryError("told to have none")
        return super().execute(inputs)

    def encode(self, images: Any) -> list[np.ndarray | Exception]:
        if self.blind:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return super().encode(images)


class Blocked(ChecksumRunner):
    """Computes no step until it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_step = threading.Event()

    def execute(self, inputs: StepInputs) -> Any:
        self.may_step.wait()
        return super().execute(inputs)


async def test_what_is_known_is_told_before_the_model_computes(start: Any) -> None:
    runner = Blocked()
    runner.gate.clear()  # so that the second image and the prompt share a turn
    engine: Engine = start(runner)
    first, second = (
        engine.encode(RequestKey(str(number), 0), (make_image(number, num_tokens=5),))
        for number in (1, 2)
    )
    answer = engine.submit_prefill(text(), for_peer=False)
    runner.gate.set()
    try:
        assert isinstance(await anext(first), ItemReady)
        assert isinstance(await anext(second), ItemReady)
        assert isinstance(await anext(answer), ScheduledEvent)
    finally:
        runner.may_step.set()
    assert len(tokens(await events(answer))) == 6
    for number in (1, 2):
        await engine.cancel(RequestKey(str(number), 0))


def ended(engine: Engine, modality: Modality) -> tuple[int, float]:
    """Answers of a modality that ended here, and their KV in bytes."""
    buckets = dict(engine.stats().kv_request_bytes)[modality]
    return sum(buckets.counts), buckets.total


async def test_the_kv_of_an_answer_is_counted_when_it_ends(start: Any) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    request = text(length=10)
    assert len(tokens(await events(engine.submit_prefill(request, for_peer=False)))) == 6
    assert runner.kv_layout is not None
    assert ended(engine, Modality.TEXT) == (1, math.ceil(16 / 4) * runner.kv_layout.block_bytes)
    assert ended(engine, Modality.IMAGE) == (0, 0.0)
    _ = [event async for event in engine.encode(about_image("seen").key, [IMAGE])]
    told = await events(engine.submit_prefill(about_image("seen"), for_peer=False))
    assert len(tokens(told)) == 4, told
    assert ended(engine, Modality.IMAGE) == (1, math.ceil(12 / 4) * runner.kv_layout.block_bytes)
    await engine.cancel(about_image("seen").key)


async def test_an_answer_that_is_cut_short_is_counted_nowhere(start: Any) -> None:
    runner = ChecksumRunner()
    runner.faults.step_seconds = 0.05  # an answer that nobody cuts takes seconds
    engine: Engine = start(runner)
    stream = engine.submit_prefill(text("long", max_tokens=50), for_peer=False)
    await anext(stream)
    await engine.cancel(text("long").key)
    assert isinstance((await events(stream))[-1], FailedEvent)
    assert ended(engine, Modality.TEXT) == (0, 0.0)


async def test_patches_are_counted_beside_visual_tokens(start: Any) -> None:
    engine: Engine = start(ChecksumRunner())
    _ = [event async for event in engine.encode(text().key, [IMAGE])]
    stats = engine.stats()
    assert tuple(stats.count(key) for key in ("images", "visual_tokens", "patches")) == (
        1,
        5,
        math.prod(IMAGE.grid_thw),
    )
    await engine.cancel(text().key)


async def test_memory_that_runs_out_is_counted_and_costs_its_request_alone(
    start: Any, until: Any
) -> None:
    runner = Starved()
    engine: Engine = start(runner)
    runner.num_starved = 1
    assert isinstance(
        error(await events(engine.submit_prefill(text("a"), for_peer=False))), EngineError
    )
    runner.blind = True
    (failed,) = [event async for event in engine.encode(text("b").key, [IMAGE])]
    assert isinstance(failed.error, EngineError)  # type: ignore[union-attr]
    await until(lambda: engine.stats().count("out_of_memory") == 2)
    runner.blind = False
    assert len(tokens(await events(engine.submit_prefill(text("c"), for_peer=False)))) == 6


@pytest.mark.parametrize(
    ("failure", "is_memory"),
    [
        (MemoryError(), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("the step was told to crash"), False),
    ],
)
def test_what_counts_as_memory_that_ran_out(failure: BaseException, is_memory: bool) -> None:
    errors = DeviceErrors()
    errors.record(failure)
    assert errors.num_out_of_memory == is_memory


async def test_the_states_of_kv_add_up_to_the_capacity_at_every_moment(start: Any) -> None:
    runner = ChecksumRunner()
    engine: Engine = start(runner)
    streams = [engine.submit_prefill(text(str(i), length=10), for_peer=False) for i in range(6)]
    for stream in streams:
        async for _ in stream:
            kv = engine.stats().kv
            assert kv is not None
            states = kv.running_tokens + kv.reserved_tokens + kv.cached_tokens + kv.free_tokens
            assert states == kv.capacity_tokens


async def test_blocks_of_an_image_that_a_peer_sent_are_counted_as_visual(start: Any) -> None:
    engine: Engine = start()
    request = about_image()
    await engine.reserve(request.key, 9)
    await engine.receive(request)
    await engine.import_blocks(request.key, 0, memoryview(bytes(2 * 32)))
    await engine.release(request.key)
    kv = engine.stats().kv
    assert kv is not None
    assert (kv.cached_tokens, kv.visual_cached_tokens) == (8, 8)


@pytest.mark.parametrize(("percent", "num_text", "num_visual"), [(0, 3, 2), (100, 4, 1)])
async def test_evicted_blocks_are_counted_by_kind(
    start: Any, percent: int, num_text: int, num_visual: int
) -> None:
    engine: Engine = start(ChecksumRunner(17), kv_visual_percent=percent)
    await events(engine.submit_prefill(text("older", length=16, max_tokens=1), for_peer=False))
    _ = [event async for event in engine.encode(about_image("newer").key, [IMAGE])]
    await events(engine.submit_prefill(about_image("newer"), for_peer=False))
    await engine.cancel(about_image("newer").key)
    kv = engine.stats().kv
    assert kv is not None
    assert (kv.cached_tokens, kv.visual_cached_tokens) == (24, 8)
    long = dataclasses.replace(
        text("long", length=60, max_tokens=1), token_ids=tuple(range(100, 160))
    )
    assert len(tokens(await events(engine.submit_prefill(long, for_peer=False)))) == 1
    kv = engine.stats().kv
    assert kv is not None
    assert (kv.text_evictions, kv.visual_evictions) == (num_text, num_visual)
    assert kv.visual_cached_tokens == 8 - 4 * num_visual


async def test_a_busy_engine_that_answers_commands_counts_anew_only_now_and_then(
    start: Any, until: Any
) -> None:
    runner, now = ChecksumRunner(num_blocks=1100), [0.0]
    engine: Engine = start(runner, clock=lambda: now[0], max_model_len=4096)
    engine.submit_prefill(text(max_tokens=4000), for_peer=False)  # outlasts all that follows
    await until(lambda: engine.stats().inflight == 1)
    runner.gate.clear()  # it is in the midst of a step from now on
    releases = [asyncio.ensure_future(engine.release(RequestKey("unknown", n))) for n in range(9)]
    await asyncio.sleep(0)
    before = engine.stats()
    runner.gate.set()
    await asyncio.gather(*releases)
    assert engine.stats() is before
    now[0] += 1.0
    await engine.release(RequestKey("unknown", 9))
    assert engine.stats() is not before
    await engine.cancel(text().key)
