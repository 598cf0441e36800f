"""The transfers and reservations that this worker holds for its consumers, each under a lease.

offer ── lease ── renew ... the consumer releases it, a call takes it over, or the sweep frees it
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
from vlm_worker.transfer.producer import Producer
from vlm_worker.types import RequestKey
from vlm_worker.wire.frames import TransferId
from vlm_worker.wire.messages import FetchCall

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Incarnation:
    """One run of this process: `boot_id` is 16 random bytes, new at every start."""

    boot_id: bytes
    pod_uid: str

    def check(self, boot_id: bytes) -> None:
        """Raise GoneError for a handle from another incarnation."""
        if boot_id != self.boot_id:
            raise GoneError("the handle is from another incarnation of this worker")

    def transfer_id(
        self, key: RequestKey, name: str, fingerprint: bytes, *, content: bytes
    ) -> TransferId:
        """The identity in the frames of a transfer of this process."""
        return TransferId(key, name, self.boot_id, fingerprint, self.pod_uid, content)


class TransferRegistry:
    """Leases, and the transfer of each. `free(lease)` frees in the engine what the lease held."""

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        free: Callable[[Lease], None],
        clock: Callable[[], float],
        leases: LeaseTable,
    ) -> None:
        self.leases = leases
        self._incarnation = incarnation
        self._free = free
        self._clock = clock
        self._outgoing: dict[str, Producer] = {}
        self._renewed_by_maker: Counter[str] = Counter()

    def offer(
        self, transfer_id: str, key: RequestKey, outgoing: Producer, *, item: int | None = None
    ) -> None:
        """Let consumers fetch a transfer, under a lease.

        Raises:
            InvalidRequestError: the transfer id is in use.
        """
        self._grant(transfer_id, key, kind=LeaseKind.HELD, item=item)
        self._outgoing[transfer_id] = outgoing

    def reserve(self, reservation_id: str, key: RequestKey) -> None:
        """Register a reservation of KV blocks under a lease."""
        self._grant(reservation_id, key, kind=LeaseKind.RESERVED, item=None)

    @property
    def outstanding(self) -> dict[str, int]:
        """Counts of leases, transfers and readers; all 0 at rest."""
        return {
            "leases": len(self.leases),
            "offers": len(self._outgoing),
            "leases renewed by their maker": len(self._renewed_by_maker),
            "readers": sum(outgoing.num_readers for outgoing in self._outgoing.values()),
        }

    def find(self, call: FetchCall, *, fingerprint: bytes) -> Producer:
        """The transfer that a consumer requests.

        Raises:
            GoneError: unknown, expired, of an earlier incarnation, or of another request.
            IncompatibleError: another layout.
        """
        self._incarnation.check(call.boot_id)
        outgoing = self._held(call.transfer_id, call.key.request_id)
        check_fingerprint(call.fingerprint, fingerprint)
        return outgoing

    def local(self, transfer_id: str, request_id: str, *, content: bytes) -> Producer:
        """As `find`, for a consumer in this process. `content` must be the transfer's content.

        Raises:
            GoneError: as `find`.
            CorruptTransferError: the transfer has another content.
        """
        outgoing = self._held(transfer_id, request_id)
        if outgoing.content != content:
            raise CorruptTransferError(
                f"transfer {transfer_id} is of other tokens, images or salt than the request",
                refusal=Refusal.IDENTITY,
            )
        return outgoing

    @contextlib.contextmanager
    def renew_while(self, transfer_ids: Iterable[str]) -> Iterator[None]:
        """Renew these leases until the context ends, and once more at its end."""
        ids = set(transfer_ids)
        self._renewed_by_maker.update(ids)
        try:
            yield
        finally:
            self._renewed_by_maker -= Counter(ids)  # others may keep them, too
            self.leases.renew(ids, now=self._clock())

    def renew(self, boot_id: bytes, lease_ids: Iterable[str]) -> list[str]:
        """Renew leases and reservations; returns those that are gone."""
        if boot_id != self._incarnation.boot_id:
            return list(lease_ids)
        return self.leases.renew(lease_ids, now=self._clock())

    def holds(self, lease_id: str) -> bool:
        """Whether a consumer may still use the lease."""
        lease = self.leases.get(lease_id)
        return lease is not None and lease.kind is not LeaseKind.QUARANTINED

    def release(self, boot_id: bytes, lease_id: str) -> None:
        """End a lease: its consumer reads no more. Idempotent."""
        lease = self.leases.get(lease_id)
        if boot_id == self._incarnation.boot_id and lease is not None:
            outgoing = self._drop(lease)
            if outgoing is not None:
                outgoing.fail(GoneError(f"transfer {lease_id} was released"))
                outgoing.close()
            self._free(lease)

    def take_over(self, lease_id: str, key: RequestKey) -> bool:
        """Move what a lease holds into a call of the same request; False if the lease is gone."""
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
        """End all leases of a request; True if a consumer may still read."""
        quarantined = [self._end(lease, error) for lease in self.leases.of(key)]
        return any(quarantined)

    def sweep(self) -> None:
        """End the expired leases, and the quarantined ones whose consumers have stopped.

        `renew_while` and a stream that reads frames also renew a lease.
        """
        now = self._clock()
        self.leases.renew(self._renewed_by_maker, now=now)
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
        """Close all transfers: the process ends."""
        for outgoing in self._outgoing.values():
            outgoing.close()
        self._outgoing.clear()

    def _held(self, transfer_id: str, request_id: str) -> Producer:
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
        """Stop the readers; True if the lease stays in quarantine until they have closed."""
        outgoing = self._outgoing.get(lease.id)
        if outgoing is not None:
            outgoing.fail(error)
            if not _stopped(outgoing):
                return self.leases.quarantine(lease.id, now=self._clock())
        self._drop(lease)
        return False

    def _expire(self, lease: Lease, *, now: float) -> None:
        """Free what an expired lease holds.

        Copies are freed at once. Exposed memory goes to quarantine first. If the reader has not
        confirmed its end when the quarantine ends, the memory is abandoned.
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

    def _drop(self, lease: Lease) -> Producer | None:
        self.leases.release(lease.id)
        return self._outgoing.pop(lease.id, None)


def _stopped(outgoing: Producer) -> bool:
    """Whether no consumer can still read."""
    return not outgoing.num_readers and not outgoing.exposed_bytes


def check_fingerprint(theirs: bytes, ours: bytes) -> None:
    """Raise IncompatibleError if two layouts differ."""
    if theirs != ours:
        raise IncompatibleError(
            f"the peer's layout is {theirs.hex() or 'none'}, ours is {ours.hex()}: not the same "
            "model, revision, dtype or block size"
        )
