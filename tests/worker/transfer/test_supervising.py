"""Long-lived tasks never end unnoticed."""

from __future__ import annotations

import asyncio

import pytest

from vlm_worker.transfer.supervising import Supervisor


async def fail() -> None:
    raise KeyError("gone")


async def end() -> None:
    return


async def test_an_error_is_logged_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    supervisor = Supervisor(told.append)
    tasks = [supervisor.start(fail(), name="first"), supervisor.start(fail(), name="second")]
    await asyncio.wait(tasks)
    await asyncio.sleep(0)
    assert supervisor.complaint == "the task 'first' failed: KeyError('gone')"
    assert told == [supervisor.complaint]
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
    await supervisor.close()


@pytest.mark.parametrize("may_end", [False, True])
async def test_a_return_is_a_failure_unless_it_may_end(may_end: bool) -> None:
    supervisor = Supervisor()
    await asyncio.wait([supervisor.start(end(), name="short", may_end=may_end)])
    await asyncio.sleep(0)
    assert (supervisor.complaint is None) == may_end
    await supervisor.close()


async def test_closing_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    supervisor = Supervisor()
    task = supervisor.start(asyncio.Event().wait(), name="eternal")  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await supervisor.close()
    assert task.cancelled()
    assert supervisor.complaint is None
    assert not caplog.records
