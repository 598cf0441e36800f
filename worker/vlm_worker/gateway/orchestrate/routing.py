"""Pods for an attempt, and how long a stage without any is waited for.

lost      a stage that had pods a moment ago, for as long as they may take to be replaced
encoder   a pool at zero, where the settings hold pictures for it: until they say it is too long
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator

from vlm_worker.errors import ContextTooLongError, WorkerError
from vlm_worker.gateway.orchestrate.job import Job
from vlm_worker.gateway.orchestrate.recovery import Recovery
from vlm_worker.gateway.orchestrate.trace import Trace
from vlm_worker.gateway.registry import Registry
from vlm_worker.route import NoRoute, Route
from vlm_worker.types import Role, Stage


class NoRouteError(WorkerError):
    """No pod for a stage of the request; `stage` and the message say which and why."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(message)
        self.stage = stage


class NoEncoderError(NoRouteError):
    """No encoder pod, and the pictures may be encoded nowhere else.

    `held_seconds` is how long the request was held; 0 where the settings say to refuse it.
    """

    def __init__(self, message: str, *, held_seconds: float) -> None:
        super().__init__(Stage.ENCODER, message)
        self.held_seconds = held_seconds


class Routing:
    """The waits of one request. `heartbeat` is called now and then meanwhile."""

    def __init__(
        self,
        job: Job,
        *,
        trace: Trace,
        registry: Registry,
        recovery: Recovery,
        heartbeat: Callable[[], Awaitable[None]],
    ) -> None:
        self._job = job
        self._trace = trace
        self._registry = registry
        self._recovery = recovery
        self._heartbeat = heartbeat

    async def find(self, choose: Callable[[], Route | NoRoute]) -> Route:
        """What `choose` finds now, or comes to find while the request may wait.

        Raises:
            NoRouteError: a stage has no pod.
            ContextTooLongError: no pod ever has room for the prompt.
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
            raise NoEncoderError(route.reason, held_seconds=self._job.max_hold_seconds)
        raise NoRouteError(route.stage, route.reason)

    def _lack(self, stage: Stage) -> tuple[object, ...]:
        """What the request lacks: others with the same are helped by the same pods."""
        job = self._job
        return (stage, job.inline, bool(job.pictures), job.sampling.max_tokens > 1)

    def _lacks_encoder(self, route: NoRoute) -> bool:
        """Whether an encoder pod alone can help."""
        return route.stage is Stage.ENCODER and not self._job.inline

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """The request waits for an encoder, as it would in one's queue."""
        self._trace.gateway_waits()
        with self._registry.held_for_pool(Role.ENCODER), self._trace.stage("encoder_queue"):
            yield
        self._trace.gateway_works()

    def _wait_until(self, stage: Stage) -> float:
        """Until when a pod of a stage is waited for."""
        until = self._replaced_by(stage)
        if stage is Stage.ENCODER and not self._job.inline:
            until = max(until, self._trace.received + self._job.max_hold_seconds)
        return until

    def _replaced_by(self, stage: Stage) -> float:
        """Until when a pod may come back to a pool that had pods a moment ago; 0: it had none."""
        lost_at = self._registry.lost_at(stage)
        return 0.0 if lost_at is None else lost_at + self._recovery.patience_seconds


def _waits(route: Route | NoRoute) -> bool:
    """Whether a pod that comes may help; none helps a prompt that fits into no pod."""
    return isinstance(route, NoRoute) and route.capacity_tokens is None
