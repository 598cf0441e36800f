"""What each request attempt holds on the event loop: its calls, and what consumers may read.

    call(name, key) ─▶ handle ─┬─ offer ─▶ lease ── renew ... release, take_over, or sweep
                               └─ replies ... last reply
    end: later calls are refused ─▶ readers fail ─▶ the engine frees ─▶ calls are cancelled

The engine thread has the other half, `engine.attempts`. A handle without calls and leases is
closed: the registry forgets it. Its calls and its cancellation are remembered for some minutes.

Laws (tests/worker/roles/test_attempt_registry.py):

    R1  a second call of the same name is a duplicate, unless the first was refused as overloaded
    R2  a cancelled attempt makes no further call; a Cancel may overtake the call that it cancels
    R3  a lease ends once: by release, by take_over, by the end of its attempt, or by expiry
    R4  memory that a consumer may still read stays in quarantine until the consumer has stopped
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any, Final

from vlm_worker.core.leases import Lease, LeaseKind, LeaseTable
from vlm_worker.errors import (
    CancelledError,
    CorruptTransferError,
    DuplicateError,
    GoneError,
    IncompatibleError,
    InvalidRequestError,
    OverloadedError,
    Refusal,
    WorkerError,
)
from vlm_worker.transfer.producer import Producer
from vlm_worker.types import RequestKey
from vlm_worker.wire.frames import TransferId
from vlm_worker.wire.messages import CancelOutcome, FetchCall

logger = logging.getLogger(__name__)

REMEMBER_SECONDS: Final = 600.0
MAX_REMEMBERED: Final = 200_000


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


class EndReason(enum.Enum):
    """Why an attempt ends. The value completes "attempt 1 ..."."""

    CANCELLED = "was cancelled by its caller"
    GIVEN_UP = "was given up"


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """One call in flight. `cancel` sets `error` before it cancels the task."""

    task: asyncio.Task[Any]
    error: WorkerError | None = None

    def cancel(self, error: WorkerError) -> None:
        if self.error is None:
            self.error = error
            self.task.cancel()


@dataclasses.dataclass(eq=False, slots=True)
class AttemptHandle:
    """One attempt; the roles hold only this.

    Attributes:
        calls: calls in flight.
        producers: by lease id; None for reserved KV blocks.
    """

    key: RequestKey
    registry: AttemptRegistry
    calls: set[Call] = dataclasses.field(default_factory=set)
    producers: dict[str, Producer | None] = dataclasses.field(default_factory=dict)

    def offer(
        self, transfer_id: str, producer: Producer | None, *, item: int | None = None
    ) -> None:
        """Let consumers fetch a transfer, under a lease; None reserves KV blocks.

        Raises:
            InvalidRequestError: the transfer id is in use.
        """
        kind = LeaseKind.RESERVED if producer is None else LeaseKind.HELD
        now = self.registry.clock()
        try:
            self.registry.leases.grant(transfer_id, self.key, now=now, kind=kind, item=item)
        except ValueError as error:
            raise InvalidRequestError(str(error), param="transfer_id") from error
        self.producers[transfer_id] = producer

    def take_over(self, lease_id: str) -> bool:
        """Move what a lease of this attempt holds into a call; False if the lease is gone."""
        lease = self.registry.leases.get(lease_id)
        if lease is None or lease.owner != self.key or lease.kind is LeaseKind.QUARANTINED:
            return False
        if lease.deadline <= self.registry.clock():
            return False
        producer = self.drop(lease_id)
        if producer is not None:
            producer.close()
        return True

    async def end(self, reason: EndReason) -> CancelOutcome:
        """End the attempt, and free what it holds here and in the engine."""
        registry, calls = self.registry, self.calls.copy()
        error = CancelledError(f"attempt {self.key.attempt} {reason.value}")
        if reason is EndReason.CANCELLED:
            registry.history.cancel(self.key, now=registry.clock())
        in_flight = self.stop_readers(error)
        outcome = await registry.end_in_engine(self.key)
        # only the calls above: a call that was refused as overloaded may have been repeated
        for call in calls & self.calls:
            call.cancel(error)
        self.close_if_empty()
        return CancelOutcome.CANCEL_REQUESTED_IN_FLIGHT if in_flight else outcome

    def stop_readers(self, error: WorkerError) -> bool:
        """End all leases; True if one stays in quarantine until its readers have stopped."""
        num_quarantined = 0
        for lease_id, producer in list(self.producers.items()):
            if producer is not None:
                producer.fail(error)
            if _is_read(producer):
                self.registry.leases.quarantine(lease_id, now=self.registry.clock())
                num_quarantined += 1
            else:
                self.drop(lease_id)
        return num_quarantined > 0

    def drop(self, lease_id: str) -> Producer | None:
        """Forget a lease; the caller frees what it held."""
        self.registry.leases.release(lease_id)
        producer = self.producers.pop(lease_id)
        self.close_if_empty()
        return producer

    def close_if_empty(self) -> None:
        by_key = self.registry.by_key
        if not self.calls and not self.producers and by_key.get(self.key) is self:
            del by_key[self.key]


class AttemptRegistry:
    """All attempts that hold something on this event loop.

    `free(lease)` frees in the engine what a lease held. `end_in_engine` ends an attempt there.

    Attributes:
        by_key: written by `open` and `AttemptHandle.close_if_empty`.
        leases: index of all leases by id, with their deadlines.
    """

    def __init__(
        self,
        *,
        incarnation: Incarnation,
        free: Callable[[Lease], None],
        end_in_engine: Callable[[RequestKey], Awaitable[CancelOutcome]],
        leases: LeaseTable,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.by_key: dict[RequestKey, AttemptHandle] = {}
        self.leases = leases
        self.history = CallHistory()
        self.clock = clock
        self.end_in_engine = end_in_engine
        self._incarnation = incarnation
        self._free = free
        self._renewed_by_maker: Counter[str] = Counter()

    def open(self, key: RequestKey) -> AttemptHandle:
        """The handle of a key; a new one if there is none."""
        if key not in self.by_key:
            self.by_key[key] = AttemptHandle(key, self)
        return self.by_key[key]

    @property
    def outstanding(self) -> dict[str, int]:
        """Counts of calls, leases and readers; all 0 at rest."""
        return {
            "calls": sum(len(handle.calls) for handle in self.by_key.values()),
            "leases": len(self.leases),
            "leases renewed by their maker": len(self._renewed_by_maker),
            "readers": sum(producer.num_readers for _, producer in self._transfers()),
        }

    @contextlib.contextmanager
    def call(self, name: str, key: RequestKey) -> Iterator[AttemptHandle]:
        """Register one call of the current task.

        Raises:
            DuplicateError: this attempt made this call before.
            CancelledError: the attempt was cancelled, before the call or during it.
        """
        now = self.clock()
        if self.history.was_cancelled(key, now=now):
            raise CancelledError(f"attempt {key.attempt} was cancelled")
        if not self.history.begin(name, key, now=now):
            raise DuplicateError(f"{name} was called before with attempt {key.attempt}")
        task = asyncio.current_task()
        assert task is not None
        handle, call = self.open(key), Call(task)
        handle.calls.add(call)
        try:
            yield handle
        except asyncio.CancelledError:
            if call.error is not None and task.uncancel() == 0:
                raise call.error from None
            raise
        except OverloadedError:
            # rejected before it acquired anything: the same attempt may call again
            self.history.forget(name, key)
            raise
        finally:
            handle.calls.discard(call)
            handle.close_if_empty()

    async def cancel(self, request_id: str, attempt: int) -> CancelOutcome:
        """End an attempt, or with attempt 0 all of them, and free what they hold."""
        keys = [RequestKey(request_id, attempt)]
        if not attempt:
            keys = [key for key in self.by_key if key.request_id == request_id]
        outcomes = [await self.open(key).end(EndReason.CANCELLED) for key in keys]
        return max(outcomes, key=lambda outcome: outcome.value, default=CancelOutcome.NOT_FOUND)

    def find(self, call: FetchCall, *, fingerprint: bytes) -> Producer:
        """The transfer that a consumer requests.

        Raises:
            GoneError: unknown, expired, of an earlier incarnation, or of another request.
            IncompatibleError: another layout.
        """
        self._incarnation.check(call.boot_id)
        producer = self._producer(call.transfer_id, call.key.request_id)
        check_fingerprint(call.fingerprint, fingerprint)
        return producer

    def local(self, transfer_id: str, request_id: str, *, content: bytes) -> Producer:
        """As `find`, for a consumer in this process. `content` must be the transfer's content.

        Raises:
            GoneError: as `find`.
            CorruptTransferError: the transfer has another content.
        """
        producer = self._producer(transfer_id, request_id)
        if producer.content != content:
            raise CorruptTransferError(
                f"transfer {transfer_id} is of other tokens, images or salt than the request",
                refusal=Refusal.IDENTITY,
            )
        return producer

    @contextlib.contextmanager
    def renew_while(self, lease_ids: Iterable[str]) -> Iterator[None]:
        """Renew these leases until the context ends, and once more at its end."""
        ids = set(lease_ids)
        self._renewed_by_maker.update(ids)
        try:
            yield
        finally:
            self._renewed_by_maker -= Counter(ids)  # others may keep them, too
            self.leases.renew(ids, now=self.clock())

    def renew(self, boot_id: bytes, lease_ids: Iterable[str]) -> list[str]:
        """Renew leases and reservations; returns those that are gone."""
        if boot_id != self._incarnation.boot_id:
            return list(lease_ids)
        return self.leases.renew(lease_ids, now=self.clock())

    def holds(self, lease_id: str) -> bool:
        """Whether a consumer may still use the lease."""
        lease = self.leases.get(lease_id)
        return lease is not None and lease.kind is not LeaseKind.QUARANTINED

    def release(self, boot_id: bytes, lease_id: str) -> None:
        """End a lease: its consumer reads no more. Idempotent."""
        lease = self.leases.get(lease_id)
        if boot_id == self._incarnation.boot_id and lease is not None:
            producer = self.by_key[lease.owner].drop(lease_id)
            if producer is not None:
                producer.fail(GoneError(f"transfer {lease_id} was released"))
                producer.close()
            self._free(lease)

    def sweep(self) -> None:
        """End the expired leases, and the quarantined ones whose consumers have stopped.

        `renew_while` and a stream that reads frames also renew a lease.
        """
        now = self.clock()
        self.leases.renew(self._renewed_by_maker, now=now)
        for lease, producer in self._transfers():
            if producer.has_live_reader:
                self.leases.renew([lease.id], now=now)
            if lease.kind is LeaseKind.QUARANTINED and not _is_read(producer):
                self.by_key[lease.owner].drop(lease.id)
        for lease in self.leases.sweep(now=now):
            self._expire(lease, now=now)

    def close(self) -> None:
        """Close all transfers: the process ends."""
        for lease, producer in self._transfers():
            producer.close()
            self.by_key[lease.owner].drop(lease.id)

    def _expire(self, lease: Lease, *, now: float) -> None:
        """Free what an expired lease holds.

        Copies are freed at once. Exposed memory goes to quarantine first. If the reader has not
        confirmed its end when the quarantine ends, the memory is abandoned.
        """
        facts = {
            "kind": lease.kind.value,
            "lease": lease.id,
            "request": lease.owner.request_id,
            "attempt": lease.owner.attempt,
            "cause": lease.why_expired(now=now),
        }
        text = "lease expired: %(kind)s %(lease)s of %(request)s attempt %(attempt)d: %(cause)s"
        logger.warning(text, facts, extra=facts)
        handle = self.by_key[lease.owner]
        producer = handle.producers[lease.id]
        if lease.kind is not LeaseKind.QUARANTINED:
            self._free(lease)
        if producer is not None:
            producer.fail(GoneError(f"the lease of transfer {lease.id} expired"))
            if lease.kind is not LeaseKind.QUARANTINED and producer.exposed_bytes:
                self.leases.restore(lease, now=now)
                return
            producer.abandon()
        handle.drop(lease.id)

    def _transfers(self) -> list[tuple[Lease, Producer]]:
        return [
            (lease, producer)
            for handle in self.by_key.values()
            for lease_id, producer in handle.producers.items()
            if producer is not None and (lease := self.leases.get(lease_id)) is not None
        ]

    def _producer(self, transfer_id: str, request_id: str) -> Producer:
        lease = self.leases.get(transfer_id)
        if lease is not None and lease.owner.request_id == request_id:
            producer = self.by_key[lease.owner].producers[transfer_id]
            if producer is not None:
                return producer
        raise GoneError(f"transfer {transfer_id} is not held here")


@dataclasses.dataclass(slots=True)
class _Past:
    """The calls of an attempt, whether it was cancelled, and the time of the last of both."""

    at: float
    calls: set[str] = dataclasses.field(default_factory=set)
    is_cancelled: bool = False


class CallHistory:
    """Calls and cancellations of the last minutes. Pure: `now` is an argument.

    Bounded in time and in number; the attempt that was silent for longest is dropped first.
    """

    def __init__(self) -> None:
        self._past: OrderedDict[RequestKey, _Past] = OrderedDict()

    def __len__(self) -> int:
        return len(self._past)

    def begin(self, name: str, key: RequestKey, *, now: float) -> bool:
        """Record a call; False if the attempt made it before."""
        past = self._recall(key, now=now)
        if name in past.calls:
            return False
        past.calls.add(name)
        return True

    def forget(self, name: str, key: RequestKey) -> None:
        """Drop a call that was refused before it did anything: it may be repeated."""
        if key in self._past:
            self._past[key].calls.discard(name)

    def cancel(self, key: RequestKey, *, now: float) -> None:
        """Reject all later calls of this attempt."""
        self._recall(key, now=now).is_cancelled = True

    def was_cancelled(self, key: RequestKey, *, now: float) -> bool:
        """Whether this attempt was cancelled in the last `REMEMBER_SECONDS`."""
        past = self._past.get(key)
        return past is not None and past.is_cancelled and now < past.at + REMEMBER_SECONDS

    def _recall(self, key: RequestKey, *, now: float) -> _Past:
        """The entry of a key, renewed; a new one if there is none."""
        while self._past:
            oldest = next(iter(self._past.values()))
            if oldest.at > now - REMEMBER_SECONDS and len(self._past) < MAX_REMEMBERED:
                break
            self._past.popitem(last=False)
        past = self._past.setdefault(key, _Past(now))
        past.at = now
        self._past.move_to_end(key)
        return past


def _is_read(producer: Producer | None) -> bool:
    """Whether a consumer can still read."""
    return producer is not None and bool(producer.num_readers or producer.exposed_bytes)


def check_fingerprint(theirs: bytes, ours: bytes) -> None:
    """Raise IncompatibleError if two layouts differ."""
    if theirs != ours:
        raise IncompatibleError(
            f"the peer's layout is {theirs.hex() or 'none'}, ours is {ours.hex()}: not the same "
            "model, revision, dtype or block size"
        )
