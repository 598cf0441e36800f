"""Images to put to an engine, and what it said of them."""

from __future__ import annotations

from typing import Any

from worker.answers import make_image

from vlm_worker.engine.engine import Engine
from vlm_worker.engine.events import EncodeEvent, EventStream
from vlm_worker.testing import ChecksumRunner
from vlm_worker.types import PreparedImage, RequestKey


def key(name: str) -> RequestKey:
    return RequestKey(name, 0)


def prepared_image(number: int, *, num_tokens: int = 5) -> PreparedImage:
    return make_image(number, num_tokens=num_tokens)


async def events(stream: EventStream[EncodeEvent]) -> list[EncodeEvent]:
    return [event async for event in stream]


async def encode_first(
    engine: Engine, runner: ChecksumRunner, until: Any
) -> EventStream[EncodeEvent]:
    """Keep the encoder at image 0, for `first`, until `runner.gate` is set."""
    runner.gate.clear()
    first = engine.encode(key("first"), [prepared_image(0)])
    await until(lambda: runner.batch_sizes == [1])
    return first
