"""Open-loop load: each request is sent at its scheduled time, independent of earlier answers.

Poisson arrivals are drawn in advance, so a slow server cannot reduce its load (coordinated
omission). The same seed gives the same requests and images. This module encodes PNG itself, so that
the operator's container image needs no imaging library.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import itertools
import random
import struct
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence

import aiohttp

from vlm_cli.client import Answer, ApiError, failure_kind

_COLOURS = ((220, 30, 30), (30, 160, 50), (40, 70, 220), (240, 200, 20), (150, 40, 170))


class Outcome(enum.StrEnum):
    """Outcome of a request; each sent request has exactly one."""

    OK = "ok"
    REJECTED = "rejected"  # 429 or 503: the client may retry later
    FAILED = "failed"
    CANCELLED = "cancelled"  # by us, because the run ended first


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One scheduled request.

    Attributes:
        at: time of sending, in seconds from the start.
        number: index of the request in the run.
        image: whether the request has an image.
    """

    at: float
    number: int
    image: bool


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of one request.

    Attributes:
        lag: seconds between scheduled and real sending: the load generator's delay.
        error: kind of failure; "" if answered.
        answer: None unless the outcome is OK.
    """

    arrival: Arrival
    outcome: Outcome
    lag: float
    error: str = ""
    answer: Answer | None = None


def poisson(rate: float, duration: float, image_share: float, seed: int) -> list[Arrival]:
    """Return Poisson arrivals within `duration` seconds at a mean of `rate` per second."""
    rng = random.Random(seed)  # noqa: S311 - a schedule, not a secret
    arrivals: list[Arrival] = []
    at = 0.0
    for number in itertools.count():
        at += rng.expovariate(rate)
        if at >= duration:
            return arrivals
        arrivals.append(Arrival(at, number, rng.random() < image_share))
    raise AssertionError("count() never ends")


def make_image(seed: int, *, width: int, height: int) -> bytes:
    """Return a PNG of `width` by `height` pixels; each seed gives another image."""
    rng = random.Random(seed)  # noqa: S311 - images, not secrets
    colour = bytes(rng.choice(_COLOURS))
    ground = bytes(rng.randrange(200, 256) for _ in range(3))
    left, right = sorted(rng.sample(range(width + 1), 2))
    top, bottom = sorted(rng.sample(range(height + 1), 2))
    empty = b"\0" + ground * width
    filled = b"\0" + ground * left + colour * (right - left) + ground * (width - right)
    rows = [filled if top <= y < bottom else empty for y in range(height)]
    # the lower 48 bits of the seed in one corner, so that images of different seeds differ
    mark = (seed & 0xFFFFFFFFFFFF).to_bytes(6, "big")
    rows[0] = rows[0][:1] + mark + rows[0][7:]
    return _png(width, height, b"".join(rows))


async def run_load(
    arrivals: Sequence[Arrival],
    ask: Callable[[Arrival], Awaitable[Answer]],
    *,
    drain_seconds: float,
) -> list[Result]:
    """Send each request at its time, then wait for answers for at most `drain_seconds`.

    A cancellation (Ctrl-C) ends the run early: requests in flight are cancelled and counted,
    unsent ones are not counted. Requests that outlast the drain are cancelled, too.
    """
    start = time.perf_counter()
    results: list[Result] = []
    running: set[asyncio.Task[None]] = set()

    async def one(arrival: Arrival) -> None:
        lag = time.perf_counter() - start - arrival.at
        results.append(await _ask(arrival, ask, lag))

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
        current.uncancel()  # the caller still prints the report
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return results


async def _ask(arrival: Arrival, ask: Callable[[Arrival], Awaitable[Answer]], lag: float) -> Result:
    """Send one request and return its result, also if it is cancelled."""
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


def _png(width: int, height: int, rows: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )
