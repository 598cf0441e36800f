"""What this worker holds for its consumers: transfers and reservations, each under a lease.

offer ── lease ── renew ... release by the consumer, claim by a call here, or the sweep frees it
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from vlm_worker.core.leases import Lease, LeaseKind, LeaseTable
from vlm_worker.errors import (
    CancelledError,
    CorruptTransferError,
    GoneError,
    IncompatibleError,
    InvalidRequestError,
    Refusal,
    WorkerError,
)
from vlm_worker.transfer.outgoing import Outgoing
from vlm_worker.types import RequestKey
from vlm_worker.wire.calls import FetchCall
from vlm_worker.wire.frames import TransferId

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Life:
    """This life of this process: `boot_id` is 16 random bytes, new at every start."""

    boot_id: bytes
    pod_uid: str

    def check(self, boot_id: bytes) -> None:
        """Raise GoneError for a handle from another life."""
        if boot_id != self.boot_id:
            raise GoneError("the handle is from another life of this worker")

    def transfer_id(
        self, key: RequestKey, name: str, fingerprint: bytes, *, content: bytes
    ) -> TransferId:
        """What the frames of a transfer of ours carry."""
        return TransferId(key, name, self.boot_id, fingerprint, self.pod_uid, content)


class Offers:
    """Leases and what they hold. `free(lease)` gives back, in the engine, what it held."""

    def __init__(
        self,
        *,
        life: Life,
        free: Callable[[Lease], None],
        clock: Callable[[], float],
        leases: LeaseTable,
    ) -> None:
        self.leases = leases
        self._life = life
        self._free = free
        self._clock = clock
        self._outgoing: dict[str, Outgoing] = {}
        self._kept: Counter[str] = Counter()

    def offer(
        self, transfer_id: str, key: RequestKey, outgoing: Outgoing, *, item: int | None = None
    ) -> None:
        """Let consumers fetch it, under a lease.

        Raises:
            InvalidRequestError: there is a transfer of this name.
        """
        self._grant(transfer_id, key, kind=LeaseKind.HELD, item=item)
        self._outgoing[transfer_id] = outgoing

    def reserve(self, reservation_id: str, key: RequestKey) -> None:
        """Hold KV room under a lease."""
        self._grant(reservation_id, key, kind=LeaseKind.RESERVED, item=None)

    @property
    def left(self) -> dict[str, int]:
        """What is here for somebody, by what it is; all 0 where nobody is owed anything."""
        return {
            "leases": len(self.leases),
            "offers": len(self._outgoing),
            "leases kept by their maker": len(self._kept),
            "readers": sum(outgoing.num_readers for outgoing in self._outgoing.values()),
        }

    def find(self, call: FetchCall, *, fingerprint: bytes) -> Outgoing:
        """What a consumer asks for.

        Raises:
            GoneError: unknown, expired, of an earlier life, or of another request.
            IncompatibleError: another layout.
        """
        self._life.check(call.boot_id)
        outgoing = self._held(call.transfer_id, call.key.request_id)
        check_fingerprint(call.fingerprint, fingerprint)
        return outgoing

    def local(self, transfer_id: str, request_id: str, *, content: bytes) -> Outgoing:
        """As `find`, for a consumer in this process, which knows what it must be made from.

        Raises:
            GoneError: as `find`.
            CorruptTransferError: it is made from something else.
        """
        outgoing = self._held(transfer_id, request_id)
        if outgoing.content != content:
            raise CorruptTransferError(
                f"transfer {transfer_id} is of other tokens, pictures or salt than the request",
                refusal=Refusal.IDENTITY,
            )
        return outgoing

    @contextlib.contextmanager
    def keep(self, transfer_ids: Iterable[str]) -> Iterator[None]:
        """These leases do not end inside, and begin anew at the end: their maker is at work."""
        ids = set(transfer_ids)
        self._kept.update(ids)
        try:
            yield
        finally:
            self._kept -= Counter(ids)  # others may keep them, too
            self.leases.renew(ids, now=self._clock())

    def renew(self, boot_id: bytes, lease_ids: Iterable[str]) -> list[str]:
        """Renew leases and reservations; returns those that are gone."""
        if boot_id != self._life.boot_id:
            return list(lease_ids)
        return self.leases.renew(lease_ids, now=self._clock())

    def holds(self, lease_id: str) -> bool:
        """Whether somebody may still come for it."""
        lease = self.leases.get(lease_id)
        return lease is not None and lease.kind is not LeaseKind.QUARANTINED

    def release(self, boot_id: bytes, lease_id: str) -> None:
        """The consumer has all that it needs, and reads no more; idempotent."""
        lease = self.leases.get(lease_id)
        if boot_id == self._life.boot_id and lease is not None:
            outgoing = self._drop(lease)
            if outgoing is not None:
                outgoing.fail(GoneError(f"transfer {lease_id} was released"))
                outgoing.close()
            self._free(lease)

    def claim(self, lease_id: str, key: RequestKey) -> bool:
        """Take over into a call of the same request what a lease holds; False where it is gone."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.owner != key or lease.kind is LeaseKind.QUARANTINED:
            return False
        if lease.deadline <= self._clock():
            return False
        outgoing = self._drop(lease)
        if outgoing is not None:
            outgoing.close()
        return True

    def cancel(self, key: RequestKey, error: CancelledError) -> bool:
        """End all leases of a request; True where a consumer may be reading on."""
        quarantined = [self._end(lease, error) for lease in self.leases.of(key)]
        return any(quarantined)

    def sweep(self) -> None:
        """End what has expired, and what was quarantined until its consumer stopped.

        A lease is renewed by its maker at work and by a stream that takes frames, too.
        """
        now = self._clock()
        self.leases.renew(self._kept, now=now)
        live = [name for name, outgoing in self._outgoing.items() if outgoing.has_live_reader]
        self.leases.renew(live, now=now)
        for lease_id, outgoing in list(self._outgoing.items()):
            lease = self.leases.get(lease_id)
            if lease is not None and lease.kind is LeaseKind.QUARANTINED and _stopped(outgoing):
                self._drop(lease)
        for lease in self.leases.sweep(now=now):
            owner, cause = lease.owner, lease.why_expired(now=now)
            logger.warning(
                "lease expired: %s %s of %s attempt %d: %s",
                lease.kind.value,
                lease.id,
                owner.request_id,
                owner.attempt,
                cause,
                extra={
                    "request": owner.request_id,
                    "attempt": owner.attempt,
                    "lease": lease.id,
                    "kind": lease.kind.value,
                    "cause": cause,
                },
            )
            self._expire(lease, now=now)

    def close(self) -> None:
        """This life ends: nobody reads any more."""
        for outgoing in self._outgoing.values():
            outgoing.close()
        self._outgoing.clear()

    def _held(self, transfer_id: str, request_id: str) -> Outgoing:
        outgoing = self._outgoing.get(transfer_id)
        if outgoing is None or outgoing.request_id != request_id:
            raise GoneError(f"transfer {transfer_id} is not held here")
        return outgoing

    def _grant(self, lease_id: str, key: RequestKey, *, kind: LeaseKind, item: int | None) -> None:
        try:
            self.leases.grant(lease_id, key, now=self._clock(), kind=kind, item=item)
        except ValueError as error:
            raise InvalidRequestError(str(error), param="transfer_id") from error

    def _end(self, lease: Lease, error: WorkerError) -> bool:
        """Stop its readers; True where it stays, in quarantine, until they have closed."""
        outgoing = self._outgoing.get(lease.id)
        if outgoing is not None:
            outgoing.fail(error)
            if not _stopped(outgoing):
                return self.leases.quarantine(lease.id, now=self._clock())
        self._drop(lease)
        return False

    def _expire(self, lease: Lease, *, now: float) -> None:
        """Free what a deadline has passed for.

        Copies are free at once. Exposed memory goes to quarantine first; what nobody vouches for
        at the end of that is not used again.
        """
        outgoing = self._outgoing.get(lease.id)
        if lease.kind is not LeaseKind.QUARANTINED:
            self._free(lease)
        if outgoing is None:
            return
        outgoing.fail(GoneError(f"the lease of transfer {lease.id} expired"))
        if lease.kind is not LeaseKind.QUARANTINED and outgoing.exposed_bytes:
            self.leases.restore(lease, now=now)
            return
        del self._outgoing[lease.id]
        outgoing.abandon()

    def _drop(self, lease: Lease) -> Outgoing | None:
        self.leases.release(lease.id)
        return self._outgoing.pop(lease.id, None)


def _stopped(outgoing: Outgoing) -> bool:
    """Whether it is proven that no consumer reads on."""
    return not outgoing.num_readers and not outgoing.exposed_bytes


def check_fingerprint(theirs: bytes, ours: bytes) -> None:
    """Raise IncompatibleError where two layouts differ."""
    if theirs != ours:
        raise IncompatibleError(
            f"the peer's layout is {theirs.hex() or 'none'}, ours is {ours.hex()}: not the same "
            "model, revision, dtype or block size"
        )
