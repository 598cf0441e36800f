"""What is sent within a deadline behaves as under `asyncio.timeout`, also if it never waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from vlm_worker.gateway.request_guard import within

Work = Callable[[asyncio.Future[int], list[str]], Coroutine[Any, Any, None]]


async def at_once(_: asyncio.Future[int], seen: list[str]) -> None:
    seen.append("done")


async def waits(gate: asyncio.Future[int], seen: list[str]) -> None:
    try:
        seen.append(f"got {await gate}")
        await asyncio.sleep(0)
        seen.append("done")
    except BaseException as error:
        seen.append(type(error).__name__)
        raise


@pytest.mark.parametrize("work", [at_once, waits])
async def test_work_that_ends_in_time_returns(work: Work) -> None:
    gate, seen = asyncio.get_running_loop().create_future(), list[str]()
    asyncio.get_running_loop().call_soon(gate.set_result, 7)
    await within(60.0, work(gate, seen))
    assert seen[-1] == "done"


async def test_the_error_of_what_it_waits_for_reaches_the_work_and_its_caller() -> None:
    gate, seen = asyncio.get_running_loop().create_future(), list[str]()
    asyncio.get_running_loop().call_soon(gate.set_exception, OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        await within(60.0, waits(gate, seen))
    assert seen == ["OSError"]


async def test_an_error_before_the_first_wait_reaches_the_caller() -> None:
    async def fails() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        await within(60.0, fails())


async def test_the_deadline_cancels_the_work() -> None:
    gate, seen = asyncio.get_running_loop().create_future(), list[str]()
    with pytest.raises(TimeoutError):
        await within(0.0, waits(gate, seen))
    assert seen == ["CancelledError"]


async def test_a_cancelled_caller_cancels_the_work() -> None:
    gate, seen = asyncio.get_running_loop().create_future(), list[str]()
    task = asyncio.create_task(within(60.0, waits(gate, seen)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == ["CancelledError"]
