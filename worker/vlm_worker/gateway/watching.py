"""A request at work, watched for what may end it sooner: its client, its deadline, this gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from vlm_worker.gateway.api import errors
from vlm_worker.gateway.orchestrate.trace import Trace
from vlm_worker.gateway.service import Service

PING_SECONDS = 15.0


async def watched(
    work: Awaitable[None],
    *,
    ends: tuple[Awaitable[Exception], ...],
    ping: Callable[[], Awaitable[None]],
) -> None:
    """Run `work`; cancel it and raise what the first of `ends` gives, when that comes first."""
    task = asyncio.ensure_future(work)
    watchers = [asyncio.ensure_future(end) for end in ends]
    try:
        while True:
            done, _ = await asyncio.wait(
                (task, *watchers), timeout=PING_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if task in done:
                return await task
            for end in watchers:
                if end in done:
                    raise end.result()
            await ping()
    finally:
        for one in (task, *watchers):
            one.cancel()
        await asyncio.gather(task, *watchers, return_exceptions=True)


async def cut(service: Service) -> Exception:
    """Returns when this gateway's time to drain is over."""
    await service.cut.wait()
    return errors.unavailable("This gateway is shutting down and its time to drain is over.")


async def too_late(trace: Trace, timeout: float | None) -> Exception:
    """Returns when the client's own time is over, which began when its request was complete."""
    if timeout is None:
        await asyncio.get_running_loop().create_future()
    else:
        await asyncio.sleep(trace.received + timeout - trace.clock())
    return errors.too_late()
