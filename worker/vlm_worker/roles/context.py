"""The state that the roles of one process share: engine, attempts, peers, clean-ups."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Final

from vlm_worker.core.grammars import Matcher
from vlm_worker.core.leases import Lease, LeaseTable
from vlm_worker.core.request_memory import MemoryBudget
from vlm_worker.core.sources import Sources
from vlm_worker.engine.engine import Engine
from vlm_worker.errors import DrainingError, Refusal
from vlm_worker.roles.attempt_registry import AttemptHandle, AttemptRegistry, EndReason, Incarnation
from vlm_worker.roles.request_memory import RequestMemory
from vlm_worker.settings.timers import PRODUCTION, Timers
from vlm_worker.supervision import AtEnd, Supervisor
from vlm_worker.transfer.peers import Peers
from vlm_worker.transfer.producer import Producer
from vlm_worker.transfer.transport import ByteStream, Transport
from vlm_worker.types import EmbedLayout, KVLayout, Request, RequestKey, StageSpan
from vlm_worker.wire.buffers import PLAIN, Copier
from vlm_worker.wire.frames import FrameBatches
from vlm_worker.wire.identity_store import IdentityStore
from vlm_worker.wire.messages import FetchCall

logger = logging.getLogger(__name__)

SUSPECT_SWEEPS: Final = 10
UPLOADS: Final = 512 << 20
IMAGES: Final = 1536 << 20
"""Default limit in bytes for image files, and for decoded images."""


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
    limits what the requests hold. `identity` authenticates this worker to its peers.
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
        identity: IdentityStore | None = None,
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
        self._num_suspect_sweeps = 0
        self._supervisor = Supervisor()
        self.attempts = AttemptRegistry(
            incarnation=incarnation,
            free=self._free,
            end_in_engine=engine.cancel,
            leases=LeaseTable(timers),
        )
        self.peers = Peers(timers, sources, self._supervisor, identity=identity)
        self.accepting = True
        self.on_transfer = on_transfer
        self._delays = dict(delays or {})
        self._tasks: set[asyncio.Task[Any]] = set()
        self._frame_builder = ThreadPoolExecutor(1, thread_name_prefix="prebuild-frames")

    def start(self) -> None:
        self._supervisor.start(self._sweep, name="sweep leases", at_end=AtEnd.FAIL)

    async def matcher(self, request: Request) -> Matcher | None:
        """The matcher of a request's grammar, if it has one: no step waits while it is compiled.

        Raises InvalidRequestError if it cannot be used.
        """
        constraints = self.engine.constraints
        if not request.sampling.grammar or constraints is None:
            return None
        return await constraints.prepare(request)

    async def close(self) -> None:
        """Stop sweeping, wait for the background tasks, and disconnect from the peers."""
        await self._supervisor.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.peers.close()
        self.attempts.close()
        self.transport.close()
        self._frame_builder.shutdown(wait=False)

    @property
    def num_inflight(self) -> int:
        """Calls in flight and leases that a peer may still use; 0 is empty."""
        outstanding = self.attempts.outstanding
        return outstanding["calls"] + outstanding["leases"] + len(self._tasks)

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
            "clean-ups": len(self._tasks),
            **self.attempts.outstanding,
            "leases held at peers": self.peers.num_held,
            "exposed memory": self.transport.account.num_exposed,
            "sequences, reservations and pins": self.engine.stats().inflight,
        }

    def call(
        self, name: str, key: RequestKey, *, last_resort: bool | None = None
    ) -> AbstractContextManager[AttemptHandle]:
        """Register one call; `last_resort` None marks calls that draining does not refuse.

        Raises:
            DrainingError: this worker takes no new work.
            DuplicateError, CancelledError: see `AttemptRegistry.call`.
        """
        if last_resort is False and not self.accepting:
            raise DrainingError("this worker is draining and takes no new work")
        return self.attempts.call(name, key)

    def give_up(self, handle: AttemptHandle) -> None:
        """End and free an attempt whose call failed here or lost its caller, in the background."""
        self.run(handle.end(EndReason.GIVEN_UP))

    def refused(self, refusal: Refusal) -> None:
        self.num_refused[refusal] += 1

    def fetch(self, call: FetchCall, *, fingerprint: bytes, large: bool) -> FrameBatches:
        """The frames of a consumer's fetch; payloads out of band if it has the same transport.

        Raises:
            GoneError, IncompatibleError: see `AttemptRegistry.find`.
        """
        return self.attempts.find(call, fingerprint=fingerprint).frame_batches(
            call.key,
            first_unit=call.first_unit,
            transport=self.transport if call.transport == self.transport.name else None,
            invitation=call.invitation,
            large=large,
        )

    def prebuild_frames(self, producer: Producer) -> None:
        """Build the frames of finished units in the background, before a consumer asks."""
        self.run(producer.prebuild_frames(self._frame_builder, self.transport))

    async def delay(self, stage: str) -> None:
        """Wait for the seconds of `--inject-delay-ms`."""
        if stage in self._delays:
            await asyncio.sleep(self._delays[stage])

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
            self.attempts.sweep()
            self._check_idle()

    def _check_idle(self) -> None:
        """Report what is held for `SUSPECT_SWEEPS` sweeps while nothing is in flight.

        Calls that a peer keeps open do not count; they end by deadline or ping. The engine may
        finish a long step before it executes a command.
        """
        held = {name: count for name, count in self.outstanding.items() if count}
        if not held or self.num_inflight:
            self._num_suspect_sweeps = 0
            return
        self._num_suspect_sweeps += 1
        if self._num_suspect_sweeps == SUSPECT_SWEEPS:
            self.num_violations += 1
            logger.error("resources not freed", extra={"resources": held})


class CallTimer:
    """Starts when the call arrives. Instants are `time.monotonic()`, the engine's clock too."""

    def __init__(self) -> None:
        self.arrived = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self.arrived

    def span(self, stage: str, start: float, end: float | None = None, item: int = 0) -> StageSpan:
        """A span between two instants of the monotonic clock; `end` None is now."""
        end = time.monotonic() if end is None else end
        return StageSpan(stage, start - self.arrived, end - self.arrived, item)
