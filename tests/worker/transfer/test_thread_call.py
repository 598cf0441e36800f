"""What a loop knows of a thread: its end, whatever became of whoever waits."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from vlm_worker.transfer.thread_call import run_in_thread


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


async def test_a_result_is_there_when_the_thread_has_ended(pool: ThreadPoolExecutor) -> None:
    running = run_in_thread(pool, lambda number: number + 1, 4)
    await running.wait()
    assert running.has_ended
    await running.wait()  # once more costs nothing
    assert running.result() == 5


async def test_an_error_is_raised_as_itself(pool: ThreadPoolExecutor) -> None:
    def fail() -> None:
        raise ConnectionResetError("it was closed")

    running = run_in_thread(pool, fail)
    await running.wait()
    with pytest.raises(ConnectionResetError, match="it was closed"):
        running.result()


async def test_a_cancel_leaves_the_thread_alone(pool: ThreadPoolExecutor) -> None:
    go = threading.Event()
    running = run_in_thread(pool, go.wait)
    waiting = asyncio.create_task(running.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not running.has_ended
    go.set()
    await running.wait()
    assert running.result()


async def test_a_wait_for_the_end_is_not_cancelled_earlier(pool: ThreadPoolExecutor) -> None:
    go = threading.Event()
    running = run_in_thread(pool, go.wait)
    ending = asyncio.create_task(running.end())
    for _ in range(3):
        await asyncio.sleep(0)
        ending.cancel()
    done, _ = await asyncio.wait({ending}, timeout=0.05)
    assert not done
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert running.has_ended


async def test_a_result_that_was_taken_is_not_kept(pool: ThreadPoolExecutor) -> None:
    class Large:
        pass

    running = run_in_thread(pool, Large)
    await running.wait()
    large = weakref.ref(running.result())
    running = run_in_thread(pool, int)  # the pool's thread forgets what it did last
    await running.wait()
    gc.collect()
    assert large() is None
