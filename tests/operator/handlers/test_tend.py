"""The daemon: one turn at a time, woken by events, never ended by an error."""

import asyncio
from collections.abc import Callable
from typing import Any

import kopf
import pytest

from vlm_operator.errors import ConflictError, LeaseLostError, UnavailableError
from vlm_operator.framework import Backoffs, configure
from vlm_operator.handlers import App, changed, register, run_worker
from vlm_operator.sight import Sight

REASONS = kopf.DaemonStoppingReason


class Stopped:
    """kopf's flag, set by hand."""

    def __init__(self) -> None:
        self.reason: Any = REASONS(0)
        self._event = asyncio.Event()

    def __bool__(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()

    def set(self, reason: Any) -> None:
        self.reason |= reason
        self._event.set()


class FakeLoop:
    """Counts turns; `outcomes` are what they return or raise, the last one for ever."""

    def __init__(self, *outcomes: Any, drains: list[float | None] | None = None) -> None:
        self.outcomes = list(outcomes)
        self.drains = drains or [None]
        self.turns: list[bool] = []
        self.drained = 0
        self.running = 0
        self.most = 0

    async def turn(self, *, woken: bool) -> float:
        self.turns.append(woken)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, BaseException):
            raise outcome
        return float(outcome)

    async def drain(self) -> float | None:
        self.drained += 1
        return self.drains.pop(0) if len(self.drains) > 1 else self.drains[0]


class Memo(kopf.Memo):
    """What kopf hands to all handlers of one object."""

    def __init__(self, loop: FakeLoop) -> None:
        self.app = App(
            make_reconciler=lambda *_: loop,
            connect=lambda: None,
            clock=lambda: 0.0,
            sight=Sight(lambda: 0.0),
        )


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def start(loop: FakeLoop):
    memo, stopped = Memo(loop), Stopped()
    task = asyncio.create_task(run_worker(memo=memo, namespace="ns", name="demo", stopped=stopped))
    await until(lambda: loop.turns)
    return memo, stopped, task


async def test_an_event_of_a_child_wakes_the_loop_of_its_service():
    loop = FakeLoop(60.0)
    memo, stopped, task = await start(loop)
    memo.app.wake("ns", "demo")
    await until(lambda: len(loop.turns) == 2)
    memo.app.wake("ns", "other")
    await asyncio.sleep(0.1)
    assert loop.turns == [True, True]
    stopped.set(REASONS.OPERATOR_EXITING)
    await task


async def test_news_of_a_service_that_nobody_looks_after_is_not_kept():
    """Children go after their service, and each tells of its end."""
    memo, stopped, task = await start(FakeLoop(60.0))
    stopped.set(REASONS.RESOURCE_DELETED)
    await task
    memo.app.wake("ns", "demo")
    assert memo.app._wakes == {}


async def test_without_an_event_the_next_turn_comes_when_it_is_due():
    loop = FakeLoop(0.01, 60.0)
    _, stopped, task = await start(loop)
    await until(lambda: len(loop.turns) == 2)
    assert loop.turns == [True, False]
    stopped.set(REASONS.OPERATOR_EXITING)
    await task


async def test_a_burst_of_events_is_one_turn_and_turns_never_overlap():
    loop = FakeLoop(60.0)
    memo, stopped, task = await start(loop)
    for _ in range(50):
        memo.app.wake("ns", "demo")
    await until(lambda: len(loop.turns) == 2)
    await asyncio.sleep(0.15)
    assert len(loop.turns) == 2
    assert loop.most == 1
    stopped.set(REASONS.OPERATOR_EXITING)
    await task


@pytest.mark.parametrize(
    "error",
    [
        UnavailableError(503, "ServiceUnavailable", "later"),
        ConflictError(409, "Conflict", "changed"),
        RuntimeError("a defect"),
    ],
    ids=["unavailable", "conflict", "defect"],
)
async def test_an_error_is_followed_by_another_full_turn(error: Exception):
    loop = FakeLoop(error, 60.0)
    memo, stopped, task = await start(loop)
    await until(lambda: len(loop.turns) == 2)
    assert loop.turns == [True, True]
    await until(lambda: memo.app.turning == {})
    stopped.set(REASONS.OPERATOR_EXITING)
    await task


async def test_a_turn_that_may_not_write_is_taken_again_when_everybody_is_woken():
    loop = FakeLoop(LeaseLostError("gone"), LeaseLostError("gone"), LeaseLostError("gone"), 60.0)
    memo, stopped, task = await start(loop)
    while len(loop.turns) < 4:
        turns = len(loop.turns)
        memo.app.wake_all()
        await until(lambda turns=turns: len(loop.turns) > turns)
    assert loop.turns == [True] * 4
    stopped.set(REASONS.OPERATOR_EXITING)
    await task


