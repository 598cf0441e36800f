"""Polls a condition, with a timeout and a message that names the condition."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def until(
    ask: Callable[[], Awaitable[T]], *, seconds: float, awaited: str, every: float = 0.05
) -> T:
    """Call `ask` until its result is true, and return that result.

    Args:
        ask: called repeatedly; its exceptions propagate.
        seconds: timeout.
        awaited: text that completes "waited for …".
        every: seconds between two calls.

    Raises:
        TimeoutError: `seconds` passed; the message has `awaited` and the last result.
    """
    deadline = time.monotonic() + seconds
    while not (answer := await ask()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {awaited}; the last answer: {answer!r}")
        await asyncio.sleep(every)
    return answer
