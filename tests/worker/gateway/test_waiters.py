"""A change of the pods wakes those whom it helps, in their order, and asks hardly anybody else."""

from __future__ import annotations

import asyncio
import dataclasses

from worker.gateway.stack import COLOCATED, stack

from vlm_worker.gateway.waiters import Waiters


@dataclasses.dataclass
class Pods:
    """Free places, which those who are woken take."""

    free: int = 0
    num_asked: int = 0

    def has_capacity(self) -> bool:
        self.num_asked += 1
        return self.free > 0


async def asleep(waiters: Waiters, tasks: list[asyncio.Task[int]]) -> None:
    async with asyncio.timeout(30):
        while sum(map(len, waiters._groups.values())) < sum(not t.done() for t in tasks):  # noqa: ASYNC110
            await asyncio.sleep(0)


async def woken(waiters: Waiters) -> None:
    """The wake-ups of the last change are over."""
    assert waiters._waking is not None
    async with asyncio.timeout(30):
        await waiters._waking


async def test_as_many_are_woken_as_find_room_in_the_order_in_which_they_came() -> None:
    waiters, pods, served = Waiters(), Pods(), []

    async def request(number: int) -> int:
        assert await waiters.wait_until(pods.has_capacity, timeout=60, group="encoder")
        pods.free -= 1
        served.append(number)
        return number

    tasks = [asyncio.create_task(request(number)) for number in range(512)]
    await asleep(waiters, tasks)
    for _ in range(20):
        waiters.notify()
        await woken(waiters)
    assert pods.num_asked == 512 + 20, "one of a group is asked at a change that helps nobody"
    pods.num_asked, pods.free = 0, 5
    waiters.notify()
    await woken(waiters)
    assert served == list(range(5))
    assert pods.free == 0
    assert pods.num_asked == 6
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not waiters._groups


async def test_waiters_with_other_conditions_are_evaluated_separately() -> None:
    waiters, none, some = Waiters(), Pods(), Pods()
    tasks = [
        asyncio.create_task(waiters.wait_until(none.has_capacity, timeout=60, group="encoder")),
        asyncio.create_task(waiters.wait_until(some.has_capacity, timeout=60, group="prefill")),
        asyncio.create_task(waiters.wait_until(some.has_capacity, timeout=60)),
    ]
    await asyncio.sleep(0)
    some.free = 2
    waiters.notify()
    await woken(waiters)
    async with asyncio.timeout(30):
        assert await tasks[1]
        assert await tasks[2]
    assert not tasks[0].done()
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)


async def test_a_change_while_others_are_woken_is_not_lost() -> None:
    waiters, first, second = Waiters(), Pods(free=0), Pods(free=0)

    async def request() -> None:
        assert await waiters.wait_until(first.has_capacity, timeout=60, group="a")
        second.free = 1
        waiters.notify()

    tasks = [
        asyncio.create_task(waiters.wait_until(second.has_capacity, timeout=60, group="b")),
        asyncio.create_task(request()),
    ]
    await asyncio.sleep(0)
    first.free = 1
    waiters.notify()
    async with asyncio.timeout(30):
        await asyncio.gather(*tasks)


async def test_a_waiter_whose_condition_stays_false_times_out() -> None:
    assert not await Waiters().wait_until(lambda: False, timeout=0)


async def test_load_reports_evaluate_no_condition() -> None:
    async with stack(*COLOCATED) as served:
        registry, pods = served.gateway.context.registry, Pods()
        task = asyncio.create_task(registry.waiters.wait_until(pods.has_capacity, timeout=60))
        await asyncio.sleep(0)
        (peer,) = registry.peers.values()
        before = peer.load
        async with asyncio.timeout(30):
            while peer.load is before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        assert pods.num_asked == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_tenants_take_turns_at_the_pods_and_one_tenant_keeps_its_order() -> None:
    waiters, pods, served = Waiters(), Pods(), []
    weights = {"a": 1, "b": 2}
    waiters.weight_of = weights.__getitem__

    async def request(tenant: str, number: int) -> int:
        with waiters.place(tenant=tenant, seconds=1.0) as place:
            assert await place.wait_until(pods.has_capacity, timeout=60, group="prefill")
        pods.free -= 1
        served.append((tenant, number))
        return number

    names = ["a"] * 6 + ["b"] * 6  # the flood of a comes first
    tasks = [asyncio.create_task(request(name, number)) for number, name in enumerate(names)]
    await asyncio.sleep(0)
    for _ in range(4):  # three pods at a time: the turns go on where they were
        pods.free = 3
        waiters.notify()
        await woken(waiters)
    assert [name for name, _ in served] == [*"abbabbabb", *"aaa"]
    for tenant in weights:
        numbers = [number for name, number in served if name == tenant]
        assert numbers == sorted(numbers)
    await asyncio.gather(*tasks)
    assert not waiters._groups


async def test_a_waiter_that_leaves_gives_its_turn_to_the_next() -> None:
    waiters, pods = Waiters(), Pods()

    async def request(tenant: str) -> bool:
        with waiters.place(tenant=tenant, seconds=0.5) as place:
            return await place.wait_until(pods.has_capacity, timeout=60, group="g")

    tasks = [asyncio.create_task(request(tenant)) for tenant in ("a", "a", "b")]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await asyncio.gather(tasks[0], return_exceptions=True)
    pods.free = 2
    waiters.notify()
    await woken(waiters)
    async with asyncio.timeout(30):
        assert await tasks[1]
        assert await tasks[2]
    assert not waiters._groups


async def test_a_request_keeps_its_place_over_heartbeats() -> None:
    """The turns of tenants are those of requests without heartbeats, too."""
    waiters, pods, served = Waiters(), Pods(), []

    async def request(tenant: str, number: int) -> None:
        with waiters.place(tenant=tenant, seconds=1.0) as place:
            for _ in range(5 * (2 - number)):
                assert not await place.wait_until(pods.has_capacity, timeout=0, group="g")
                await asyncio.sleep(0)  # the heartbeat
            last.append(number)
            assert await place.wait_until(pods.has_capacity, timeout=60, group="g")
        pods.free -= 1
        served.append((tenant, number))

    last: list[int] = []
    tasks = [
        asyncio.create_task(request(tenant, number)) for tenant in "abc" for number in range(3)
    ]
    async with asyncio.timeout(30):
        while len(last) < 9:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert last[-1] == 0, "the first of a line was the last to wait without heartbeats"
    for _ in range(9):
        pods.free = 1
        waiters.notify()
        await woken(waiters)
    await asyncio.gather(*tasks)
    assert served == [(tenant, number) for number in range(3) for tenant in "abc"]
    assert not waiters._groups


async def test_a_request_that_waits_for_another_stage_leaves_its_line() -> None:
    waiters, pods = Waiters(), Pods()
    with waiters.place() as place:
        for group in ("decode", "decode", "prefill"):
            assert not await place.wait_until(pods.has_capacity, timeout=0, group=group)
            assert list(waiters._groups) == [group]
    assert not waiters._groups


async def test_a_request_that_is_woken_in_its_heartbeat_goes_on_at_once() -> None:
    waiters, pods = Waiters(), Pods()
    with waiters.place() as place:
        assert not await place.wait_until(pods.has_capacity, timeout=0, group="g")
        pods.free = 1
        waiters.notify()
        await woken(waiters)
        assert not waiters._groups
        assert await place.wait_until(pods.has_capacity, timeout=0, group="g")
        pods.free = 0
        assert not await place.wait_until(pods.has_capacity, timeout=0, group="g")
        assert [len(queue) for queue in waiters._groups.values()] == [1]
