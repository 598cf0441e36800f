"""Images that are encoded beside steps: decode goes on, and a later turn finds them done."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from worker.answers import answer_alone
from worker.engine import talk
from worker.engine.by_hand import ByHand, Encoded, NotingRunner, Stepped
from worker.engine.test_pipeline import prepared_image, prompt, run_out

from vlm_worker.engine.engine import Engine
from vlm_worker.engine.events import ItemFailed, ItemReady
from vlm_worker.testing import ChecksumRunner
from vlm_worker.types import PreparedImage, RequestKey


class Later(Future[Any]):
    """Made when the test says so; whoever would wait for it is told that it must not."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self._call = call

    def finish(self) -> None:
        self.set_result(self._call())

    def result(self, timeout: float | None = None) -> Any:
        assert self.done(), "the engine waited for the encoder"
        return super().result(timeout)


class BesideRunner(NotingRunner):
    """Encodes beside steps; image calls are done after as many turns as `delays` says."""

    def __init__(self, delays: Sequence[int] = ()) -> None:
        super().__init__(num_blocks=65)
        self.begun: list[Later] = []
        self._delays = itertools.chain(delays, itertools.repeat(1 << 30))
        self._turns_left = 0

    def encode_async(self, call: Callable[[], Any]) -> Any:  # type: ignore[override]
        assert all(later.done() for later in self.begun), "one call at a time"
        self._turns_left = next(self._delays)
        self.begun.append(Later(call))
        return self.begun[-1]

    def tick(self) -> None:
        self._turns_left -= 1
        if self._turns_left < 0:
            self.end()

    def end(self) -> bool:
        """End the call that is under way; whether there was one."""
        if not self.begun or self.begun[-1].done():
            return False
        self.begun[-1].finish()
        return True


def decoding(runner: BesideRunner, *, max_tokens: int = 20) -> ByHand:
    """An engine that answers a prompt of text."""
    engine = ByHand(runner=runner)
    engine.submit(prompt("text", [], max_tokens=max_tokens))
    engine.turn()
    return engine


def test_tokens_go_on_while_an_image_is_encoded_and_it_is_ready_a_turn_later() -> None:
    runner = BesideRunner()
    engine = decoding(runner)
    engine.encode("a", [prepared_image(0)])
    for _ in range(5):
        assert engine.turn()
    assert engine.calls == [Stepped(0, frozenset()), *[Stepped(1, frozenset())] * 5]
    assert not engine.told["a"]
    runner.begun[0].finish()
    engine.turn()
    assert [type(event) for event in engine.told["a"]] == [ItemReady]
    run_out(engine)
    engine.state.cancel(RequestKey("a", 0))


def test_the_next_images_begin_in_the_turn_in_which_the_last_ones_ended() -> None:
    runner = BesideRunner()
    engine = decoding(runner)
    engine.encode("a", [prepared_image(0)])
    engine.turn()
    engine.encode("b", [prepared_image(1)])
    engine.turn()
    assert len(runner.begun) == 1
    runner.begun[0].finish()
    engine.turn()
    assert len(runner.begun) == 2
    assert engine.told["a"]
    run_out(engine)
    for name in "ab":
        engine.state.cancel(RequestKey(name, 0))


