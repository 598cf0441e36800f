"""Long work leaves the loop to others, turn by turn."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from vlm_worker.gateway.turns import Steps, Turns, at_once


class Clock:
    """Moves on by a fixed time at every look."""

    def __init__(self, step: float) -> None:
        self.now = 0.0
        self._step = step

    def __call__(self) -> float:
        self.now += self._step
        return self.now


def counting(seen: list[str], name: str, count: int) -> Steps[int]:
    for _ in range(count):
        seen.append(name)
        yield
    return count


@pytest.mark.parametrize("step_seconds", [0.00001, 0.0003, 1.0])
async def test_the_result_is_that_of_the_whole_whatever_a_step_takes(step_seconds: float) -> None:
    seen: list[str] = []
    assert await Turns(Clock(step_seconds)).run(counting(seen, "a", 50)) == 50
    assert at_once(counting(seen, "a", 50)) == 50
    assert len(seen) == 100


async def test_what_others_do_comes_between_any_two_turns() -> None:
    seen: list[str] = []

    async def other() -> None:
        while True:
            seen.append("other")
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await Turns(Clock(1.0)).run(counting(seen, "work", 20))
    task.cancel()
    places = [i for i, name in enumerate(seen) if name == "work"]
    assert all(second - first > 1 for first, second in itertools.pairwise(places))


async def test_two_long_works_share_the_turns() -> None:
    seen: list[str] = []
    turns = Turns(Clock(1.0))
    await asyncio.gather(
        turns.run(counting(seen, "a", 20)),
        turns.run(counting(seen, "b", 20)),
    )
    assert seen == ["a", "b"] * 20


async def test_an_error_of_the_work_is_raised_to_its_caller_and_stops_no_other() -> None:
    def failing() -> Steps[None]:
        yield
        raise ValueError("no")

    turns = Turns(Clock(1.0))
    with pytest.raises(ValueError, match="no"):
        await turns.run(failing())
    assert await turns.run(counting([], "a", 3)) == 3
