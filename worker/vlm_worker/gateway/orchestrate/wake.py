"""The wait of a request for the pods of a service at zero; the operator starts them.

no pod for a stage ─▶ counted in `/stats` ─▶ the operator starts all pools ─▶ every stage has a pod
                                     └─ too late: NotAwakeError, a 503 with `Retry-After`
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from contextlib import AbstractContextManager
from typing import Protocol

from vlm_worker.errors import WorkerError
from vlm_worker.gateway.orchestrate.prepared_request import PreparedRequest
from vlm_worker.gateway.orchestrate.ttft_trace import Trace
from vlm_worker.gateway.pod_registry import Registry
from vlm_worker.gateway.waiters import Place
from vlm_worker.route import NoRoute, Route, missing_stages
from vlm_worker.types import Stage

_ALWAYS_NEEDED = frozenset({Stage.PREFILL, Stage.DECODE})


class NotAwakeError(WorkerError):
    """A stage had no pod for `waited_seconds`, in a service that scales to zero."""

    def __init__(self, message: str, *, waited_seconds: float) -> None:
        super().__init__(message)
        self.waited_seconds = waited_seconds


class Waiting(Protocol):
    """The request that waits, as `Routing` has it."""

    @property
    def prepared(self) -> PreparedRequest: ...
    @property
    def trace(self) -> Trace: ...
    @property
    def registry(self) -> Registry: ...
    @property
    def heartbeat(self) -> Callable[[], Awaitable[None]]: ...
    def place(self) -> AbstractContextManager[Place]: ...
    def lack(self, stage: Stage) -> tuple[Hashable, ...]: ...


def waits(route: Route | NoRoute) -> bool:
    """Whether a new pod may help; it does not if the prompt fits into no pod."""
    return isinstance(route, NoRoute) and route.capacity_tokens is None


def wakes(route: Route | NoRoute, prepared: PreparedRequest, registry: Registry) -> bool:
    """Whether a stage without pods means that the service starts from zero.

    If only encoders may be at zero (`on_demand` Queue or Reject), that rule applies to them.
    """
    if not waits(route) or prepared.wake_timeout_seconds <= 0:
        return False
    needed = _ALWAYS_NEEDED
    if prepared.images and prepared.inline:
        needed |= {Stage.ENCODER}
    return bool(missing_stages(registry.candidates(), needed))


async def wait_for_pods(request: Waiting, choose: Callable[[], Route | NoRoute]) -> Route | NoRoute:
    """Wait until all stages of the request have pods, and return what `choose` returns then.

    Raises:
        NotAwakeError: they have none within the time that the settings allow.
    """
    limit, trace, registry = request.prepared.wake_timeout_seconds, request.trace, request.registry
    until = trace.clock() + limit
    with registry.waits_for_wake(), trace.waking(), request.place() as place:
        route = choose()
        while waits(route):
            assert isinstance(route, NoRoute)
            remaining = until - trace.clock()
            if remaining <= 0:
                raise NotAwakeError(route.reason, waited_seconds=limit)
            await place.wait_until(
                lambda: not waits(choose()),
                timeout=min(remaining, registry.timers.heartbeat),
                group=("wake", *request.lack(route.stage)),
            )
            route = choose()
            if isinstance(route, NoRoute):
                await request.heartbeat()
    return route
