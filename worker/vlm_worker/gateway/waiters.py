"""Wakes requests that wait for pods, one after another, after a change of the pods.

change ─▶ first request of each group: condition?  false: the whole group stays blocked
                                                   true: it takes its pods, then the next is woken

All members of a group have the same condition. If it is false for the first, it is false for all.
`fair_queue` orders a group by tenant; within a tenant, and if no tenant is named, by arrival.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Hashable

from vlm_worker.gateway.fair_queue import FairQueue


@dataclasses.dataclass(eq=False, slots=True)
class _Waiter:
    condition: Callable[[], bool]
    helped: asyncio.Future[None]


def _equal(_: str) -> float:
    return 1.0


class Waiters:
    """The waiting requests of one gateway, in order, by group.

    The event loop is the only writer. `weight_of` returns the weight of a tenant.
    """

    def __init__(self) -> None:
        self.weight_of: Callable[[str], float] = _equal
        self._groups: dict[Hashable, FairQueue[_Waiter]] = {}
        self._changed = False
        self._waking: asyncio.Task[None] | None = None

    async def wait_until(
        self,
        condition: Callable[[], bool],
        *,
        timeout: float,
        group: Hashable = None,
        tenant: str = "",
        seconds: float = 0.0,
    ) -> bool:
        """Wait until `condition` holds after a change; return False after `timeout` seconds.

        The condition must not depend on load: a load report wakes waiters only if the worker starts
        or stops accepting. All waiters of a `group` have the same condition. Without a group, the
        waiter's condition is checked after every change.

        `seconds` is the work that the request of this `tenant` needs.
        """
        if condition():
            return True
        waiter = _Waiter(condition, asyncio.get_running_loop().create_future())
        group = waiter if group is None else group
        queue = self._groups.setdefault(group, FairQueue(self._weight))
        queue.add(waiter, tenant=tenant, seconds=seconds)
        try:
            async with asyncio.timeout(timeout):
                await waiter.helped
        except TimeoutError:
            return False
        finally:
            queue.discard(waiter)
            if not queue and self._groups.get(group) is queue:
                del self._groups[group]
        return True

    def _weight(self, tenant: str) -> float:
        return self.weight_of(tenant)

    def notify(self) -> None:
        """Check the waiters' conditions after a change of the pods."""
        self._changed = True
        if self._groups and (self._waking is None or self._waking.done()):
            self._waking = asyncio.get_running_loop().create_task(self._wake(), name="wake")

    async def _wake(self) -> None:
        while self._changed:
            self._changed = False
            for queue in list(self._groups.values()):
                await self._wake_group(queue)

    async def _wake_group(self, queue: FairQueue[_Waiter]) -> None:
        for _ in range(len(queue)):
            waiter = queue.first()
            if waiter is None:
                return
            if waiter.helped.done():  # its time is over, and it has not resumed yet
                queue.discard(waiter)
                continue
            if not waiter.condition():
                return
            queue.take(waiter)
            waiter.helped.set_result(None)
            # Let the woken request take its pods before the next condition is checked.
            await asyncio.sleep(0)
