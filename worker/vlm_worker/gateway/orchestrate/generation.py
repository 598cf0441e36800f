"""Generate one answer: attempt after attempt, on another route if a pod is lost or drains.

Each attempt gets a route. Limits bound its retries, and the wait if a stage has no pod:

retry     a stream that delivered tokens is moved whenever its pods are lost; an attempt that
          delivered nothing takes from the budget, so that retries add at most a tenth to the load
patience  a deadline for a pool that lost its pods; later requests share the same deadline
encoder   a pool at zero: if the settings hold image requests for it, wait until their deadline
wake      a service at zero: wait for its pods, until the request's deadline
limit     a request beyond the limit of waiting requests gets a 429 with `Retry-After` at once
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Final, Self

from vlm_worker.errors import (
    CancelledError,
    ContextTooLongError,
    CorruptTransferError,
    DrainingError,
    DuplicateError,
    EngineError,
    GoneError,
    IncompatibleError,
    OverloadedError,
    PeerLostError,
    WorkerError,
)
from vlm_worker.gateway.api.errors import invalid
from vlm_worker.gateway.memory import Bound, FullError
from vlm_worker.gateway.orchestrate.attempt import Attempt, wait_seconds
from vlm_worker.gateway.orchestrate.prepared_request import DeliveredTokens, Emit, PreparedRequest
from vlm_worker.gateway.orchestrate.ttft_trace import Trace
from vlm_worker.gateway.orchestrate.wake import wait_for_pods, waits, wakes
from vlm_worker.gateway.pod_registry import Registry
from vlm_worker.gateway.waiters import Place
from vlm_worker.route import NoRoute, Route, choose
from vlm_worker.types import FinishReason, Request, Role, Stage

logger = logging.getLogger(__name__)

# After this many retries the client gets the error.
MAX_RETRIES = 3

# Another pod may succeed. A worker that ends cancels its calls: CancelledError.
_RETRYABLE = (
    CancelledError,
    PeerLostError,
    DrainingError,
    GoneError,
    DuplicateError,
    IncompatibleError,
    CorruptTransferError,
    EngineError,
)


class Generation:
    """The generation of one choice. `delivered` has the delivered tokens, also after an error.

    The generation releases `ticket` when a pod admits the request.
    """

    def __init__(self, routing: Routing, emit: Emit, *, ticket: AdmissionTicket) -> None:
        self._routing = routing
        self._prepared = routing.prepared
        self._trace = routing.trace
        self._registry = routing.registry
        self._retry_policy = routing.retry_policy
        self._ticket = ticket
        self._failed: set[bytes] = set()
        self.num_retries = 0
        self.route: Route | None = None  # of the last attempt
        self.request: Request | None = None  # of the attempt that succeeded
        self.delivered = DeliveredTokens(emit)

    @property
    def shows_no_answer(self) -> bool:
        """Whether its tokens are not shown: the client wants the prompt alone."""
        return self._prepared.echo.no_answer

    async def run(self) -> FinishReason:
        """Generate until the answer is complete.

        Raises:
            WorkerError: no pod can serve it (NoRouteError), the request is invalid
                (InvalidRequestError), or too many pods were lost.
        """
        began = self._trace.clock()
        number = 0
        self._retry_policy.budget.request()
        while True:
            number += 1
            if len(self.delivered.token_ids) >= self._prepared.sampling.max_tokens:
                return FinishReason.LENGTH
            route = self.route = await self._routing.find(self._choose)
            self._registry.caches.count(route)
            attempt = Attempt(
                self._prepared,
                route,
                number=number,
                delivered=self.delivered,
                trace=self._trace,
                registry=self._registry,
                on_admitted=self._ticket.leave,
            )
            num_delivered = len(self.delivered.token_ids)
            try:
                reason = await attempt.run()
                self.request = attempt.request
                return reason
            except OverloadedError as error:
                patience = self._prepared.max_wait_seconds + self._trace.wake_seconds
                await self._wait_for_capacity(error, attempt, began + patience)
            except _RETRYABLE as error:
                went_on = len(self.delivered.token_ids) > num_delivered
                self._retry(error, attempt, number, went_on=went_on)
                await self._settle()
            self.delivered.forget_early()

    def _choose(self) -> Route | NoRoute:
        demand = self._prepared.demand(len(self.delivered.token_ids), self._registry.caches)
        return choose(self._registry.candidates(), demand, failed=frozenset(self._failed))

    async def _wait_for_capacity(
        self, error: OverloadedError, attempt: Attempt, deadline: float
    ) -> None:
        """Continue if pods that have not rejected the request exist; else wait and retry."""
        self._failed |= attempt.pods.failed_boot_ids
        if self._has_other_pods():
            return
        if self._trace.clock() >= deadline:
            raise error
        await asyncio.sleep(wait_seconds(error))

    def _has_other_pods(self) -> bool:
        route = self._choose()
        return isinstance(route, Route) and self._failed.isdisjoint(p.boot_id for p in route.pods)

    async def _settle(self) -> None:
        """If no other pods exist, wait until the lost pods are detected as lost or are back."""
        await self._registry.waiters.wait_until(
            lambda: self._has_other_pods() or isinstance(self._choose(), NoRoute),
            timeout=self._registry.timers.retry,
        )

    def _retry(self, error: WorkerError, attempt: Attempt, number: int, *, went_on: bool) -> None:
        """Count a retry. Raise `error` if a limit of the request or of the gateway is reached."""
        self._failed |= attempt.pods.failed_boot_ids
        self.num_retries += 1
        logger.warning(
            "attempt lost",
            extra={
                "request_id": self._prepared.request_id,
                "attempt": number,
                "num_delivered": len(self.delivered.token_ids),
                "reason": f"{type(error).__name__}: {error}",
            },
        )
        once_only = isinstance(error, EngineError | IncompatibleError)
        if self.num_retries > (1 if once_only else MAX_RETRIES):
            raise error
        if not went_on and not self._retry_policy.budget.take(now=self._retry_policy.clock()):
            logger.warning("no retry left", extra={"request_id": self._prepared.request_id})
            raise error


# The requests that one pod runs at once: if it fails, all of them may be retried.
BURST_RETRIES: Final = 256.0
RETRIES_PER_REQUEST: Final = 0.1
RETRIES_PER_SECOND: Final = 1.0


class RetryBudget:
    """A token bucket of retries, filled by requests and by time. `now` is in seconds."""

    def __init__(self, burst: float, *, now: float) -> None:
        self._burst = burst
        self._remaining = burst
        self._filled_at = now

    def request(self) -> None:
        """Add `RETRIES_PER_REQUEST` for a new request."""
        self._remaining = min(self._burst, self._remaining + RETRIES_PER_REQUEST)

    def take(self, *, now: float) -> bool:
        """Take a retry; False if none is left."""
        passed, self._filled_at = now - self._filled_at, now
        self._remaining = min(self._burst, self._remaining + RETRIES_PER_SECOND * passed)
        if self._remaining < 1:
            return False
        self._remaining -= 1
        return True


class RequestLimit:
    """Limit of requests that no pod has admitted yet."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tickets: set[AdmissionTicket] = set()

    @property
    def num_waiting(self) -> int:
        return len(self._tickets)

    def check(self) -> None:
        """Raise FullError, with a retry time, if the limit is reached."""
        if len(self._tickets) >= self._size:
            raise FullError(
                f"{len(self._tickets)} requests wait for a worker already, as many as may.",
                Bound.WAITING,
            )

    def enter(self) -> AdmissionTicket:
        """Admit one more request. Raises as `check` does."""
        self.check()
        ticket = AdmissionTicket(self._tickets)
        self._tickets.add(ticket)
        return ticket

    @contextlib.contextmanager
    def paused(self, ticket: AdmissionTicket) -> Iterator[None]:
        """Do not count a request that waits for no worker. At the end, raises as `check` does."""
        ticket.leave()
        yield
        self.check()
        self._tickets.add(ticket)

    @contextlib.contextmanager
    def enter_more(self, first: AdmissionTicket, count: int) -> Iterator[list[AdmissionTicket]]:
        """Admit the rest of `count` requests, of which `first` is admitted.

        Raises:
            ApiError: 400; so many may never wait.
            FullError: as `check` does.
        """
        if count > self._size:
            raise invalid(
                f"'prompt' has {count} prompts, and {self._size} requests may wait on this "
                "service: send fewer at once.",
                param="prompt",
            )
        with contextlib.ExitStack() as exits:
            yield [first, *(exits.enter_context(self.enter()) for _ in range(count - 1))]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class AdmissionTicket:
    """Counts one request, in `tickets`, until a pod admits it or it ends."""

    tickets: set[AdmissionTicket]

    def leave(self) -> None:
        """Stop counting the request; idempotent."""
        self.tickets.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.leave()


