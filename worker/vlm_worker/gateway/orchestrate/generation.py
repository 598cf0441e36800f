"""Generate one answer: attempt after attempt, on another route if a pod is lost or drains."""

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
from vlm_worker.gateway.orchestrate.attempt import Attempt, wait_seconds
from vlm_worker.gateway.orchestrate.prepared_request import DeliveredTokens, Emit, PreparedRequest
from vlm_worker.gateway.orchestrate.route_selection import (
    AdmissionTicket,
    BackgroundTasks,
    RetryPolicy,
    Routing,
)
from vlm_worker.gateway.orchestrate.ttft_trace import Trace
from vlm_worker.gateway.pod_registry import Registry
from vlm_worker.route import NoRoute, Route, choose
from vlm_worker.types import FinishReason

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

    The generation releases `ticket` when a pod admits the request. It calls `heartbeat` while the
    client waits for a pod.
    """

    def __init__(
        self,
        prepared: PreparedRequest,
        emit: Emit,
        *,
        trace: Trace,
        registry: Registry,
        background: BackgroundTasks,
        retry_policy: RetryPolicy,
        ticket: AdmissionTicket,
        heartbeat: Callable[[], Awaitable[None]],
    ) -> None:
        self._prepared = prepared
        self._trace = trace
        self._registry = registry
        self._background = background
        self._retry_policy = retry_policy
        self._ticket = ticket
        self._routing = Routing(
            prepared, trace=trace, registry=registry, retry_policy=retry_policy, heartbeat=heartbeat
        )
        self._failed: set[bytes] = set()
        self.num_retries = 0
        self.delivered = DeliveredTokens(emit)

    async def run(self) -> FinishReason:
        """Generate until the answer is complete.

        Raises:
            WorkerError: no pod can serve it (NoRouteError), the request is invalid
                (InvalidRequestError), or too many pods were lost.
        """
        deadline = self._trace.clock() + self._prepared.max_wait_seconds
        number = 0
        self._retry_policy.budget.request()
        while True:
            number += 1
            if len(self.delivered.token_ids) >= self._prepared.sampling.max_tokens:
                return FinishReason.LENGTH
            attempt = Attempt(
                self._prepared,
                await self._routing.find(self._choose),
                number=number,
                delivered=self.delivered,
                trace=self._trace,
                registry=self._registry,
                background=self._background,
                ticket=self._ticket,
            )
            num_delivered = len(self.delivered.token_ids)
            try:
                return await attempt.run()
            except OverloadedError as error:
                await self._make_room(error, attempt, deadline)
            except _RETRYABLE as error:
                went_on = len(self.delivered.token_ids) > num_delivered
                self._retry(error, attempt, number, went_on=went_on)
                await self._settle()
            self.delivered.forget_early()

    def _choose(self) -> Route | NoRoute:
        demand = self._prepared.demand(len(self.delivered.token_ids))
        return choose(self._registry.candidates(), demand, failed=frozenset(self._failed))

    async def _make_room(self, error: OverloadedError, attempt: Attempt, deadline: float) -> None:
        """Continue if pods that have not rejected the request exist; else wait and retry."""
        self._failed |= attempt.failed_boot_ids
        if self._has_other_pods():
            return
        if self._trace.clock() >= deadline:
            raise error
        await asyncio.sleep(wait_seconds(error))

    def _has_other_pods(self) -> bool:
        """Whether a route without failed pods exists."""
        route = self._choose()
        return isinstance(route, Route) and self._failed.isdisjoint(p.boot_id for p in route.pods)

    async def _settle(self) -> None:
        """If no other pods exist, wait until the lost pods are detected as lost or are back."""
        await self._registry.wait_until(
            lambda: self._has_other_pods() or isinstance(self._choose(), NoRoute),
            timeout=self._registry.timers.retry,
        )

    def _retry(self, error: WorkerError, attempt: Attempt, number: int, *, went_on: bool) -> None:
        """Count a retry. Raise `error` if a limit of the request or of the gateway is reached."""
        self._failed |= attempt.failed_boot_ids
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
