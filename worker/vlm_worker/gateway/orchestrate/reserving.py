"""Room on a decode pod, before anything is computed: on the routed one, on another, or a bit later.

There is no queue: each request asks again for itself. While it waits it is counted in `held_for`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from vlm_worker.errors import DrainingError, OverloadedError, PeerLostError
from vlm_worker.gateway.registry import Registry
from vlm_worker.route import Choice, Demand, Route, another_decode
from vlm_worker.types import Role
from vlm_worker.wire.calls import Reservation

MIN_WAIT_SECONDS = 0.02
MAX_WAIT_SECONDS = 1.0


def wait_seconds(error: OverloadedError) -> float:
    """How long to stay away from a pod that has no room, within reason."""
    return min(max(error.retry_after_seconds, MIN_WAIT_SECONDS), MAX_WAIT_SECONDS)


async def reserve(
    route: Route,
    demand: Demand,
    reserve_on: Callable[[Choice], Awaitable[Reservation]],
    *,
    registry: Registry,
    may_wait: Callable[[], bool],
) -> tuple[Choice, Reservation]:
    """Ask pod after pod; when all refused, wait as long as the last one says and begin again.

    Raises:
        WorkerError: of the last pod, when the request may not wait longer or none is left.
    """
    assert route.decode is not None
    choice = route.decode
    refused: set[bytes] = set()
    while True:
        try:
            return choice, await reserve_on(choice)
        except (OverloadedError, DrainingError, PeerLostError) as error:
            refused.add(choice.pod.boot_id)
            other = another_decode(registry.candidates(), demand, route, frozenset(refused))
            if other is None:
                if not isinstance(error, OverloadedError) or not may_wait():
                    raise
                with registry.held_for_pool(Role.DECODE):
                    await asyncio.sleep(wait_seconds(error))
                refused.clear()
                other = another_decode(registry.candidates(), demand, route, frozenset())
            choice = other or choice
