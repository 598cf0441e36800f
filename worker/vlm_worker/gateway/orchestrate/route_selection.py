"""Select the pods of an attempt; bound its retries, and the wait if a stage has none.

retry     a stream that delivered tokens is moved whenever its pods are lost; an attempt that
          delivered nothing takes from the budget, so that retries add at most a tenth to the load
patience  a deadline for a pool that lost its pods; later requests share the same deadline
encoder   a pool at zero: if the settings hold image requests for it, wait until their deadline
limit     a request beyond the limit of waiting requests gets a 429 with `Retry-After` at once
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Final, Self

from vlm_worker.client import WorkerClient
from vlm_worker.errors import ContextTooLongError, DrainingError, WorkerError
from vlm_worker.gateway.memory import Bound, FullError
from vlm_worker.gateway.orchestrate.prepared_request import PreparedRequest
from vlm_worker.gateway.orchestrate.ttft_trace import Trace
from vlm_worker.gateway.pod_registry import Registry
from vlm_worker.route import Candidate, NoRoute, Route
from vlm_worker.types import RequestKey, Role, Stage

# The requests that one pod runs at once: if it fails, all of them may be retried.
BURST_RETRIES: Final = 256.0
RETRIES_PER_REQUEST: Final = 0.1
RETRIES_PER_SECOND: Final = 1.0


class RetryBudget:
    """A token bucket of retries, filled by requests and by time. `now` is in seconds."""

    def __init__(self, burst: float, *, now: float) -> None:
        self._burst = burst
        self._left = burst
        self._filled_at = now

    def request(self) -> None:
        """Add `RETRIES_PER_REQUEST` for a new request."""
        self._left = min(self._burst, self._left + RETRIES_PER_REQUEST)

    def take(self, *, now: float) -> bool:
        """Take a retry; False if none is left."""
        passed, self._filled_at = now - self._filled_at, now
        self._left = min(self._burst, self._left + RETRIES_PER_SECOND * passed)
        if self._left < 1:
            return False
        self._left -= 1
        return True


class RequestLimit:
    """Limit of requests that no pod has admitted yet."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tickets: set[AdmissionTicket] = set()

    @property
    def num_waiting(self) -> int:
        """Requests that no pod has admitted."""
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


class AdmissionTicket:
    """Counts one request until a pod admits it or it ends."""

    def __init__(self, tickets: set[AdmissionTicket]) -> None:
        self._tickets = tickets

    def leave(self) -> None:
        """Stop counting the request; idempotent."""
        self._tickets.discard(self)

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


class PodsInUse:
    """The pods that the attempt `key` has called. The end of the context releases them.

    Attributes:
        failed_boot_ids: boot ids of the pods that failed.
        decoding: the decode pod sends tokens, so a later failure is not its producer's.
    """

    def __init__(self, key: RequestKey, *, registry: Registry, background: BackgroundTasks) -> None:
        self.failed_boot_ids: set[bytes] = set()
        self.decoding = False
        self._key = key
        self._registry = registry
        self._background = background
        self._used = contextlib.ExitStack()
        self._clients: dict[str, WorkerClient] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._used.close()

    def client(self, pod: Candidate) -> WorkerClient:
        """Return the client of a pod, which counts as in use until the attempt ends."""
        client = self._clients.get(pod.name)
        if client is None:
            client = self._used.enter_context(self._registry.use(pod.name))
            self._clients[pod.name] = client
        return client

    @contextlib.contextmanager
    def record_failure(self, pod: Candidate, *producers: Candidate) -> Iterator[None]:
        """Record failures: of the called pod, and of the producers that it fetches from."""
        try:
            yield
        except DrainingError:
            self._registry.refused(pod.boot_id)
            self.failed_boot_ids.add(pod.boot_id)
            raise
        except WorkerError:
            self.failed_boot_ids.add(pod.boot_id)
            if not self.decoding:
                self.failed_boot_ids.update(producer.boot_id for producer in producers)
            raise

    def cancel_everywhere(self) -> None:
        """Cancel the attempt on all its pods, in the background."""
        for name in self._clients:
            self._background.start(self._cancel(name), name=f"cancel {self._key.request_id}")

    async def _cancel(self, name: str) -> None:
        """Cancel the attempt on one pod. A lost pod needs no cancellation."""
        with contextlib.suppress(WorkerError), self._registry.use(name) as client:
            await client.cancel(self._key, timeout=self._registry.timers.cancel)


class BackgroundTasks:
    """Tasks that outlive their request; keeps references until they end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None], *, name: str) -> None:
        """Run `work` as a task. `work` must handle its errors."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def finish(self) -> None:
        """Wait for all tasks."""
        while self._tasks:
            await asyncio.gather(*self._tasks)


def _waits(route: Route | NoRoute) -> bool:
    """Whether a new pod may help; it does not if the prompt fits into no pod."""
    return isinstance(route, NoRoute) and route.capacity_tokens is None
