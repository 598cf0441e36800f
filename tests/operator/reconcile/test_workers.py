"""Turns on the event loop: one at a time for each service, never ended by an error."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from support.fakes import Clock
from vlm_operator.errors import ConflictError, LeaseLostError, UnavailableError
from vlm_operator.reconcile import workers as module
from vlm_operator.reconcile.queue import Cause, Outcome
from vlm_operator.reconcile.workers import Workers

KEY, OTHER = ("ns", "demo"), ("ns", "other")
LATER = Outcome(again={Cause.TICK: 60.0})
PATIENCE_SECONDS = 60.0


class Turns:
    """The reconciler of one service: notes turns, and ends them with `outcomes`, then `LATER`."""

    def __init__(self, *outcomes: Outcome | Exception) -> None:
        self.outcomes = list(outcomes)
        self.turns: list[bool] = []  # whether something was known to have changed
        self.running = 0
        self.most = 0
        self.open = asyncio.Event()
        self.open.set()

    async def turn(self, *, woken: bool, rank: float) -> Outcome:
        self.turns.append(woken)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.open.wait()
        finally:
            self.running -= 1
        outcome = self.outcomes.pop(0) if self.outcomes else LATER
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


class Loops:
    """Workers over reconcilers that tests can see."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.made: list[tuple[str, str]] = []
        self.of: dict[tuple[str, str], Turns] = {}
        clock = clock or asyncio.get_running_loop().time
        self.workers = Workers(self._make, clock=clock)  # type: ignore[arg-type]

    def _make(self, namespace: str, name: str) -> Turns:
        self.made.append((namespace, name))
        return self.of.setdefault((namespace, name), Turns())


@contextlib.asynccontextmanager
async def running(loops: Loops) -> AsyncIterator[Loops]:
    task = asyncio.create_task(loops.workers.run())
    try:
        yield loops
    finally:
        task.cancel()
        await loops.workers.finish(0.0)


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UNAVAILABLE", "CONFLICT", "CRASH"):
        monkeypatch.setattr(module, name, module.Backoff(longest=0.01, first=0.01))


async def test_a_burst_of_events_is_one_turn():
    async with running(Loops()) as loops:
        for _ in range(50):
            loops.workers.add(KEY, Cause.SPEC)
        await until(lambda: KEY in loops.of and loops.of[KEY].turns)
        loops.workers.add(OTHER, Cause.SPEC)
        await until(lambda: OTHER in loops.of and loops.of[OTHER].turns)
        assert loops.of[KEY].turns == [True]


async def test_a_cause_in_a_turn_starts_another_one_after_it():
    loops = Loops()
    turns = loops.of[KEY] = Turns()
    turns.open.clear()
    async with running(loops):
        loops.workers.add(KEY, Cause.SPEC)
        await until(lambda: turns.turns)
        loops.workers.add(KEY, Cause.POD)
        loops.workers.add(OTHER, Cause.SPEC)
        await until(lambda: OTHER in loops.of and loops.of[OTHER].turns)
        assert len(turns.turns) == 1
        turns.open.set()
        await until(lambda: len(turns.turns) == 2)
        assert turns.most == 1


async def test_a_timer_starts_a_turn_for_which_nothing_is_known_to_have_changed():
    loops = Loops()
    turns = loops.of[KEY] = Turns(Outcome(again={Cause.TICK: 0.01}))
    async with running(loops):
        loops.workers.add(KEY, Cause.SPEC)
        await until(lambda: len(turns.turns) == 2)
        assert turns.turns == [True, False]


ERRORS = {
    "unavailable": UnavailableError(503, "ServiceUnavailable", "later"),
    "conflict": ConflictError(409, "Conflict", "changed"),
    "not leading": LeaseLostError("gone"),
    "defect": RuntimeError("a defect"),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
async def test_an_error_is_followed_by_another_full_turn(error: Exception):
    loops = Loops()
    turns = loops.of[KEY] = Turns(error, error)
    async with running(loops):
        loops.workers.add(KEY, Cause.SPEC)
        await until(lambda: len(turns.turns) == 3)
        assert turns.turns == [True] * 3
        assert loops.made == [KEY], "its memory stays"


async def test_events_of_children_start_turns_of_known_services_only():
    """Children end after their service, and each reports its end."""
    loops = Loops()
    loops.of[KEY] = Turns(LATER, Outcome(gone=True))
    async with running(loops):
        loops.workers.notify(KEY, Cause.CHILD)
        loops.workers.add(KEY, Cause.SPEC)
        await until(lambda: loops.of[KEY].turns == [True])
        loops.workers.notify(KEY, Cause.CHILD)
        await until(lambda: loops.of[KEY].turns == [True, True])
        loops.workers.notify(KEY, Cause.CHILD)
        loops.workers.add(OTHER, Cause.SPEC)
        await until(lambda: OTHER in loops.of and loops.of[OTHER].turns)
        assert len(loops.of[KEY].turns) == 2


async def test_a_service_that_is_made_again_has_another_reconciler():
    loops = Loops()
    loops.of[KEY] = Turns(Outcome(gone=True))
    async with running(loops):
        loops.workers.add(KEY, Cause.SPEC)
        await until(lambda: loops.of[KEY].turns)
        loops.workers.add(KEY, Cause.SPEC)
        await until(lambda: len(loops.of[KEY].turns) == 2)
        assert loops.made == [KEY, KEY]


async def test_all_services_get_a_turn_once_writes_are_allowed_again():
    async with running(Loops()) as loops:
        for key in (KEY, OTHER):
            loops.workers.add(key, Cause.SPEC)
        await until(lambda: len(loops.of) == 2 and all(one.turns for one in loops.of.values()))
        loops.workers.notify_all(Cause.LEADER, spread=lambda: 0.01)
        await until(lambda: all(len(one.turns) == 2 for one in loops.of.values()))


async def test_many_slow_services_do_not_exceed_the_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "LIMIT", 3)
    loops = Loops()
    turns = Turns()
    turns.open.clear()
    keys = [("ns", str(number)) for number in range(9)]
    loops.of.update(dict.fromkeys(keys, turns))
    async with running(loops):
        for key in keys:
            loops.workers.add(key, Cause.SPEC)
        await until(lambda: turns.running == 3)
        turns.open.set()
        await until(lambda: len(turns.turns) == 9)
        assert turns.most == 3


async def test_the_end_waits_for_running_turns_and_tells_whether_one_was_cut_off():
    loops = Loops()
    turns = loops.of[KEY] = Turns()
    turns.open.clear()
    task = asyncio.create_task(loops.workers.run())
    loops.workers.add(KEY, Cause.SPEC)
    await until(lambda: turns.running)
    task.cancel()
    assert await loops.workers.finish(0.0) is False
    await until(lambda: not turns.running)
    assert await loops.workers.finish(0.0) is True


async def test_health_names_a_turn_that_is_stuck():
    clock = Clock()
    loops = Loops(clock)
    turns = loops.of[KEY] = Turns()
    turns.open.clear()
    async with running(loops):
        loops.workers.add(KEY, Cause.SPEC, after=0.0)
        await until(lambda: turns.running)
        clock.now += 119
        assert loops.workers.problem() == ""
        clock.now += 2
        assert loops.workers.problem() == "a turn has taken 121 s"
