"""Units go on being read while those before them wait for the engine, up to a bound."""

from __future__ import annotations

import asyncio

import pytest

from vlm_worker.errors import GoneError
from vlm_worker.transfer.consumer import WriteWindow
from vlm_worker.wire.frames import Units

UNIT = 8


class Engine:
    """Writes when it is let; `begun` and `written` are unit numbers."""

    def __init__(self) -> None:
        self.between_steps = asyncio.Event()
        self.begun: list[int] = []
        self.written: list[int] = []
        self.refused: set[int] = set()

    async def write(self, units: Units) -> None:
        self.begun.append(units.first_unit)
        await self.between_steps.wait()
        if units.first_unit in self.refused:
            raise GoneError(f"unit {units.first_unit}")
        self.written.append(units.first_unit)


def unit(number: int) -> Units:
    return Units(number, 1, memoryview(bytes(UNIT)))


async def test_all_that_comes_during_a_step_is_written_after_it() -> None:
    engine = Engine()
    async with WriteWindow(engine.write) as window:
        for number in range(5):
            await window.put(unit(number))
        await asyncio.sleep(0)
        assert (engine.begun, engine.written) == ([0, 1, 2, 3, 4], [])
        engine.between_steps.set()
        await window.flush()
    assert engine.written == [0, 1, 2, 3, 4]


async def test_what_waits_is_bounded() -> None:
    engine = Engine()
    async with WriteWindow(engine.write, max_bytes=2 * UNIT) as window:
        await window.put(unit(0))
        await window.put(unit(1))
        third = asyncio.create_task(window.put(unit(2)))
        await asyncio.sleep(0)
        assert not third.done()
        engine.between_steps.set()
        await third
        await window.flush()
    assert sorted(engine.written) == [0, 1, 2]


async def test_a_write_that_fails_is_told_and_nothing_is_left_under_way() -> None:
    engine = Engine()
    engine.refused = {1}
    async with WriteWindow(engine.write) as window:
        for number in range(3):
            await window.put(unit(number))
        engine.between_steps.set()
        with pytest.raises(GoneError, match="unit 1"):
            await window.flush()
    assert len(asyncio.all_tasks()) == 1


async def test_a_transfer_that_breaks_off_gives_up_its_writes() -> None:
    engine = Engine()
    async with WriteWindow(engine.write) as window:
        await window.put(unit(0))
        await asyncio.sleep(0)
    assert (engine.begun, engine.written) == ([0], [])
    assert len(asyncio.all_tasks()) == 1
