"""Open-loop load: requests leave when their time has come, whatever became of those before.

Poisson arrivals are drawn ahead, so that a slow server cannot slow its own load down (coordinated
omission), and the same seed asks the same again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from vlm_operator.cli.client import Answer, ApiError, failure_kind


class Outcome(enum.StrEnum):
    """How a request ended; each that was sent ended in exactly one of these ways."""

    OK = "ok"
    REJECTED = "rejected"  # 429 or 503: come back later
    FAILED = "failed"
    CANCELLED = "cancelled"  # by us: the run ended before it did


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One request to come: when, in seconds from the start, and whether with a picture."""

    at: float
    number: int
    image: bool


@dataclasses.dataclass(frozen=True)
class Result:
    """What became of one request. Times in seconds.

    `lag` is how much later than planned it left: the generator's own delay, not the server's.
    """

    arrival: Arrival
    outcome: Outcome
    lag: float
    error: str = ""
    answer: Answer | None = None


def poisson(rate: float, duration: float, image_share: float, seed: int) -> list[Arrival]:
    """Arrivals within `duration` seconds at `rate` a second on average."""
    rng = random.Random(seed)  # noqa: S311 - a schedule, not a secret
    arrivals: list[Arrival] = []
    at = 0.0
    for number in itertools.count():
        at += rng.expovariate(rate)
        if at >= duration:
            return arrivals
        arrivals.append(Arrival(at, number, rng.random() < image_share))
    raise AssertionError("count() never ends")


async def run_load(
    arrivals: Sequence[Arrival],
    ask: Callable[[Arrival], Awaitable[Answer]],
    *,
    drain_seconds: float,
    on_result: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Send each request at its time, then wait for the answers for at most `drain_seconds`.

    A cancellation (Ctrl-C) ends the run early: what is under way is cancelled and counted as such,
    what has not left is not counted. Requests that outlast the drain are cancelled, too.

    Returns:
        One result for each request that left.
    """
    start = time.perf_counter()
    results: list[Result] = []
    running: set[asyncio.Task[None]] = set()

    async def one(arrival: Arrival) -> None:
        lag = time.perf_counter() - start - arrival.at
        result = await _ask(arrival, ask, lag)
        results.append(result)
        if on_result is not None:
            on_result(result)

    try:
        for arrival in arrivals:
            await asyncio.sleep(start + arrival.at - time.perf_counter())
            task = asyncio.create_task(one(arrival))
            running.add(task)
            task.add_done_callback(running.discard)
        if running:
            await asyncio.wait(running, timeout=drain_seconds)
    except asyncio.CancelledError:
        current = asyncio.current_task()
        assert current is not None
        current.uncancel()  # the report is still to be written
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return results


async def _ask(arrival: Arrival, ask: Callable[[Arrival], Awaitable[Answer]], lag: float) -> Result:
    """One request to its last word; a cancelled one is a result as well."""
    try:
        answer = await ask(arrival)
    except asyncio.CancelledError:
        return Result(arrival, Outcome.CANCELLED, lag, "cancelled")
    except ApiError as error:
        outcome = Outcome.REJECTED if error.retry else Outcome.FAILED
        return Result(arrival, outcome, lag, failure_kind(error))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return Result(arrival, Outcome.FAILED, lag, failure_kind(error))
    return Result(arrival, Outcome.OK, lag, answer=answer)
