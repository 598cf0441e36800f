"""Ends a container: preStop hook, SIGTERM, then SIGKILL after the grace."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from .probes import Prober
from .process import Process

logger = logging.getLogger(__name__)
Record = Callable[..., Coroutine[Any, Any, None]]
HEARING_SECONDS = 5.0  # the time that a new program may take to install a SIGTERM handler
AFTER_HOOK_SECONDS = 2.0  # the time for SIGTERM after a hook that used the whole grace


async def end(
    process: Process,
    *,
    hook: Mapping[str, Any] | None,
    grace_seconds: float,
    prober: Prober,
    record: Record,
) -> None:
    """End `process` and return when it has ended.

    Args:
        process: A running container.
        hook: Its preStop, if it has one.
        grace_seconds: For the hook and for SIGTERM together.
        prober: Does a hook's HTTP request.
        record: Writes an event: reason, message, and `warning`.
    """
    deadline = time.monotonic() + grace_seconds
    if hook is not None:
        problem = await _pre_stop(process, hook, grace_seconds, prober)
        if problem:
            await record("FailedPreStopHook", f"PreStopHook failed: {problem}", warning=True)
    await _hears(process, seconds=min(HEARING_SECONDS, deadline - time.monotonic()))
    process.signal(signal.SIGTERM)
    left = max(deadline - time.monotonic(), AFTER_HOOK_SECONDS if hook else 0.0)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(left):
            await process.wait()
            return
    process.signal(signal.SIGKILL)
    await process.wait()


async def _hears(process: Process, *, seconds: float) -> None:
    """Wait until the program has a handler for SIGTERM, at most for `seconds`.

    The kernel drops signals that the first process of a pid namespace does not handle. A signal
    sent while its interpreter starts would be lost, and the pod would run for its whole grace.
    """
    deadline = time.monotonic() + seconds
    while process.running and not process.handles(signal.SIGTERM):
        if time.monotonic() >= deadline:
            return
        await asyncio.sleep(0.02)


async def _pre_stop(
    process: Process, hook: Mapping[str, Any], seconds: float, prober: Prober
) -> str:
    """Run a hook; return what failed, if anything. The pod ends in any case."""
    try:
        async with asyncio.timeout(seconds):
            if "exec" in hook:
                code, output = await process.run_inside(hook["exec"]["command"])
                return "" if code == 0 else output.decode(errors="replace")[-512:] or f"code {code}"
            if "httpGet" in hook:
                answer = await prober.http_get(hook["httpGet"])
                return "" if answer.healthy else answer.message
            await asyncio.sleep(hook["sleep"]["seconds"])
    except TimeoutError:
        return f"it took more than the grace of {seconds:g} s"
    except Exception as error:
        logger.exception("a preStop hook failed", extra={"pid": process.pid})
        return str(error)
    return ""
