"""A request from its first attempt to its last word: another route when a pod is lost or drains."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from vlm_worker.errors import (
    CancelledError,
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
from vlm_worker.gateway.orchestrate.attempt import Attempt
from vlm_worker.gateway.orchestrate.background import Background
from vlm_worker.gateway.orchestrate.job import Answer, Emit, Job
from vlm_worker.gateway.orchestrate.recovery import Place, Recovery
from vlm_worker.gateway.orchestrate.reserving import wait_seconds
from vlm_worker.gateway.orchestrate.routing import Routing
from vlm_worker.gateway.orchestrate.trace import Trace
from vlm_worker.gateway.registry import Registry
from vlm_worker.route import NoRoute, Route, choose
from vlm_worker.types import FinishReason

logger = logging.getLogger(__name__)

# A request is moved so often; then the client is told.
MAX_RETRIES = 3

# Another pod may well do it. What a worker cancelled without our asking, its end cancelled.
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
    """One request. `answer` holds what was delivered, whatever happens.

    `place` is left when a pod has room. `heartbeat` is called now and then while the client waits
    for a pod to come back.
    """

    def __init__(
        self,
        job: Job,
        emit: Emit,
        *,
        trace: Trace,
        registry: Registry,
        background: Background,
        recovery: Recovery,
        place: Place,
        heartbeat: Callable[[], Awaitable[None]],
    ) -> None:
        self._job = job
        self._trace = trace
        self._registry = registry
        self._background = background
        self._recovery = recovery
        self._place = place
        self._routing = Routing(
            job, trace=trace, registry=registry, recovery=recovery, heartbeat=heartbeat
        )
        self._failed: set[bytes] = set()
        self.num_retries = 0
        self.answer = Answer(emit)

    async def run(self) -> FinishReason:
        """Generate until the answer is complete.

        Raises:
            WorkerError: nobody can (NoRouteError), nobody may (InvalidRequestError), or too many
                pods were lost on the way.
        """
        deadline = self._trace.clock() + self._job.max_wait_seconds
        number = 0
        self._recovery.budget.request()
        while True:
            number += 1
            if len(self.answer.token_ids) >= self._job.sampling.max_tokens:
                return FinishReason.LENGTH
            attempt = Attempt(
                self._job,
                await self._routing.find(self._choose),
                number=number,
                answer=self.answer,
                trace=self._trace,
                registry=self._registry,
                background=self._background,
                place=self._place,
            )
            num_delivered = len(self.answer.token_ids)
            try:
                return await attempt.run()
            except OverloadedError as error:
                await self._make_room(error, attempt, deadline)
            except _RETRYABLE as error:
                went_on = len(self.answer.token_ids) > num_delivered
                self._retry(error, attempt, number, went_on=went_on)
                await self._settle()
            self.answer.forget_early()

    def _choose(self) -> Route | NoRoute:
        demand = self._job.demand(len(self.answer.token_ids))
        return choose(self._registry.candidates(), demand, failed=frozenset(self._failed))

    async def _make_room(self, error: OverloadedError, attempt: Attempt, deadline: float) -> None:
        """Go where nobody refused; else come back when asked to, while it may wait."""
        self._failed |= attempt.blamed
        if self._has_other_pods():
            return
        if self._trace.clock() >= deadline:
            raise error
        await asyncio.sleep(wait_seconds(error))

    def _has_other_pods(self) -> bool:
        """There is a route without pods that failed this request."""
        route = self._choose()
        return isinstance(route, Route) and self._failed.isdisjoint(p.boot_id for p in route.pods)

    async def _settle(self) -> None:
        """Where there are no others, let lost pods be found lost, or come back, before going on."""
        await self._registry.wait_until(
            lambda: self._has_other_pods() or isinstance(self._choose(), NoRoute),
            timeout=self._registry.timers.retry,
        )

    def _retry(self, error: WorkerError, attempt: Attempt, number: int, *, went_on: bool) -> None:
        """Count a loss; raises it where it was one too many, for this request or for all."""
        self._failed |= attempt.blamed
        self.num_retries += 1
        logger.warning(
            "attempt lost",
            extra={
                "request_id": self._job.request_id,
                "attempt": number,
                "num_delivered": len(self.answer.token_ids),
                "reason": f"{type(error).__name__}: {error}",
            },
        )
        once_only = isinstance(error, EngineError | IncompatibleError)
        if self.num_retries > (1 if once_only else MAX_RETRIES):
            raise error
        if not went_on and not self._recovery.budget.take(now=self._recovery.clock()):
            logger.warning("no retry left", extra={"request_id": self._job.request_id})
            raise error
