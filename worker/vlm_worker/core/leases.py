"""Leases: which peer may read which data, and until when. Pure: time is an argument.

    grant --> HELD --renew--> HELD --release--> ended         renewals are bounded by `Lease.ends`
                 |  deadline passed: `sweep` returns it, and the caller frees its data
                 +--quarantine--> QUARANTINED --stream closed, or deadline passed--> ended

A reservation is a lease of kind RESERVED: it keeps free KV blocks instead of KV.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable

from vlm_worker.settings.timers import PRODUCTION, Timers
from vlm_worker.types import RequestKey


class LeaseKind(enum.Enum):
    """What a lease keeps: data for a peer, free KV blocks, or memory that a peer may still read."""

    HELD = "held"
    RESERVED = "reserved"
    QUARANTINED = "quarantined"


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """One lease of a peer. Times are in seconds on the clock of `now`.

    Attributes:
        item: index of the image whose embedding it keeps; None for KV.
        renewed: the time of the last renewal, or None.
        ends: no renewal moves the deadline beyond it.
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
        """Why the lease expired, for error messages and logs."""
        if self.kind is LeaseKind.QUARANTINED:
            return "its reader did not confirm that it stopped"
        if self.ends <= now:
            return f"it was held for {now - self.granted:.1f} s, the longest time of its kind"
        if self.renewed is None:
            return f"it was not renewed in the {now - self.granted:.1f} s since it was granted"
        return (
            f"it was not renewed for {now - self.renewed:.1f} s, "
            f"{now - self.granted:.1f} s after it was granted"
        )


class LeaseTable:
    """All leases of one worker by id. Every lease has an owner and a deadline.

    Attributes:
        num_expired: leases that expired so far, by kind.
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
        return len(self._leases)

    def count(self, kind: LeaseKind) -> int:
        return sum(lease.kind is kind for lease in self._leases.values())

    def get(self, lease_id: str) -> Lease | None:
        """The lease, expired or not; None if it was released or swept."""
        return self._leases.get(lease_id)

    def grant(
        self,
        lease_id: str,
        owner: RequestKey,
        *,
        now: float,
        kind: LeaseKind = LeaseKind.HELD,
        item: int | None = None,
    ) -> Lease:
        """Add a lease. Raises ValueError if the id exists: its data would never be freed."""
        if lease_id in self._leases:
            raise ValueError(f"lease {lease_id!r} is held already")
        ends = now + self._lifetimes[kind]
        deadline = min(now + self._seconds[kind], ends)
        lease = Lease(lease_id, owner, kind, deadline, item, granted=now, ends=ends)
        return self._leases.setdefault(lease_id, lease)

    def renew(self, lease_ids: Iterable[str], *, now: float) -> list[str]:
        """Extend deadlines, at most to `Lease.ends`; returns the ids that were not renewed.

        Expired and quarantined leases are not renewed, even if they were not swept yet.
        """
        gone = []
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is None or lease.kind is LeaseKind.QUARANTINED or lease.deadline <= now:
                gone.append(lease_id)
                continue
            deadline = min(max(lease.deadline, now + self._seconds[lease.kind]), lease.ends)
            self._leases[lease_id] = dataclasses.replace(lease, deadline=deadline, renewed=now)
        return gone

    def quarantine(self, lease_id: str, *, now: float) -> bool:
        """Quarantine a lease whose request ended while a peer may still read; False if unknown."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        kind = LeaseKind.QUARANTINED
        if lease.kind is not kind:
            deadline = now + self._seconds[kind]
            self._leases[lease_id] = dataclasses.replace(lease, kind=kind, deadline=deadline)
        return True

    def restore(self, lease: Lease, *, now: float) -> None:
        """Put a lease that `sweep` returned back, in quarantine."""
        self._leases[lease.id] = lease
        self.quarantine(lease.id, now=now)

    def release(self, lease_id: str) -> Lease | None:
        """Remove and return a lease; None if it ended before."""
        return self._leases.pop(lease_id, None)

    def sweep(self, *, now: float) -> list[Lease]:
        """Remove, count and return all leases whose deadline has passed."""
        expired = [lease for lease in self._leases.values() if lease.deadline <= now]
        for lease in expired:
            del self._leases[lease.id]
            self.num_expired[lease.kind] += 1
        return expired
