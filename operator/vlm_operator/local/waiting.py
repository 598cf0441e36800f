"""Waiting for a condition that nobody announces, with a bound and a reason."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def until(
    ask: Callable[[], Awaitable[T]], *, seconds: float, awaited: str, every: float = 0.05
) -> T:
    """Ask until the answer is true, and return it.

    Args:
        ask: Asked again and again; what it raises goes to the caller.
        seconds: How long to ask.
        awaited: What is waited for, in words that complete "waited for …".
        every: Seconds between two questions.

    Raises:
        TimeoutError: `seconds` passed; the message says what for and the last answer.
    """
    deadline = time.monotonic() + seconds
    while not (answer := await ask()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:g} s for {awaited}; the last answer: {answer!r}")
        await asyncio.sleep(every)
    return answer
