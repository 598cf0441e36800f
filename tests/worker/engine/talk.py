"""Requests to put to an engine, and what it said to them."""

from __future__ import annotations

from typing import Any

from worker.answers import make_image

from vlm_worker.engine.events import EventStream, PrefillEvent
from vlm_worker.testing import IMAGE_TOKEN
from vlm_worker.types import (
    FailedEvent,
    ImageItem,
    Request,
    RequestKey,
    SamplingParams,
    TokenEvent,
)

IMAGE = make_image(1, num_tokens=5)


def text(name: str = "r", *, length: int = 10, **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 6, "ignore_eos": True, **sampling})
    return Request(RequestKey(name, 0), tuple(range(20, 20 + length)), length, params)


def about_image(name: str = "r") -> Request:
    token_ids = (1, 2, *[IMAGE_TOKEN] * 5, 3)
    item = ImageItem(IMAGE.image_key, 2, 5, IMAGE.grid_thw)
    return Request(RequestKey(name, 0), token_ids, 8, SamplingParams(max_tokens=4), (item,))


async def events(stream: EventStream[PrefillEvent]) -> list[PrefillEvent]:
    return [event async for event in stream]


def tokens(told: list[PrefillEvent]) -> list[int]:
    return [event.token_id for event in told if isinstance(event, TokenEvent)]


def error(told: list[PrefillEvent]) -> Exception:
    (last,) = told[-1:]
    assert isinstance(last, FailedEvent)
    return last.error


async def first_token(stream: EventStream[PrefillEvent]) -> TokenEvent:
    async for event in stream:
        if isinstance(event, TokenEvent):
            return event
    raise AssertionError("no token came")
