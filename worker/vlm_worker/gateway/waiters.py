"""Wakes requests that wait for pods, one after another, after a change of the pods.

change ─▶ first request of each group: condition?  false: the whole group stays blocked
                                                   true: it takes its pods, then the next is woken

All members of a group have the same condition. If it is false for the first, it is false for all.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Hashable


@dataclasses.dataclass(eq=False, slots=True)
class _Waiter:
    condition: Callable[[], bool]
    helped: asyncio.Future[None]


class Waiters:
    """The waiting requests of one gateway, in order of arrival, by group.

    The event loop is the only writer.
    """

    def __init__(self) -> None:
        self._groups: dict[Hashable, dict[_Waiter, None]] = {}
        self._changed = False
        self._waking: asyncio.Task[None] | None = None

    async def wait_until(
        self, condition: Callable[[], bool], *, timeout: float, group: Hashable = None
    ) -> bool:
        """Wait until `condition` holds after a change; return False after `timeout` seconds.

        The condition must not depend on load: a load report wakes waiters only if the worker starts
        or stops accepting. All waiters of a `group` have the same condition. Without a group, the
        waiter's condition is checked after every change.
        """
        if condition():
            return True
        waiter = _Waiter(condition, asyncio.get_running_loop().create_future())
        group = waiter if group is None else group
        self._groups.setdefault(group, {})[waiter] = None
        try:
            async with asyncio.timeout(timeout):
                await waiter.helped
        except TimeoutError:
            return False
        finally:
            members = self._groups[group]
            del members[waiter]
            if not members:
                del self._groups[group]
        return True

    def notify(self) -> None:
        """Check the waiters' conditions after a change of the pods."""
        self._changed = True
        if self._groups and (self._waking is None or self._waking.done()):
            self._waking = asyncio.get_running_loop().create_task(self._wake(), name="wake")

    async def _wake(self) -> None:
        while self._changed:
            self._changed = False
            for group in list(self._groups):
                await self._wake_group(group)

    async def _wake_group(self, group: Hashable) -> None:
        for waiter in list(self._groups.get(group, ())):
            if waiter.helped.done():
                continue
            if not waiter.condition():
                return
            waiter.helped.set_result(None)
            # Let the woken request take its pods before the next condition is checked.
            await asyncio.sleep(0)
