"""Requests that wait for a change of the pods, woken one after another, and only if it helps them.

change ─▶ of each group the first: does it help?  no: the whole group sleeps on
                                                  yes: it takes its pods, then the next is asked

Members of a group lack the same: what does not help the first helps none of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Hashable


@dataclasses.dataclass(eq=False, slots=True)
class _Waiter:
    """One request."""

    condition: Callable[[], bool]
    helped: asyncio.Future[None]


class Waiters:
    """Those of one gateway, in the order in which they came. The event loop is its only writer."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, dict[_Waiter, None]] = {}
        self._changed = False
        self._waking: asyncio.Task[None] | None = None

    async def wait_until(
        self, condition: Callable[[], bool], *, timeout: float, group: Hashable = None
    ) -> bool:
        """Wait until `condition` holds after a change; False if it does not in time.

        Waiters of one `group` lack the same; without a group, a waiter is asked at every change.
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
        """Something changed that may help somebody."""
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
            # It takes what it waited for before the next is asked.
            await asyncio.sleep(0)
