"""What a thread receives: all of it, in order, on the loop, and no more in memory than may wait."""

from __future__ import annotations

import asyncio
import threading

from worker.transfer.fetching import until

from vlm_worker.transfer.come import Come
from vlm_worker.wire.frames import Units


def units(number: int) -> Units:
    return Units(number, 1, memoryview(b"x"))


async def test_all_come_in_order() -> None:
    for most in (None, 1, 2):
        come = Come(most=most)

        def put(come: Come = come) -> None:
            for number in range(500):
                come.put(units(number))
            come.end()

        putting = asyncio.create_task(asyncio.to_thread(put))
        assert [one.first_unit async for one in come.units()] == list(range(500))
        await putting


async def test_a_thread_waits_while_too_much_is_not_taken_and_goes_on_when_nobody_takes_it() -> (
    None
):
    come, num_put = Come(most=2), 0

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
