"""What a thread receives: all of it, in order, on the loop, and no more in memory than may wait."""

from __future__ import annotations

import asyncio
import threading

from hypothesis import given
from hypothesis import strategies as st
from worker.transfer.fetching import until

from vlm_worker.transfer.consumer import BATCHES_PER_WAKEUP, ReceiveChannel
from vlm_worker.wire.frames import Units


def units(number: int, num_units: int = 1) -> Units:
    return Units(number, num_units, memoryview(b"x"))


async def all_of(come: ReceiveChannel) -> list[tuple[int, int]]:
    return [(one.first_unit, one.num_units) async for one in come.units()]


async def test_all_come_in_order() -> None:
    for most in (1, 2):
        come = ReceiveChannel(max_pending=most)

        def put(come: ReceiveChannel = come) -> None:
            for number in range(500):
                come.put(units(number))
            come.end()

        putting = asyncio.create_task(asyncio.to_thread(put))
        assert [one.first_unit async for one in come.units()] == list(range(500))
        await putting


@given(st.lists(st.integers(1, 3), max_size=40), st.integers(0, 40))
def test_of_units_in_their_place_neighbours_come_as_one(counts: list[int], gap: int) -> None:
    async def taken() -> list[tuple[int, int]]:
        come, next_unit = ReceiveChannel(max_pending=None), 0
        for number, count in enumerate(counts):
            next_unit += number == gap
            come.put(units(next_unit, count))
            next_unit += count
        come.end()
        return await all_of(come)

    before, after = sum(counts[:gap]), sum(counts[gap:])
    runs = [(0, before), (before + 1, after)] if gap else [(1, after)]
    assert asyncio.run(taken()) == [run for run in runs if run[1]]


async def test_the_loop_is_told_with_the_first_run_and_then_with_one_of_many() -> None:
    come, all_runs = ReceiveChannel(max_pending=None), 2 * BATCHES_PER_WAKEUP + 3
    wakes, told = asyncio.Event(), []
    taking = come.units()

    async def follow() -> None:
        async for run in taking:
            told.append((run.first_unit, run.num_units))
            wakes.set()

    following = asyncio.create_task(follow())
    for number in range(all_runs):
        come.put(units(number))
        if number % BATCHES_PER_WAKEUP == 0:
            await wakes.wait()
            wakes.clear()
        else:
            for _ in range(3):
                await asyncio.sleep(0)
            assert not wakes.is_set()
    come.end()
    await following
    rest = all_runs - 1 - 2 * BATCHES_PER_WAKEUP
    assert told == [
        (0, 1),
        (1, BATCHES_PER_WAKEUP),
        (1 + BATCHES_PER_WAKEUP, BATCHES_PER_WAKEUP),
        (all_runs - rest, rest),
    ]


async def test_a_thread_waits_while_too_much_is_not_taken_and_goes_on_when_nobody_takes_it() -> (
    None
):
    come, num_put = ReceiveChannel(max_pending=2), 0

    def put() -> None:
        nonlocal num_put
        for number in range(10):
            come.put(units(number))
            num_put += 1

    thread = threading.Thread(target=put)
    thread.start()
    await until(lambda: num_put == 2)
    taking = come.units()
    assert (await anext(taking)).first_unit == 0
    await until(lambda: num_put == 3)
    assert thread.is_alive()
    come.give_up()
    await asyncio.to_thread(thread.join)
    assert num_put == 10
    await taking.aclose()
