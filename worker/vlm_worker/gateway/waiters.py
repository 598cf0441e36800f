"""Wakes requests that wait for pods, one after another, after a change of the pods.

change ─▶ first request of each group: condition?  false: the whole group stays blocked
                                                   true: it takes its pods, then the next is woken

All members of a group have the same condition. If it is false for the first, it is false for all.
`fair_queue` orders a group by tenant; within a tenant, and if no tenant is named, by arrival.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator

from vlm_worker.gateway.fair_queue import FairQueue, equal


@dataclasses.dataclass(eq=False, slots=True)
class _Waiter:
    """A request in its line. `waking` is done if it does not wait now, as in its heartbeat."""

    condition: Callable[[], bool]
    group: Hashable
    waking: asyncio.Future[None]
    is_helped: bool = False


class Waiters:
    """The waiting requests of one gateway, in order, by group.

    The event loop is the only writer. `weight_of` returns the weight of a tenant.
    """

    def __init__(self) -> None:
        self.weight_of: Callable[[str], float] = equal
        self._groups: dict[Hashable, FairQueue[_Waiter]] = {}
        self._changed = False
        self._waking: asyncio.Task[None] | None = None

    async def wait_until(
        self, condition: Callable[[], bool], *, timeout: float, group: Hashable = None
    ) -> bool:
        """Wait once, as `Place.wait_until` does, in a place of its own."""
        with self.place() as place:
            return await place.wait_until(condition, timeout=timeout, group=group)

    @contextlib.contextmanager
    def place(self, *, tenant: str = "", seconds: float = 0.0) -> Iterator[Place]:
        """Give a request of `tenant`, which needs `seconds` of work, a place until the end."""
        place = Place(self, tenant=tenant, seconds=seconds)
        try:
            yield place
        finally:
            place.leave()

    def join(self, waiter: _Waiter, *, tenant: str, seconds: float) -> None:
        """Add a waiter to its group, after all others of the tenant."""
        queue = self._groups.setdefault(waiter.group, FairQueue(self._weight))
        queue.add(waiter, tenant=tenant, seconds=seconds)

    def leave(self, waiter: _Waiter) -> None:
        """Remove a waiter; nothing happens if it has left."""
        queue = self._groups.get(waiter.group)
        if queue is not None:
            queue.discard(waiter)
            if not queue:
                del self._groups[waiter.group]

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
            if not waiter.condition():
                return
            queue.take(waiter)
            if not queue:
                self._groups.pop(waiter.group, None)
            waiter.is_helped = True
            if not waiter.waking.done():
                waiter.waking.set_result(None)
            # Let the woken request take its pods before the next condition is checked.
            await asyncio.sleep(0)


class Place:
    """The place of one request among those that wait. It keeps its place over several waits."""

    def __init__(self, waiters: Waiters, *, tenant: str, seconds: float) -> None:
        self._waiters = waiters
        self._tenant = tenant
        self._seconds = seconds
        self._waiter: _Waiter | None = None

    async def wait_until(
        self, condition: Callable[[], bool], *, timeout: float, group: Hashable = None
    ) -> bool:
        """Wait until `condition` holds after a change; return False after `timeout` seconds.

        The condition must not depend on load: a load report wakes waiters only if the worker starts
        or stops accepting. All waiters of a `group` have the same condition. Without a group, the
        waiter's condition is checked after every change.

        After False the request stays in its line, until it waits in another group or leaves.
        """
        if condition():
            return True
        waiter = self._waiter_in(condition, group)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await waiter.waking
        return waiter.is_helped

    def leave(self) -> None:
        """Give the place up; idempotent."""
        if self._waiter is not None:
            self._waiters.leave(self._waiter)
        self._waiter = None

    def _waiter_in(self, condition: Callable[[], bool], group: Hashable) -> _Waiter:
        """Return the waiter in the line of a group, which joins it if it is in another or none."""
        found, waking = self._waiter, asyncio.get_running_loop().create_future()
        if found is not None and found.group == group and not found.is_helped:
            found.waking = waking
            return found
        self.leave()
        self._waiter = _Waiter(condition, object() if group is None else group, waking)
        self._waiters.join(self._waiter, tenant=self._tenant, seconds=self._seconds)
        return self._waiter
