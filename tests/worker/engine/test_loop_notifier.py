"""Calls into the loop by a thread that goes on."""

from __future__ import annotations

import asyncio
import collections
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from vlm_worker.engine.events import LoopNotifier


async def by_thread(work: Callable[[], None]) -> None:
    """Have a thread do something, the loop free meanwhile."""
    await asyncio.get_running_loop().run_in_executor(None, work)


async def opened() -> LoopNotifier:
    calls = LoopNotifier()
    calls.open(asyncio.get_running_loop())
    return calls


async def test_calls_are_made_on_the_loop_in_their_order() -> None:
    calls, made = await opened(), []
    done = asyncio.Event()

    def note(number: int) -> None:
        made.append((number, threading.current_thread() is threading.main_thread()))

    def work() -> None:
        for number in range(100):
            calls.call(functools.partial(note, number))
        calls.call(done.set)

    await by_thread(work)
    await done.wait()
    calls.close()
    assert made == [(number, True) for number in range(100)]


@pytest.fixture
def no_turns() -> Iterator[None]:
    """A thread has the interpreter until it lets go of it, however slow the machine is."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("no_turns")
async def test_a_thread_that_calls_keeps_the_interpreter() -> None:
    calls, made, too_early = await opened(), [], []
    turn = threading.Semaphore(0)

    def note(number: int) -> None:
        made.append(number)
        turn.release()

    def work() -> None:
        for number in range(500):
            calls.call(functools.partial(note, number))
            too_early.extend(made[number:])
            turn.acquire()  # here the loop runs

    await by_thread(work)
    calls.close()
    assert made == list(range(500))
    assert not too_early


async def test_a_call_that_raises_does_not_stop_other_calls() -> None:
    calls, made, errors = await opened(), [], []
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))

    def fail() -> None:
        raise ValueError("told to")

    def work() -> None:
        for callback in (fail, lambda: made.append(1), done.set):
            calls.call(callback)

    await by_thread(work)
    await done.wait()
    calls.close()
    assert made == [1]
    assert [str(error) for error in errors] == ["told to"]


def test_no_call_is_made_on_a_closed_loop() -> None:
    loop, calls = asyncio.new_event_loop(), LoopNotifier()
    calls.open(loop)
    loop.close()
    with pytest.raises(RuntimeError, match="closed"):
        calls.call(lambda: None)


async def test_no_call_writes_to_a_descriptor_that_was_closed_meanwhile() -> None:
    """The loop may end it between a call's two halves; its number is another file's by then."""
    calls = await opened()

    class Interrupted(collections.deque):  # type: ignore[type-arg]
        def append(self, call: object) -> None:
            super().append(call)
            closing.start()
            closing.join(timeout=0.2)  # without a lock it is closed by now
            os.fstat(fd)

    closing = threading.Thread(target=calls.close)
    fd = calls._fd
    calls._calls = Interrupted()
    calls.call(lambda: None)
    closing.join()
    assert calls._fd == -1
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)
    with pytest.raises(RuntimeError, match="no more calls"):
        calls.call(lambda: None)
