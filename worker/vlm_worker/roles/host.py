"""What the stages of one process share: the engine, the offers, the calls being worked on.

scope(name, key) ── replies ... last word        one call of one attempt
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
from vlm_worker.core.memory import MemoryBudget
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
from vlm_worker.roles.history import History
from vlm_worker.roles.memory import RequestMemory
from vlm_worker.roles.offers import Life, Offers
from vlm_worker.settings.timers import PRODUCTION, Timers
from vlm_worker.transfer.outgoing import Outgoing
from vlm_worker.transfer.peers import Peers
from vlm_worker.transfer.supervising import Supervisor
from vlm_worker.transfer.transport import ByteStream, Transport
from vlm_worker.types import EmbedLayout, KVLayout, RequestKey
from vlm_worker.wire.calls import CancelOutcome, FetchCall
from vlm_worker.wire.copying import PLAIN, Copier
from vlm_worker.wire.frames import Runs

logger = logging.getLogger(__name__)


SUSPECT_SWEEPS: Final = 10
UPLOADS: Final = 512 << 20
IMAGES: Final = 1536 << 20
"""Bytes of images' files, and of decoded images, if nobody says how many."""


@dataclasses.dataclass(eq=False, slots=True)
class Scope:
    """One call being worked on. `error` is set by who ends it from outside."""

    name: str
    key: RequestKey
    task: asyncio.Task[Any]
    error: WorkerError | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer that this worker pulled; `kind` is `embed` or `kv`."""

    kind: str
    seconds: float
    num_bytes: int


class Host:
    """The shared state of the roles. Lives on one event loop; `start` and `close` it.

    `delays` holds seconds by stage, for tests. `accepting` is False while draining. `on_transfer`
    is told of every transfer pulled. `sources` says from where it may fetch. `transport` is how
    bytes go where both sides have it, and `copier` copies what is fetched from here. `memory` is
    what its requests may hold.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        life: Life,
        embed_layout: EmbedLayout,
        kv_layout: KVLayout | None,
        sources: Sources,
        delays: Mapping[str, float] | None = None,
        on_transfer: Callable[[Transfer], None] = lambda _: None,
        timers: Timers = PRODUCTION,
        transport: Transport | None = None,
        copier: Copier = PLAIN,
        strict: bool = False,
        memory: RequestMemory | None = None,
    ) -> None:
        self.engine = engine
        self.memory = memory or RequestMemory(MemoryBudget(uploads=UPLOADS, images=IMAGES))
        self.life = life
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
        self.offers = Offers(life=life, free=self._free, clock=time.monotonic, leases=leases)
        self.peers = Peers(timers, sources, self._supervisor)
        self.accepting = True
        self.on_transfer = on_transfer
        self._delays = dict(delays or {})
        self._history = History()
        self._scopes: set[Scope] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._makers = ThreadPoolExecutor(1, thread_name_prefix="make-ahead")

    def start(self) -> None:
        """Begin to sweep leases."""
        self._supervisor.start(self._sweep(), name="sweep leases")

    async def close(self) -> None:
        """Stop sweeping, wait for what runs in the background, and leave the peers."""
        await self._supervisor.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.peers.close()
        self.offers.close()
        self.transport.close()
        self._makers.shutdown(wait=False)

    @property
    def num_inflight(self) -> int:
        """Calls being worked on and leases that somebody may still use; 0 is empty."""
        return len(self._scopes) + len(self.offers.leases) + len(self._tasks)

    @property
    def complaint(self) -> str | None:
        """Why this process had better start anew; None while it is well."""
        if self._strict and self.num_violations:
            return f"{self.num_violations} promises of the books are broken"
        return self._supervisor.complaint or self.transport.ledger.complaint

    @property
    def left(self) -> dict[str, int]:
        """All that is owed to somebody, or was forgotten, by what it is; all 0 at rest."""
        return {
            "calls": len(self._scopes),
            "clean-ups": len(self._tasks),
            **self.offers.left,
            "leases held at peers": self.peers.num_held,
            "exposed memory": self.transport.ledger.num_exposed,
        }

    @contextlib.contextmanager
    def scope(
        self, name: str, key: RequestKey, *, last_resort: bool | None = None
    ) -> Iterator[Scope]:
        """Work on one call; `last_resort` None marks calls that draining does not refuse.

        Raises:
            DrainingError: this worker takes no new work.
            DuplicateError: this attempt made this call before.
            CancelledError: it was cancelled, before or meanwhile.
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
        scope = Scope(name, key, task)
        self._scopes.add(scope)
        try:
            yield scope
        except asyncio.CancelledError:
            if scope.error is not None and task.uncancel() == 0:
                raise scope.error from None
            raise
        except OverloadedError:
            # refused for lack of room, nothing was done: the same attempt may ask again
            self._history.forget(name, key)
            raise
        finally:
            self._scopes.discard(scope)

    async def cancel(self, request_id: str, attempt: int) -> CancelOutcome:
        """End an attempt, or with attempt 0 all of them, and free what they hold."""
        if attempt:
            return await self._cancel(RequestKey(request_id, attempt))
        owners = {scope.key for scope in self._scopes} | self.offers.leases.owners()
        found = [await self._cancel(key) for key in owners if key.request_id == request_id]
        return max(found, key=lambda outcome: outcome.value, default=CancelOutcome.NOT_FOUND)

    async def abandon(self, key: RequestKey) -> None:
        """End and free an attempt whose call failed here or lost its caller."""
        await self._end(key, CancelledError(f"attempt {key.attempt} was given up"))

    async def _cancel(self, key: RequestKey) -> CancelOutcome:
        self._history.cancel(key, now=time.monotonic())
        error = CancelledError(f"attempt {key.attempt} was cancelled by its caller")
        return await self._end(key, error)

    async def _end(self, key: RequestKey, error: CancelledError) -> CancelOutcome:
        ending = [scope for scope in self._scopes if scope.key == key]
        in_flight = self.offers.cancel(key, error)
        outcome = CancelOutcome((await self.engine.cancel(key)).value)
        # one that came meanwhile is another call: what was refused for want of room may come again
        for scope in self._scopes.intersection(ending):
            if scope.error is None:
                scope.error = error
                scope.task.cancel()
        return CancelOutcome.CANCEL_REQUESTED_IN_FLIGHT if in_flight else outcome

    def refused(self, refusal: Refusal) -> None:
        """Count a transfer that was void."""
        self.num_refused[refusal] += 1

    def send(self, outgoing: Outgoing, call: FetchCall, *, large: bool = False) -> Runs:
        """What a consumer asked for (`Outgoing.runs`); bytes by its transport, where it is ours."""
        return outgoing.runs(
            call.key,
            first_unit=call.first_unit,
            transport=self.transport if call.transport == self.transport.name else None,
            invitation=call.invitation,
            large=large,
        )

    def make_ahead(self, outgoing: Outgoing) -> None:
        """Make what is finished ready for its consumer, beside all else (`Outgoing.make_ahead`)."""
        self.run(outgoing.make_ahead(self._makers, self.transport))

    async def delay(self, stage: str) -> None:
        """Wait as `--inject-delay-ms` says."""
        seconds = self._delays.get(stage)
        if seconds:
            await asyncio.sleep(seconds)

    def run(self, work: Coroutine[Any, Any, Any]) -> None:
        """Do something whatever becomes of the caller; a failure is logged."""
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
            self.offers.sweep()
            self._check_idle()

    def _check_idle(self) -> None:
        """Find what nobody is owed and is here all the same, so many sweeps in a row.

        Calls that peers merely keep open are no promise of ours; they end by deadline or ping. The
        engine may be in a long step before it does what it was told.
        """
        owed = self._scopes or self._tasks or self.offers.leases
        left = {**self.left, "sequences, reservations and pins": self.engine.stats().inflight}
        self._suspects = {
            name: self._suspects.get(name, 0) + 1
            for name, count in left.items()
            if count and not owed
        }
        for name, num_sweeps in self._suspects.items():
            if num_sweeps == SUSPECT_SWEEPS:
                self.num_violations += 1
                logger.error("it did not come back", extra={"what": name, "count": left[name]})
