"""The gate admits a limited number of turns, the least rank first, and loses no place."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_operator.reconcile.gate import Gate


class Holders:
    """Tasks that enter a gate and hold their places until an event of theirs is set."""

    def __init__(self, limit: int) -> None:
        self.gate = Gate(limit)
        self.entered: list[int] = []
        self.inside: dict[int, asyncio.Event] = {}

    def start(self, number: int, rank: float) -> asyncio.Task[None]:
        return asyncio.create_task(self._hold(number, rank))

    async def _hold(self, number: int, rank: float) -> None:
        async with self.gate.entered(rank):
            self.entered.append(number)
            self.inside[number] = asyncio.Event()
            try:
                await self.inside[number].wait()
            finally:
                del self.inside[number]


async def all_wait() -> None:
    """Let every task run until it waits: no task here does I/O."""
    for _ in range(20):
        await asyncio.sleep(0)


WAITERS = st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=12)


@given(limit=st.integers(1, 3), waiters=WAITERS)
def test_the_least_rank_enters_first_and_cancelled_waiters_lose_no_place(
    limit: int, waiters: list[tuple[int, bool]]
):
    async def play() -> None:
        holders = Holders(limit)
        tasks = []
        for number, (rank, _) in enumerate(waiters):
            tasks.append(holders.start(number, rank))
            await all_wait()
        waiting = [number for number in range(len(waiters)) if number >= limit]
        for number in waiting:
            if waiters[number][1]:
                tasks[number].cancel()
        kept = [number for number in waiting if not waiters[number][1]]
        expected = sorted(kept, key=lambda number: (waiters[number][0], number))
        while holders.inside:
            assert len(holders.inside) <= limit
            holders.inside[min(holders.inside)].set()
            await all_wait()
        assert holders.entered == [*range(min(limit, len(waiters))), *expected]
        tasks += [holders.start(100 + number, 0.0) for number in range(limit)]
        await all_wait()
        assert len(holders.inside) == limit, "every place was returned"
        for event in list(holders.inside.values()):
            event.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(play())


async def test_a_waiter_that_is_cancelled_as_it_gets_its_place_returns_it():
    holders = Holders(1)
    first = holders.start(0, 0.0)
    await all_wait()
    second, third = holders.start(1, 0.0), holders.start(2, 1.0)
    await all_wait()
    holders.inside[0].set()
    await asyncio.sleep(0)  # the first one leaves, and its place is given to the second one
    second.cancel()
    await all_wait()
    assert holders.entered[-1] == 2
    holders.inside[2].set()
    await asyncio.gather(first, third)
    with pytest.raises(asyncio.CancelledError):
        await second
