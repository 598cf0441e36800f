"""Divides the admissions of one worker among tenants by their weighted work. Pure.

    start of a flow    the weighted seconds that were admitted of it; at least the virtual time
                       when its first item arrives
    virtual time       the least start of the flows that wait; it never falls

The item whose flow has the least start goes first, and its weighted seconds are added to the start.
So while two flows wait, their starts differ by at most one item. An item that leaves without its
work costs nothing, and a flow that was idle has no credit. Items that are admitted out of turn, for
their priority or because others lack an embedding, are repaid by later turns.

Items without weighted seconds are one flow. If others wait too, each of them costs a second.

A variant of start-time fair queueing (Goyal, Vin and Cheng 1996), with starts of flows instead of
items.
"""

from __future__ import annotations

from typing import Final, NamedTuple

UNWEIGHTED_SECONDS: Final = 1.0
MIN_SECONDS: Final = 0.001
"""The least cost of an item: an endless line of items without work would keep the turn."""


class Rank(NamedTuple):
    """What decides when waiting work is admitted, beside its arrival.

    Attributes:
        priority: larger goes first.
        tenant: identifies whose work it is.
        weighted_seconds: of estimated work, divided by the tenant's weight; 0: order of arrival.
    """

    priority: int = 0
    tenant: bytes = b""
    weighted_seconds: float = 0.0

    @property
    def flow(self) -> bytes:
        """The flow that it belongs to: of its tenant, or of all items without weighted seconds."""
        return self.tenant if self.weighted_seconds else b""


FIRST_COME: Final = Rank()


class FairOrder:
    """The starts of flows. One writer: what owns the queues that share it."""

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self._starts: dict[bytes, float] = {}
        self._num_waiting: dict[bytes, int] = {}

    def start(self, flow: bytes) -> float:
        """The start of a flow that waits."""
        return self._starts[flow]

    def arrived(self, flow: bytes) -> None:
        """Count an item that waits."""
        if flow not in self._num_waiting:
            self._starts[flow] = max(self._starts.get(flow, 0.0), self.virtual_time)
        self._num_waiting[flow] = self._num_waiting.get(flow, 0) + 1

    def admitted(self, rank: Rank) -> float:
        """Charge an item that leaves for its work; returns its start."""
        start = self._starts[rank.flow]
        if rank.weighted_seconds or len(self._starts) > 1:
            seconds = rank.weighted_seconds or UNWEIGHTED_SECONDS
            self._starts[rank.flow] += max(seconds, MIN_SECONDS)
        self.left(rank.flow)
        return start

    def left(self, flow: bytes) -> None:
        """Forget an item that no longer waits, and flows that have no debt."""
        self._num_waiting[flow] -= 1
        if not self._num_waiting[flow]:
            del self._num_waiting[flow]
        waiting = [self._starts[one] for one in self._num_waiting]
        least = min(waiting) if waiting else max(self._starts.values())
        self.virtual_time = max(self.virtual_time, least)
        self._starts = {
            one: start
            for one, start in self._starts.items()
            if one in self._num_waiting or start > self.virtual_time
        }
