"""How a container is asked to end: preStop hook, SIGTERM, and SIGKILL when the grace is over."""

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
HEARING_SECONDS = 5.0  # what a program that has just begun may take to listen to SIGTERM
AFTER_HOOK_SECONDS = 2.0  # a hook that took the whole grace leaves this for SIGTERM


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
    """Wait until a handler for SIGTERM is there, or for so long.

    The kernel drops what the first process of a pid namespace does not handle: a signal sent while
    its interpreter starts would be lost, and the pod would live for its whole grace.
    """
    deadline = time.monotonic() + seconds
    while process.running and not process.handles(signal.SIGTERM):
        if time.monotonic() >= deadline:
            return
        await asyncio.sleep(0.02)


async def _pre_stop(
    process: Process, hook: Mapping[str, Any], seconds: float, prober: Prober
) -> str:
    """Run a hook; say what went wrong, if anything: it never keeps a pod from ending."""
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
