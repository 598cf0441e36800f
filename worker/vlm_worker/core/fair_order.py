"""Orders the waiting work of tenants in one worker by start-time fair queueing. Pure.

    start of an item     max(virtual time, finish of the last item of its flow)
    finish of an item    its start + its weighted seconds
    virtual time         the largest start of the admitted items

A queue admits the item of the least start first. While two flows wait, the weighted seconds that
were admitted of each differ by at most one item of each. A flow that was idle has no credit. An
item without weighted seconds starts at the virtual time: if no item has any, the order is that of
arrival.

Goyal, Vin and Cheng, Start-time Fair Queueing, 1996.
"""

from __future__ import annotations

from typing import Final, NamedTuple

MAX_IDLE_FLOWS: Final = 1024
"""If more flows are known, those whose finish is past are forgotten."""


class Rank(NamedTuple):
    """What decides when waiting work is admitted, beside its arrival.

    Attributes:
        priority: larger goes first.
        flow: identifies a tenant.
        weighted_seconds: of estimated work, divided by the tenant's weight; 0: order of arrival.
    """

    priority: int = 0
    flow: bytes = b""
    weighted_seconds: float = 0.0


FIRST_COME: Final = Rank()


class FairOrder:
    """The virtual time of one queue, and the finish of each flow. The queue is its only writer."""

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self._finish: dict[bytes, float] = {}

    def start(self, flow: bytes, weighted_seconds: float) -> float:
        """Return the start of a new item, which is behind all items of its flow."""
        if not weighted_seconds:
            return self.virtual_time
        start = max(self.virtual_time, self._finish.get(flow, 0.0))
        self._finish[flow] = start + weighted_seconds
        if len(self._finish) > MAX_IDLE_FLOWS:
            now = self.virtual_time
            self._finish = {flow: at for flow, at in self._finish.items() if at > now}
        return start

    def admitted(self, start: float) -> None:
        """Advance the virtual time for an item that left the queue for its work."""
        self.virtual_time = max(self.virtual_time, start)

    def cancelled(self, flow: bytes, weighted_seconds: float, *, start: float) -> None:
        """Give the seconds of an item back that left without its work.

        The seconds of an item before others of its flow are kept: these have their starts.
        """
        if self._finish.get(flow) == start + weighted_seconds:
            self._finish[flow] = start

    def emptied(self) -> None:
        """Forget all flows, because nothing waits: what was admitted gives no debt."""
        self.virtual_time = max(self.virtual_time, *self._finish.values(), 0.0)
        self._finish.clear()
