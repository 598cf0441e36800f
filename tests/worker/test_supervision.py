"""Long-lived tasks never end unnoticed; some are started again, the end of others is told."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.supervision import (
    MAX_DELAY_SECONDS,
    MAX_FAILURES,
    STEADY_SECONDS,
    AtEnd,
    Failures,
    Supervisor,
)


@given(st.lists(st.floats(0, 200), min_size=1, max_size=30))
def test_delays_grow_in_a_row_and_a_steady_run_ends_the_row(runs: list[float]) -> None:
    failures, in_a_row = Failures(), 0
    for seconds in runs:
        before = failures
        failures = failures.after(seconds)
        in_a_row = 1 if seconds >= STEADY_SECONDS else in_a_row + 1
        assert failures.too_many == (in_a_row >= MAX_FAILURES)
        assert 0 < failures.delay_seconds <= MAX_DELAY_SECONDS
        if in_a_row > 1:
            assert failures.delay_seconds >= before.delay_seconds


@dataclasses.dataclass
class Failing:
    """A task that fails, or ends, some times; then it runs."""

    times: int
    ends: bool = False
    error: BaseException = dataclasses.field(default_factory=lambda: KeyError("a defect"))
    num_runs: int = 0
    running: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    async def __call__(self) -> None:
        self.num_runs += 1
        if self.num_runs <= self.times:
            if self.ends:
                return
            raise self.error
        self.running.set()
        await asyncio.get_running_loop().create_future()


class Time:
    """Passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        await asyncio.sleep(0)


@pytest.mark.parametrize("ends", [False, True])
async def test_a_task_that_ends_is_logged_and_started_again(
    ends: bool, caplog: pytest.LogCaptureFixture
) -> None:
    time, task = Time(), Failing(3, ends)
    supervisor = Supervisor(clock=time, sleep=time.sleep)
    supervisor.start(task, name="watch", at_end=AtEnd.RESTART)
    async with asyncio.timeout(30):
        await task.running.wait()
    assert [record.task for record in caplog.records] == ["watch"] * 3  # type: ignore[attr-defined]
    assert all(record.levelno == logging.ERROR for record in caplog.records)
    assert supervisor.unhealthy_reason is None
    await supervisor.close()


async def test_it_complains_of_a_task_that_fails_again_and_again_until_it_runs() -> None:
    time, task = Time(), Failing(MAX_FAILURES)
    told: list[str] = []
    supervisor = Supervisor(told.append, clock=time, sleep=time.sleep)
    supervisor.start(task, name="watch", at_end=AtEnd.RESTART)
    async with asyncio.timeout(30):
        await task.running.wait()
    assert supervisor.unhealthy_reason == "the task 'watch' fails again and again"
    time.now += STEADY_SECONDS
    assert supervisor.unhealthy_reason is None
    assert not told, "nobody ends the process for a task that is started again"
    await supervisor.close()


@pytest.mark.parametrize("at_end", [AtEnd.FAIL, AtEnd.RETURN])
async def test_an_error_of_a_task_that_cannot_begin_anew_is_logged_and_told_once(
    at_end: AtEnd, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    supervisor = Supervisor(told.append)
    await asyncio.wait(
        [supervisor.start(Failing(1), name=name, at_end=at_end) for name in ("first", "second")]
    )
    assert supervisor.unhealthy_reason == "the task 'first' failed: KeyError('a defect')"
    assert told == [supervisor.unhealthy_reason]
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
    await supervisor.close()


@pytest.mark.parametrize("at_end", [AtEnd.FAIL, AtEnd.RETURN])
async def test_a_return_is_a_failure_unless_the_task_may_return(at_end: AtEnd) -> None:
    supervisor = Supervisor()
    await asyncio.wait([supervisor.start(Failing(1, ends=True), name="short", at_end=at_end)])
    assert (supervisor.unhealthy_reason is None) == (at_end is AtEnd.RETURN)
    await supervisor.close()


async def test_an_unrequested_cancellation_is_a_failure() -> None:
    """grpc raises CancelledError where the other side cancels a call."""
    supervisor, task = Supervisor(), Failing(1, error=asyncio.CancelledError())
    await asyncio.wait([supervisor.start(task, name="watch", at_end=AtEnd.FAIL)])
    assert supervisor.unhealthy_reason is not None
    await supervisor.close()


@pytest.mark.parametrize("at_end", AtEnd)
async def test_closing_is_no_failure(at_end: AtEnd, caplog: pytest.LogCaptureFixture) -> None:
    supervisor = Supervisor()
    task = supervisor.start(asyncio.Event().wait, name="eternal", at_end=at_end)  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await supervisor.close()
    assert task.cancelled()
    assert supervisor.unhealthy_reason is None
    assert not caplog.records
