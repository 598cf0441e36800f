"""Gives the slots of one resource to tenants in turn. One event loop uses it; no I/O.

    slot(tenant) ─▶ one is free, and the tenant has less than its share ─▶ held until the block ends
         │                                                ▲
         └─▶ wait ─▶ fewest slots first, then in turn ────┘
         └─▶ too many of the tenant wait: FullError

Within a tenant, the first that waits is the first that gets a slot. So a tenant whose work is slow
delays its own requests, and others by the slots that it holds when they arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from typing import Final

from vlm_worker.gateway.memory import TENANT_SHARE, Bound, FullError

Line = deque[asyncio.Future[None]]


def _one_tenant() -> bool:
    return False


class FairSlots:
    """`size` slots. If `is_shared()`, one tenant holds at most `TENANT_SHARE` of them, at least 1.

    Attributes:
        num_free: slots that nobody holds.
    """

    def __init__(
        self,
        size: int,
        *,
        max_waiting: int,
        bound: Bound,
        what: str,
        is_shared: Callable[[], bool] = _one_tenant,
    ) -> None:
        """At most `max_waiting` of a tenant wait for a slot: `what` names them in the error."""
        self._size: Final = size
        self._max_waiting: Final = max_waiting
        self._bound: Final = bound
        self._what: Final = what
        self._is_shared: Final = is_shared
        self.num_free = size
        self._held: Counter[str] = Counter()
        self._lines: dict[str, Line] = {}
        """Those that wait, by tenant; the tenant whose last turn is longest ago is first."""

    def num_waiting(self, tenant: str) -> int:
        return len(self._lines.get(tenant, ()))

    @contextlib.asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """Hold a slot for a tenant.

        Raises:
            FullError: as many of the tenant wait as may.
        """
        await self.take(tenant)
        try:
            yield
        finally:
            self.give(tenant)

    async def take(self, tenant: str) -> None:
        """Wait for a slot, which the caller must `give`. Raises as `slot` does."""
        if self.num_free and self._held[tenant] < self._share():
            self._hold(tenant)
            return
        if (num_waiting := self.num_waiting(tenant)) >= self._max_waiting:
            raise FullError(
                f"{num_waiting} {self._what} of your requests wait already, as many as may.",
                self._bound,
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came in the same moment
                self.give(tenant)
            else:
                self._leave(tenant, turn)
            raise

    def give(self, tenant: str) -> None:
        """Return a slot; the next one that waits gets it."""
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self.num_free += 1
        self._to_the_end(tenant)
        while self.num_free and (following := self._next()) is not None:
            turn = self._lines[following].popleft()
            self._to_the_end(following)
            self._hold(following)
            turn.set_result(None)

    def _next(self) -> str | None:
        """The tenant whose turn it is; None if nobody may have a slot."""
        share = self._share()
        for line in self._lines.values():
            while line and line[0].done():  # cancelled, and not resumed yet
                line.popleft()
        eligible = [one for one, line in self._lines.items() if line and self._held[one] < share]
        return min(eligible, key=self._held.__getitem__, default=None)

    def _share(self) -> int:
        return max(1, int(self._size * TENANT_SHARE)) if self._is_shared() else self._size

    def _hold(self, tenant: str) -> None:
        self.num_free -= 1
        self._held[tenant] += 1

    def _to_the_end(self, tenant: str) -> None:
        line = self._lines.pop(tenant, None)
        if line:
            self._lines[tenant] = line

    def _leave(self, tenant: str, turn: asyncio.Future[None]) -> None:
        line = self._lines.get(tenant)
        if line is not None:
            with contextlib.suppress(ValueError):
                line.remove(turn)
            if not line:
                self._lines.pop(tenant)
