"""Who may still read what, and until when. A pure table: time is an argument.

    grant --> HELD --renew--> HELD --release--> gone          no longer than a lease may live
                 |  deadline passes: `sweep` names it, whoever swept frees what it held
                 +--quarantine--> QUARANTINED --its stream closed, or the deadline--> gone

A reservation is a lease as well, of kind RESERVED: it holds KV room instead of KV.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable

from vlm_worker.settings.timers import PRODUCTION, Timers
from vlm_worker.types import RequestKey


class LeaseKind(enum.Enum):
    """What a lease holds."""

    HELD = "held"
    RESERVED = "reserved"
    QUARANTINED = "quarantined"


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """One handle given to a peer.

    `item` tells the embeddings of one request apart; None for KV. `deadline` is in seconds on the
    clock that the table is asked with, as are `granted`, `renewed`, when it was renewed last, and
    `ends`, after which no renewal puts the deadline.
    """

    id: str
    owner: RequestKey
    kind: LeaseKind
    deadline: float
    item: int | None = None
    granted: float = 0.0
    renewed: float | None = None
    ends: float = math.inf

    def why_expired(self, *, now: float) -> str:
        """What ended it, for a person who looks for the cause."""
        if self.kind is LeaseKind.QUARANTINED:
            return "its reader never said that it stopped"
        if self.ends <= now:
            return f"it was held for {now - self.granted:.1f} s, and is for no longer"
        if self.renewed is None:
            return f"nobody renewed it in the {now - self.granted:.1f} s since it was granted"
        return (
            f"nobody renewed it for {now - self.renewed:.1f} s, "
            f"{now - self.granted:.1f} s after it was granted"
        )


class LeaseTable:
    """All leases of one worker. Every lease has an owner and a deadline.

    Attributes:
        num_expired: leases that ended by their deadline, by what they were.
    """

    def __init__(self, timers: Timers = PRODUCTION) -> None:
        self.num_expired = dict.fromkeys(LeaseKind, 0)
        self._seconds = {
            LeaseKind.HELD: timers.lease,
            LeaseKind.RESERVED: timers.reservation,
            LeaseKind.QUARANTINED: timers.quarantine,
        }
        self._lifetimes = {LeaseKind.HELD: timers.held, LeaseKind.RESERVED: timers.reserved}
        self._leases: dict[str, Lease] = {}

    def __len__(self) -> int:
        """Leases of all kinds."""
        return len(self._leases)

    def count(self, kind: LeaseKind) -> int:
        """Leases of one kind."""
        return sum(lease.kind is kind for lease in self._leases.values())

    def get(self, lease_id: str) -> Lease | None:
        """The lease, expired or not; None where it is gone."""
        return self._leases.get(lease_id)

    def of(self, owner: RequestKey) -> list[Lease]:
        """All leases of one request."""
        return [lease for lease in self._leases.values() if lease.owner == owner]

    def owners(self) -> set[RequestKey]:
        """Every request that has a lease."""
        return {lease.owner for lease in self._leases.values()}

    def grant(
        self,
        lease_id: str,
        owner: RequestKey,
        *,
        now: float,
        kind: LeaseKind = LeaseKind.HELD,
        item: int | None = None,
    ) -> Lease:
        """A new lease.

        Raises:
            ValueError: there is one of this id, and what it holds would be forgotten.
        """
        if lease_id in self._leases:
            raise ValueError(f"lease {lease_id!r} is held already")
        ends = now + self._lifetimes[kind]
        deadline = min(now + self._seconds[kind], ends)
        lease = Lease(lease_id, owner, kind, deadline, item, granted=now, ends=ends)
        self._leases[lease_id] = lease
        return lease

    def renew(self, lease_ids: Iterable[str], *, now: float) -> list[str]:
        """Put deadlines off, up to the end of a lease's life; returns the ids no longer held.

        What has expired is gone, swept or not; what is quarantined is not given back to life.
        """
        gone = []
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is None or lease.kind is LeaseKind.QUARANTINED or lease.deadline <= now:
                gone.append(lease_id)
            else:
                deadline = min(max(lease.deadline, now + self._seconds[lease.kind]), lease.ends)
                self._leases[lease_id] = dataclasses.replace(lease, deadline=deadline, renewed=now)
        return gone

    def quarantine(self, lease_id: str, *, now: float) -> bool:
        """Its request ended while a peer may be reading; False where it is gone."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        if lease.kind is not LeaseKind.QUARANTINED:
            deadline = now + self._seconds[LeaseKind.QUARANTINED]
            self._leases[lease_id] = dataclasses.replace(
                lease, kind=LeaseKind.QUARANTINED, deadline=deadline
            )
        return True

    def restore(self, lease: Lease, *, now: float) -> None:
        """Quarantine a lease that `sweep` has just returned."""
        self._leases[lease.id] = lease
        self.quarantine(lease.id, now=now)

    def release(self, lease_id: str) -> Lease | None:
        """End a lease; None where it is gone already."""
        return self._leases.pop(lease_id, None)

    def sweep(self, *, now: float) -> list[Lease]:
        """Take out, count and return all leases whose deadline has passed."""
        expired = [lease for lease in self._leases.values() if lease.deadline <= now]
        for lease in expired:
            del self._leases[lease.id]
            self.num_expired[lease.kind] += 1
        return expired