def test_kopf_starts_a_loop_that_crashed_after_a_second():
    registry = kopf.OperatorRegistry()
    register(registry)
    assert [one.backoff for one in registry._spawning.get_all_handlers()] == [1.0]


async def test_a_deleted_service_is_drained_before_the_daemon_returns():
    loop = FakeLoop(60.0, drains=[0.01, 0.01, None])
    _, stopped, task = await start(loop)
    stopped.set(REASONS.RESOURCE_DELETED)
    await asyncio.wait_for(task, 60)
    assert loop.drained == 3


async def test_an_ending_operator_drains_nothing():
    loop = FakeLoop(60.0)
    _, stopped, task = await start(loop)
    stopped.set(REASONS.OPERATOR_EXITING)
    await asyncio.wait_for(task, 60)
    assert loop.drained == 0


async def test_an_operator_that_ends_in_a_drain_leaves_it_to_the_next():
    loop = FakeLoop(60.0, drains=[0.01])
    _, stopped, task = await start(loop)
    stopped.set(REASONS.RESOURCE_DELETED)
    await until(lambda: loop.drained >= 2)
    stopped.set(REASONS.OPERATOR_EXITING)
    await asyncio.wait_for(task, 60)


META = {"uid": "u", "generation": 1}
DELETED = {**META, "deletionTimestamp": "2026-01-01T00:00:00Z"}


async def test_a_service_first_seen_while_it_is_deleted_is_drained_before_the_handler_returns():
    loop = FakeLoop(60.0, drains=[0.01, 0.01, None])
    event = changed(memo=Memo(loop), meta=DELETED, namespace="ns", name="demo")
    await asyncio.wait_for(event, 60)
    assert loop.drained == 3
    assert loop.turns == []


async def test_an_operator_that_ends_cuts_such_a_drain_off():
    loop = FakeLoop(60.0, drains=[0.01])
    event = changed(memo=Memo(loop), meta=DELETED, namespace="ns", name="demo")
    task = asyncio.create_task(event)
    await until(lambda: loop.drained >= 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_service_with_a_daemon_is_drained_by_that_alone():
    loop = FakeLoop(60.0)
    memo = Memo(loop)
    wakeup = memo.app.wakeup("ns", "demo")  # the daemon's
    await changed(memo=memo, meta=META, namespace="ns", name="demo")
    wakeup.clear()
    await changed(memo=memo, meta=DELETED, namespace="ns", name="demo")
    assert loop.drained == 0
    assert wakeup.is_set()


WAKING = {
    "another spec": {"generation": 2},
    "another object of the name": {"uid": "other"},
    "a finalizer": {"finalizers": ["triptych.dev/drain"]},
    "a restart that was asked for": {"annotations": {"triptych.dev/restarted-at": "now"}},
    "a turn that was asked for": {"annotations": {"triptych.dev/reconcile-at": "now"}},
}


@pytest.mark.parametrize("change", WAKING.values(), ids=WAKING)
async def test_a_change_that_a_turn_reads_wakes_the_loop(change: dict):
    memo = Memo(FakeLoop(60.0))
    wakeup = memo.app.wakeup("ns", "demo")
    await changed(memo=memo, meta=META, namespace="ns", name="demo")
    wakeup.clear()
    await changed(memo=memo, meta={**META, **change}, namespace="ns", name="demo")
    assert wakeup.is_set()


QUIET = {
    "a status write": {"resourceVersion": "2", "managedFields": [{"manager": "triptych-status"}]},
    "a label": {"labels": {"team": "vision"}},
    "a note of somebody else": {"annotations": {"note": "1"}},
}


@pytest.mark.parametrize("change", QUIET.values(), ids=QUIET)
async def test_the_event_of_a_status_write_starts_no_turn(change: dict):
    memo = Memo(FakeLoop(60.0))
    wakeup = memo.app.wakeup("ns", "demo")
    await changed(memo=memo, meta=META, namespace="ns", name="demo")
    wakeup.clear()
    await changed(memo=memo, meta={**META, **change}, namespace="ns", name="demo")
    assert not wakeup.is_set()


async def test_kopf_is_set_up_as_the_design_asks():
    settings = kopf.OperatorSettings()
    await configure(settings=settings, memo=Memo(FakeLoop()))
    assert settings.persistence.finalizer == "triptych.dev/drain"
    assert settings.posting.enabled is False
    assert settings.scanning.disabled is True
    assert settings.peering.standalone is True
    assert settings.background.cancellation_polling == 1
    pauses = [pause for pause, _ in zip(Backoffs(), range(50), strict=False)]
    assert len(pauses) == 50
    assert max(pauses) < 20
