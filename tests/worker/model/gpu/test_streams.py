"""Images encoded beside steps: the same answers, and nothing read or given away too early."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from worker.identity.questions import SHAPES, Question, questions
from worker.identity.stepper import Stepper
from worker.model.gpu.watched import WatchedQueues

from vlm_worker.model.build import RunnerSettings, build_runner
from vlm_worker.model.gpu.streams import OverlappedStreams, SingleStream, streams_for
from vlm_worker.model.runner import ModelRunner
from vlm_worker.types import Stage

TEXT = Question("text", (), tuple(range(10, 34)), (), ())
MAX_TOKENS = 3


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return build_runner(
        RunnerSettings(
            SHAPES, tuple(Stage), block_size=16, dtype="float32", kv_memory_bytes=8 << 20,
            device="cpu",
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def seen() -> Question:
    return next(q for q in questions(per_task=1) if len(q.prepared_images) == 2)


def answers(runner: ModelRunner, seen: Question) -> list[list[int]]:
    """Of text that decodes while images are encoded, and of a prompt with these, in chunks."""
    stepper = Stepper(runner)
    text = stepper.start(TEXT, (), max_tokens=MAX_TOKENS)
    stepper.generate([text], max_tokens=1, chunk=64, eos=None)
    future = runner.encode_async(lambda: runner.encode(seen.prepared_images))
    stepper.generate([text], max_tokens=MAX_TOKENS, chunk=64, eos=None)
    embeddings = runner.encode(seen.prepared_images) if future is None else future.result()
    bytes(runner.export_embedding(embeddings[0]))
    asked = stepper.start(seen, (), max_tokens=MAX_TOKENS, embeddings=embeddings)
    del embeddings, future
    stepper.generate([asked], max_tokens=MAX_TOKENS, chunk=20, eos=None)
    asked.embeddings = []
    gc.collect()
    return [text.answer, asked.answer]


class NeverWaiting(OverlappedStreams):
    def take(self, x: torch.Tensor, made: Any) -> None:
        self._queues.keep(x)


class NeverKeeping(OverlappedStreams):
    def take(self, x: torch.Tensor, made: Any) -> None:
        self._queues.wait(made)


def test_images_beside_steps_change_no_answer_and_race_with_nothing(
    runner: ModelRunner, seen: Question
) -> None:
    runner.streams = SingleStream()
    want = answers(runner, seen)
    queues = WatchedQueues()
    runner.streams = OverlappedStreams(queues)
    assert answers(runner, seen) == want
    assert queues.races == []
    steps, encodes = queues.num_operations[1], queues.num_operations[2]
    assert min(steps, encodes) > 50, "something was computed elsewhere"
    assert queues.priorities == [-1, 0], "steps go first"


@pytest.mark.parametrize(
    ("streams", "said"),
    [
        pytest.param(NeverWaiting, "on 1 beside", id="rows that are not made yet"),
        pytest.param(NeverKeeping, "memory of 2 is read by 1", id="memory that is given away"),
    ],
)
def test_a_hand_over_without_its_parts_is_a_race(
    runner: ModelRunner, seen: Question, streams: type[OverlappedStreams], said: str
) -> None:
    queues = WatchedQueues()
    runner.streams = streams(queues)
    answers(runner, seen)
    assert any(said in race for race in queues.races), "the queues do not notice"


def test_weights_are_there_before_either_stream_begins() -> None:
    queues = WatchedQueues()
    loading = queues.stream(priority=0)
    with queues.on(loading):
        weights = torch.ones(4) * 2
        streams = OverlappedStreams(queues)
    for queue in (streams.steps, streams.images):
        with queue():
            assert weights.sum() == 8
    assert queues.races == []


def test_a_call_beside_steps_has_a_thread_of_its_own_and_tells_what_it_raised() -> None:
    streams = OverlappedStreams(WatchedQueues())
    may_go_on = threading.Event()
    first = streams.encode_async(may_go_on.wait)
    second = streams.encode_async(lambda: 1 // 0)
    assert first is not None
    assert second is not None
    assert not first.done()
    may_go_on.set()
    assert first.result()
    with pytest.raises(ZeroDivisionError):
        second.result()


@pytest.mark.parametrize(
    ("device", "has_encoder", "has_lm"), [("cpu", True, True), ("cuda", True, False)]
)
def test_one_half_and_a_cpu_need_one_stream(device: str, has_encoder: bool, has_lm: bool) -> None:
    streams = streams_for(torch.device(device), has_encoder=has_encoder, has_lm=has_lm)
    assert type(streams) is SingleStream
    assert streams.encode_async(lambda: 1) is None
    assert streams.made() is None