class Encoder(ChecksumRunner):
    """Encodes in a thread of its own, where it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_encode = threading.Event()

    def encode(self, images: Sequence[PreparedImage]) -> list[Any]:
        self.may_encode.wait()
        return super().encode(images)

    def encode_async(self, call: Callable[[], Any]) -> Any:  # type: ignore[override]
        future: Future[Any] = Future()
        threading.Thread(target=lambda: future.set_result(call())).start()
        return future


async def test_what_comes_while_images_are_encoded_does_not_wait_for_them(
    start: Any, until: Any
) -> None:
    runner = Encoder()
    engine: Engine = start(runner)
    encoding = engine.encode(RequestKey("a", 0), [prepared_image(0)])
    try:
        told = await talk.events(engine.submit_prefill(talk.text(), for_peer=False))
        assert talk.tokens(told) == answer_alone(talk.text())
        await engine.cancel(RequestKey("unknown", 0))
    finally:
        runner.may_encode.set()
    assert [type(event) async for event in encoding] == [ItemReady]  # though all is at rest
    await engine.cancel(RequestKey("a", 0))


async def test_an_encoder_that_is_stuck_beside_steps_makes_the_engine_unhealthy(
    start: Any, until: Any
) -> None:
    runner, now = Encoder(), [0.0]
    engine: Engine = start(runner, clock=lambda: now[0])
    encoding = engine.encode(RequestKey("a", 0), [prepared_image(0)])
    await talk.events(engine.submit_prefill(talk.text(), for_peer=False))
    assert engine.healthy
    now[0] += 61.0
    assert not engine.healthy
    runner.may_encode.set()
    assert [type(event) async for event in encoding] == [ItemReady]
    await until(lambda: engine.healthy)
    await engine.cancel(RequestKey("a", 0))


async def test_an_engine_that_stops_waits_for_no_images(start: Any) -> None:
    runner = Encoder()
    engine: Engine = start(runner)
    encoding = engine.encode(RequestKey("a", 0), [prepared_image(0)])
    await talk.events(engine.submit_prefill(talk.text(), for_peer=False))
    await engine.stop()
    assert [type(event) async for event in encoding] == [ItemFailed]
    runner.may_encode.set()


def test_an_image_without_waiting_requests_is_cached() -> None:
    runner = BesideRunner()
    engine = decoding(runner)
    engine.encode("a", [prepared_image(0)])
    engine.turn()
    engine.state.cancel(RequestKey("a", 0))
    runner.begun[0].finish()
    engine.turn()
    assert not any(isinstance(event, ItemReady) for event in engine.told["a"])
    engine.encode("b", [prepared_image(0)])
    engine.turn()
    (event,) = engine.told["b"]
    assert isinstance(event, ItemReady)
    assert event.cache_hit
    run_out(engine)
    engine.state.cancel(RequestKey("b", 0))


def test_a_crash_beside_steps_fails_its_image_alone() -> None:
    runner = BesideRunner(delays=[2])
    bad = prepared_image(1)
    runner.faults.crash_images.add(bad.image_key)
    engine = decoding(runner)
    engine.encode("a", [prepared_image(0), bad])
    while engine.turn():
        runner.tick()
    assert sorted(type(event).__name__ for event in engine.told["a"]) == [
        ItemFailed.__name__,
        ItemReady.__name__,
    ]
    assert engine.tokens("text") == answer_alone(prompt("text", [], max_tokens=20))
    engine.state.cancel(RequestKey("a", 0))


@given(
    delays=st.lists(st.integers(0, 6), max_size=8),
    asked=st.lists(st.lists(st.integers(0, 5), max_size=3, unique=True), min_size=1, max_size=4),
    budget=st.sampled_from([5, 10, 64]),
)
def test_answers_do_not_depend_on_when_images_end(
    delays: list[int], asked: list[list[int]], budget: int
) -> None:
    runner = BesideRunner(delays)
    engine = ByHand(runner=runner, max_encode_tokens=budget)
    requests = {}
    for number, numbers in enumerate(asked):
        name, images = f"r{number}", [prepared_image(n) for n in numbers]
        engine.encode(name, images)
        requests[name] = prompt(name, images, first=1 + number), images
        engine.submit(*requests[name])
        engine.turn()
        runner.tick()
    while engine.turn() or runner.end():
        runner.tick()
        engine.answer()
    for name, (request, images) in requests.items():
        assert engine.tokens(name) == answer_alone(request, images)
        engine.state.cancel(request.key)
    made = [key for call in engine.calls if isinstance(call, Encoded) for key in call.images]
    assert len(made) == len(set(made)), "an image was encoded twice"
    assert not engine.turn()
    assert engine.state.violations() == []
