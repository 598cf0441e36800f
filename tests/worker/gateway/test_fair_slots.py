"""Slots that tenants share: nobody waits for another tenant's line, and no slot is lost."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from vlm_worker.gateway.fair_slots import FairSlots
from vlm_worker.gateway.memory import Bound, FullError


def slots(size: int, *, max_waiting: int = 1000, is_shared: bool = True) -> FairSlots:
    return FairSlots(
        size,
        max_waiting=max_waiting,
        bound=Bound.TENANT_FETCHES,
        what="fetches",
        is_shared=lambda: is_shared,
    )


class Holders:
    """Tasks that hold slots until they are released, one at a time."""

    def __init__(self, fair: FairSlots) -> None:
        self.fair = fair
        self.order: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.ends: list[tuple[str, asyncio.Event]] = []

    async def _hold(self, tenant: str) -> None:
        async with self.fair.slot(tenant):
            self.order.append(tenant)
            end = asyncio.Event()
            self.ends.append((tenant, end))
            await end.wait()

    async def arrive(self, *tenants: str) -> None:
        self.tasks += [asyncio.create_task(self._hold(tenant)) for tenant in tenants]
        await self.settle()

    async def release(self, index: int = 0) -> None:
        self.ends.pop(index)[1].set()
        await self.settle()

    @property
    def held(self) -> Counter[str]:
        return Counter(tenant for tenant, _ in self.ends)

    async def settle(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    async def end(self) -> None:
        while self.ends:
            await self.release()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_one_slot_alternates_between_tenants_in_the_order_of_each() -> None:
    holders = Holders(slots(1))
    await holders.arrive(*"aaaa")
    await holders.arrive(*"bb")
    await holders.end()
    assert "".join(holders.order) == "ababaa"


async def test_a_tenant_alone_uses_all_slots_unless_they_are_shared() -> None:
    for is_shared, num_held in ((False, 8), (True, 4)):
        holders = Holders(slots(8, is_shared=is_shared))
        await holders.arrive(*("a" * 20))
        assert holders.held["a"] == num_held
        await holders.end()


async def test_the_tenant_with_the_fewest_slots_is_next() -> None:
    holders = Holders(slots(4))
    await holders.arrive(*"aabbabc")
    assert holders.held == {"a": 2, "b": 2}
    await holders.release()
    assert holders.held == {"a": 1, "b": 2, "c": 1}
    await holders.end()


async def test_one_too_many_is_refused_and_others_are_not() -> None:
    holders = Holders(slots(1, max_waiting=2))
    await holders.arrive(*"aaa")
    with pytest.raises(FullError, match="2 fetches of your requests wait already") as full:
        await holders.fair.take("a")
    assert (full.value.bound, full.value.retry_after_seconds) == (Bound.TENANT_FETCHES, 1.0)
    await holders.arrive("b")
    await holders.end()
    assert "".join(holders.order) == "abaa"


async def test_a_slot_that_comes_with_a_cancellation_goes_on_to_the_next() -> None:
    fair = slots(1)
    await fair.take("a")
    first, second = (asyncio.create_task(fair.take(tenant)) for tenant in "ab")
    await asyncio.sleep(0)
    fair.give("a")
    first.cancel()
    await asyncio.wait([first])
    await asyncio.wait_for(second, 1)
    fair.give("b")
    assert fair.num_free == 1


@pytest.mark.parametrize("seed", range(30))
async def test_no_slot_is_lost_and_no_share_exceeded(seed: int) -> None:
    """Arrivals, ends and cancellations in random order, many in one turn of the loop."""
    choice = random.Random(seed)
    size = choice.randint(1, 6)
    fair, held, tasks = slots(size, max_waiting=5), Counter[str](), list[asyncio.Task[None]]()
    share, refused = max(1, size // 2), 0

    async def work(tenant: str) -> None:
        nonlocal refused
        try:
            async with fair.slot(tenant):
                held[tenant] += 1
                assert held[tenant] <= share
                assert held.total() <= size
                try:
                    for _ in range(choice.randint(0, 4)):
                        await asyncio.sleep(0)
                finally:
                    held[tenant] -= 1
        except FullError:
            refused += 1

    for _ in range(300):
        if choice.random() < 0.6:
            tasks.append(asyncio.create_task(work(choice.choice("aaabc"))))
        elif tasks:
            choice.choice(tasks).cancel()
        if choice.random() < 0.5:
            await asyncio.sleep(0)
    async with asyncio.timeout(10):
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(one) for one in ended} <= {type(None), asyncio.CancelledError}
    assert fair.num_free == size
    assert not any(fair.num_waiting(tenant) for tenant in "abc")
    assert not fair._lines
    assert refused < len(tasks)
