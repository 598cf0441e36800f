"""Select the pods of an attempt; wait a bounded time if a stage has none.

lost      a stage that lost its pods: wait as long as their replacement may take
encoder   a pool at zero: if the settings hold image requests for it, wait until their deadline
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator

from vlm_worker.errors import ContextTooLongError, WorkerError
from vlm_worker.gateway.orchestrate.prepared_request import PreparedRequest
from vlm_worker.gateway.orchestrate.retry_policy import RetryPolicy
from vlm_worker.gateway.orchestrate.ttft_trace import Trace
from vlm_worker.gateway.pod_registry import Registry
from vlm_worker.route import NoRoute, Route
from vlm_worker.types import Role, Stage


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


class Routing:
    """Route selection of one request. It calls `heartbeat` while the request waits."""

    def __init__(
        self,
        prepared: PreparedRequest,
        *,
        trace: Trace,
        registry: Registry,
        retry_policy: RetryPolicy,
        heartbeat: Callable[[], Awaitable[None]],
    ) -> None:
        self._prepared = prepared
        self._trace = trace
        self._registry = registry
        self._retry_policy = retry_policy
        self._heartbeat = heartbeat

    async def find(self, choose: Callable[[], Route | NoRoute]) -> Route:
        """Call `choose` until it returns a route or the request may not wait longer.

        Raises:
            NoRouteError: a stage has no pod.
            ContextTooLongError: the prompt exceeds the KV cache of every pod.
        """
        route = choose()
        while _waits(route):
            assert isinstance(route, NoRoute)
            left = self._wait_until(route.stage) - self._trace.clock()
            if left <= 0:
                break
            timeout = min(left, self._registry.timers.heartbeat)
            with self._held() if self._lacks_encoder(route) else contextlib.nullcontext():
                await self._registry.wait_until(
                    lambda: not _waits(choose()), timeout=timeout, group=self._lack(route.stage)
                )
            route = choose()
            if isinstance(route, NoRoute):
                await self._heartbeat()
        if isinstance(route, Route):
            return route
        if route.capacity_tokens is not None:
            raise ContextTooLongError(f"No pod has KV cache for this request: {route.reason}.")
        if self._lacks_encoder(route):
            raise NoEncoderError(route.reason, held_seconds=self._prepared.max_hold_seconds)
        raise NoRouteError(route.stage, route.reason)

    def _lack(self, stage: Stage) -> tuple[object, ...]:
        """Return the group of the request: new pods help all requests of a group or none."""
        prepared = self._prepared
        return (stage, prepared.inline, bool(prepared.images), prepared.sampling.max_tokens > 1)

    def _lacks_encoder(self, route: NoRoute) -> bool:
        """Whether only an encoder pod can help."""
        return route.stage is Stage.ENCODER and not self._prepared.inline

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Count the wait for an encoder pod as time in its queue."""
        self._trace.gateway_waits()
        with self._registry.held_for_pool(Role.ENCODER), self._trace.stage("encoder_queue"):
            yield
        self._trace.gateway_works()

    def _wait_until(self, stage: Stage) -> float:
        """Return until when the request waits for a pod of a stage."""
        until = self._replaced_by(stage)
        if stage is Stage.ENCODER and not self._prepared.inline:
            until = max(until, self._trace.received + self._prepared.max_hold_seconds)
        return until

    def _replaced_by(self, stage: Stage) -> float:
        """Return until when to wait for a replacement of lost pods; 0 if none was lost."""
        lost_at = self._registry.lost_at(stage)
        return 0.0 if lost_at is None else lost_at + self._retry_policy.patience_seconds


def _waits(route: Route | NoRoute) -> bool:
    """Whether a new pod may help; it does not if the prompt fits into no pod."""
    return isinstance(route, NoRoute) and route.capacity_tokens is None
