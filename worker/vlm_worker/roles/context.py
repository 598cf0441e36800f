"""The state that the roles of one process share: engine, transfer registry, calls in flight.

call(name, key) ── replies ... last reply       one call of one attempt
      └ cancel(key) ends it from outside
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from vlm_worker.core.leases import Lease, LeaseTable
from vlm_worker.core.request_memory import MemoryBudget
from vlm_worker.core.sources import Sources
from vlm_worker.engine.engine import Engine
from vlm_worker.errors import (
    CancelledError,
    DrainingError,
    DuplicateError,
    OverloadedError,
    Refusal,
    WorkerError,
)
from vlm_worker.roles.call_history import CallHistory
from vlm_worker.roles.request_memory import RequestMemory
from vlm_worker.roles.transfer_registry import Incarnation, TransferRegistry
from vlm_worker.settings.timers import PRODUCTION, Timers
from vlm_worker.supervision import AtEnd, Supervisor
from vlm_worker.transfer.peers import Peers
from vlm_worker.transfer.producer import Producer
from vlm_worker.transfer.transport import ByteStream, Transport
from vlm_worker.types import EmbedLayout, KVLayout, RequestKey, StageSpan
from vlm_worker.wire.buffers import PLAIN, Copier
from vlm_worker.wire.frames import FrameBatches
from vlm_worker.wire.messages import CancelOutcome, FetchCall

logger = logging.getLogger(__name__)


SUSPECT_SWEEPS: Final = 10
UPLOADS: Final = 512 << 20
IMAGES: Final = 1536 << 20
"""Default limit in bytes for image files, and for decoded images."""


@dataclasses.dataclass(eq=False, slots=True)
class Call:
    """One call in flight. `cancel` sets `error` before it cancels the task."""

    name: str
    key: RequestKey
    task: asyncio.Task[Any]
    error: WorkerError | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class TransferStats:
    """One transfer that this worker pulled; `kind` is `embed` or `kv`."""

    kind: str
    seconds: float
    num_bytes: int


class RoleContext:
    """The shared state of the roles, on one event loop. The owner calls `start` and `close`.

    `delays` holds seconds by stage, for tests. `accepting` is False while draining. The context
    calls `on_transfer` for every transfer that it pulled. `sources` checks from where it may fetch.
    `transport` moves bytes if both sides have it, and `copier` copies the fetched bytes. `memory`
    limits what the requests hold.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        incarnation: Incarnation,
        embed_layout: EmbedLayout,
        kv_layout: KVLayout | None,
        sources: Sources,
        delays: Mapping[str, float] | None = None,
        on_transfer: Callable[[TransferStats], None] = lambda _: None,
        timers: Timers = PRODUCTION,
        transport: Transport | None = None,
        copier: Copier = PLAIN,
        strict: bool = False,
        memory: RequestMemory | None = None,
    ) -> None:
        self.engine = engine
        self.memory = memory or RequestMemory(MemoryBudget(uploads=UPLOADS, images=IMAGES))
        self.incarnation = incarnation
        self.embed_layout = embed_layout
        self.kv_layout = kv_layout
        self.timers = timers
        self.transport: Transport = transport or ByteStream()
        self.copier = copier
        self.num_refused: Counter[Refusal] = Counter()
        self.num_violations = 0
        self._strict = strict
        self._suspects: dict[str, int] = {}
        self._supervisor = Supervisor()
        leases = LeaseTable(timers)
        self.transfers = TransferRegistry(
            incarnation=incarnation, free=self._free, clock=time.monotonic, leases=leases
        )
        self.peers = Peers(timers, sources, self._supervisor)
        self.accepting = True
        self.on_transfer = on_transfer
        self._delays = dict(delays or {})
        self._history = CallHistory()
        self._calls: set[Call] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._makers = ThreadPoolExecutor(1, thread_name_prefix="make-ahead")

    def start(self) -> None:
        """Start sweeping leases."""
        self._supervisor.start(self._sweep, name="sweep leases", at_end=AtEnd.FAIL)

    async def close(self) -> None:
        """Stop sweeping, wait for the background tasks, and disconnect from the peers."""
        await self._supervisor.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.peers.close()
        self.transfers.close()
        self.transport.close()
        self._makers.shutdown(wait=False)

    @property
    def num_inflight(self) -> int:
        """Calls in flight and leases that a peer may still use; 0 is empty."""
        return len(self._calls) + len(self.transfers.leases) + len(self._tasks)

    @property
    def unhealthy_reason(self) -> str | None:
        """Why this process must be restarted; None while it is healthy."""
        if self._strict and self.num_violations:
            return f"{self.num_violations} accounting mismatches"
        return self._supervisor.unhealthy_reason or self.transport.account.unhealthy_reason

    @property
    def outstanding(self) -> dict[str, int]:
        """Counts of everything that has not ended, by kind; all 0 at rest."""
        return {
            "calls": len(self._calls),
            "clean-ups": len(self._tasks),
            **self.transfers.outstanding,
            "leases held at peers": self.peers.num_held,
            "exposed memory": self.transport.account.num_exposed,
        }

    @contextlib.contextmanager
    def call(
        self, name: str, key: RequestKey, *, last_resort: bool | None = None
    ) -> Iterator[Call]:
        """Register one call; `last_resort` None marks calls that draining does not refuse.

        Raises:
            DrainingError: this worker takes no new work.
            DuplicateError: this attempt made this call before.
            CancelledError: the attempt was cancelled, before the call or during it.
        """
        if last_resort is False and not self.accepting:
            raise DrainingError("this worker is draining and takes no new work")
        now = time.monotonic()
        if self._history.was_cancelled(key, now=now):
            raise CancelledError(f"attempt {key.attempt} was cancelled")
        if not self._history.begin(name, key, now=now):
            raise DuplicateError(f"{name} was called before with attempt {key.attempt}")
        task = asyncio.current_task()
        assert task is not None
        call = Call(name, key, task)
        self._calls.add(call)
        try:
            yield call
        except asyncio.CancelledError:
            if call.error is not None and task.uncancel() == 0:
                raise call.error from None
            raise
        except OverloadedError:
            # rejected before it acquired anything: the same attempt may call again
            self._history.forget(name, key)
            raise
        finally:
            self._calls.discard(call)

    async def cancel(self, request_id: str, attempt: int) -> CancelOutcome:
        """End an attempt, or with attempt 0 all of them, and free what they hold."""
        if attempt:
            return await self._cancel(RequestKey(request_id, attempt))
        owners = {call.key for call in self._calls} | self.transfers.leases.owners()
        found = [await self._cancel(key) for key in owners if key.request_id == request_id]
        return max(found, key=lambda outcome: outcome.value, default=CancelOutcome.NOT_FOUND)

    async def end_attempt(self, key: RequestKey) -> None:
        """End and free an attempt whose call failed here or lost its caller."""
        await self._end(key, CancelledError(f"attempt {key.attempt} was given up"))

    async def _cancel(self, key: RequestKey) -> CancelOutcome:
        self._history.cancel(key, now=time.monotonic())
        error = CancelledError(f"attempt {key.attempt} was cancelled by its caller")
        return await self._end(key, error)

    async def _end(self, key: RequestKey, error: CancelledError) -> CancelOutcome:
        ending = [call for call in self._calls if call.key == key]
        in_flight = self.transfers.cancel(key, error)
        outcome = CancelOutcome((await self.engine.cancel(key)).value)
        # only the calls above: a call that was refused as overloaded may have been repeated
        for call in self._calls.intersection(ending):
            if call.error is None:
                call.error = error
                call.task.cancel()
        return CancelOutcome.CANCEL_REQUESTED_IN_FLIGHT if in_flight else outcome

    def refused(self, refusal: Refusal) -> None:
        """Count a transfer that was rejected."""
        self.num_refused[refusal] += 1

    def send(self, outgoing: Producer, call: FetchCall, *, large: bool = False) -> FrameBatches:
        """The frames of a consumer's fetch; payloads out of band, if it has the same transport."""
        return outgoing.frame_batches(
            call.key,
            first_unit=call.first_unit,
            transport=self.transport if call.transport == self.transport.name else None,
            invitation=call.invitation,
            large=large,
        )

    def prebuild_frames(self, outgoing: Producer) -> None:
        """Build the frames of finished units in the background, before a consumer asks."""
        self.run(outgoing.prebuild_frames(self._makers, self.transport))

    async def delay(self, stage: str) -> None:
        """Wait for the seconds of `--inject-delay-ms`."""
        seconds = self._delays.get(stage)
        if seconds:
            await asyncio.sleep(seconds)

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a task that outlives the caller; log its failure."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("clean-up failed", exc_info=error)

    def _free(self, lease: Lease) -> None:
        if lease.item is not None:
            self.engine.release_embedding(lease.owner, lease.item)
        else:
            self.run(self.engine.release(lease.owner))

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self.timers.sweep)
            self.transfers.sweep()
            self._check_idle()

    def _check_idle(self) -> None:
        """Report counts that stay above 0 for `SUSPECT_SWEEPS` sweeps while nothing is in flight.

        Calls that a peer keeps open do not count; they end by deadline or ping. The engine may
        finish a long step before it executes a command.
        """
        owed = self._calls or self._tasks or self.transfers.leases
        outstanding = {
            **self.outstanding,
            "sequences, reservations and pins": self.engine.stats().inflight,
        }
        self._suspects = {
            name: self._suspects.get(name, 0) + 1
            for name, count in outstanding.items()
            if count and not owed
        }
        for name, num_sweeps in self._suspects.items():
            if num_sweeps == SUSPECT_SWEEPS:
                self.num_violations += 1
                logger.error("resource not freed", extra={"what": name, "count": outstanding[name]})


class CallTimer:
    """Starts when the call arrives. Instants are `time.monotonic()`, the engine's clock too."""

    def __init__(self) -> None:
        self.arrived = time.monotonic()

    def now(self) -> float:
        """Seconds since the call arrived."""
        return time.monotonic() - self.arrived

    def span(self, stage: str, start: float, end: float | None = None, item: int = 0) -> StageSpan:
        """A span between two instants of the monotonic clock; `end` None is now."""
        end = time.monotonic() if end is None else end
        return StageSpan(stage, start - self.arrived, end - self.arrived, item)
