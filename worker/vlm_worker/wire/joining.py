"""Frames as messages of gRPC, each in one piece; they are made on a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from vlm_worker.wire.frames import Frame, Runs


async def joined(runs: Runs) -> AsyncGenerator[bytes]:
    """The frames of runs, in order."""
    async with aclosing(runs):
        async for run in runs:
            frames = iter(run)
            while (frame := await asyncio.to_thread(_next_joined, frames)) is not None:
                yield frame


def _next_joined(run: Iterator[Frame]) -> bytes | None:
    frame = next(run, None)
    return None if frame is None else frame.joined()