class RetryPolicy:
    """The retry budget, the patience and the request limit of one gateway.

    After a pool lost its pods, a request waits up to `patience_seconds` for another pod. At most
    `max_waiting` requests wait for admission by a pod.
    """

    def __init__(
        self,
        *,
        patience_seconds: float,
        max_waiting: int,
        clock: Callable[[], float],
        burst_retries: float = BURST_RETRIES,
    ) -> None:
        self.clock = clock
        self.patience_seconds = patience_seconds
        self.budget = RetryBudget(burst_retries, now=clock())
        self.request_limit = RequestLimit(max_waiting)


class NoRouteError(WorkerError):
    """No pod for a stage of the request; `stage` is the stage, the message the reason."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage


class NoEncoderError(NoRouteError):
    """No encoder pod, and no other pod may encode the images.

    `held_seconds` is the limit on its wait for one; 0 if the settings allow no wait.
    """

    def __init__(self, message: str, *, held_seconds: float) -> None:
        super().__init__(Stage.ENCODER, message)
        self.held_seconds = held_seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Routing:
    """Route selection of one request. It calls `heartbeat` while the request waits."""

    prepared: PreparedRequest
    trace: Trace
    registry: Registry
    retry_policy: RetryPolicy
    heartbeat: Callable[[], Awaitable[None]]

    async def find(self, choose: Callable[[], Route | NoRoute]) -> Route:
        """Call `choose` until it returns a route or the request may not wait longer.

        Raises:
            NoRouteError: a stage has no pod.
            NotAwakeError: a stage has no pod yet, in a service that scales to zero.
            ContextTooLongError: the prompt exceeds the KV cache of every pod.
        """
        route = choose()
        if wakes(route, self.prepared, self.registry):
            route = await wait_for_pods(self, choose)
        with self.place() as place:
            while waits(route):
                assert isinstance(route, NoRoute)
                remaining = self._wait_until(route.stage) - self.trace.clock()
                if remaining <= 0:
                    break
                timeout = min(remaining, self.registry.timers.heartbeat)
                with self._held() if self._lacks_encoder(route) else contextlib.nullcontext():
                    await place.wait_until(
                        lambda: not waits(choose()),
                        timeout=timeout,
                        group=self.lack(route.stage),
                    )
                route = choose()
                if isinstance(route, NoRoute):
                    await self.heartbeat()
        if isinstance(route, Route):
            return route
        if route.capacity_tokens is not None:
            raise ContextTooLongError(f"No pod has KV cache for this request: {route.reason}.")
        if self._lacks_encoder(route):
            raise NoEncoderError(route.reason, held_seconds=self.prepared.max_hold_seconds)
        raise NoRouteError(route.stage, route.reason)

    def place(self) -> contextlib.AbstractContextManager[Place]:
        """Return a place among the requests that wait, which lasts over heartbeats."""
        prepared = self.prepared
        return self.registry.waiters.place(tenant=prepared.tenant, seconds=prepared.work_seconds)

    def lack(self, stage: Stage) -> tuple[object, ...]:
        """Return the group of the request: new pods help all requests of a group or none."""
        prepared = self.prepared
        sampling = prepared.sampling
        needs = bool(prepared.images), sampling.max_tokens > 1, bool(sampling.grammar)
        is_scored = sampling.num_prompt_logprobs is not None
        abilities = bool(sampling.min_tokens), is_scored, prepared.embed_layout
        return (stage, prepared.inline, *needs, *abilities)

    def _lacks_encoder(self, route: NoRoute) -> bool:
        """Whether only an encoder pod can help."""
        return route.stage is Stage.ENCODER and not self.prepared.inline

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Count the wait for an encoder pod as time in its queue."""
        self.trace.gateway_waits()
        with self.registry.held_for_pool(Role.ENCODER), self.trace.stage("encoder_queue"):
            yield
        self.trace.gateway_works()

    def _wait_until(self, stage: Stage) -> float:
        """Return until when the request waits for a pod of a stage."""
        until = self._replaced_by(stage)
        if stage is Stage.ENCODER and not self.prepared.inline:
            until = max(until, self.trace.received + self.prepared.max_hold_seconds)
        return until

    def _replaced_by(self, stage: Stage) -> float:
        """Return until when to wait for a replacement of lost pods; 0 if none was lost."""
        lost_at = self.registry.lost_at(stage)
        return 0.0 if lost_at is None else lost_at + self.retry_policy.patience_seconds
