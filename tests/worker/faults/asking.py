"""A client of the gateway: one streamed request, judged to its last byte."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import functools
import io
import json
import time
from collections.abc import Callable
from typing import Any

import aiohttp
from PIL import Image


@dataclasses.dataclass(frozen=True)
class Question:
    """What is asked. `colour` paints an image of its own; None is no image."""

    text: str
    num_tokens: int = 24
    colour: int | None = None
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False

    @property
    def body(self) -> dict[str, Any]:
        components: list[dict[str, Any]] = [{"type": "text", "text": self.text}]
        if self.colour is not None:
            components.insert(0, {"type": "image_url", "image_url": {"url": data_url(self.colour)}})
        return {
            "model": "shapes",
            "messages": [{"role": "user", "content": components}],
            "max_tokens": self.num_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclasses.dataclass
class Outcome:
    """What the client got.

    `error` is the code of the one error it ended in; None: it ended well. `times` are when each
    piece of text came. `defects` are what is not well-formed.
    """

    text: str = ""
    status: int = 0
    error: str | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    request_id: str = ""
    retry_after: str | None = None
    num_pings: int = 0
    seconds: float = 0.0
    times: list[float] = dataclasses.field(default_factory=list)
    defects: list[str] = dataclasses.field(default_factory=list)

    @property
    def gap(self) -> float:
        """The longest silence between two pieces of text."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)

    def told(self) -> tuple[str, str | None, Any]:
        """What two undisturbed runs have in common."""
        usage = dict(self.usage or {})
        usage.pop("prompt_tokens_details", None)  # of caches
        return self.text, self.finish_reason, json.dumps(usage, sort_keys=True)


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    question: Question,
    *,
    seconds: float,
    name: str = "",
    headers: dict[str, str] | None = None,
    on_text: Callable[[int], None] = lambda _: None,
) -> Outcome:
    """Ask and read to the end; a client that waits longer than `seconds` found a hang."""
    outcome = Outcome()
    begun = time.monotonic()
    sent = {"x-request-id": name, **(headers or {})}
    try:
        async with (
            asyncio.timeout(seconds),
            session.post(
                f"{url}/v1/chat/completions", json=question.body, headers=sent
            ) as response,
        ):
            outcome.status = response.status
            outcome.request_id = response.headers.get("x-request-id", "")
            outcome.retry_after = response.headers.get("retry-after")
            if response.status == 200:
                await _read_stream(response, outcome, on_text)
            else:
                _take_error(outcome, await response.json())
    except TimeoutError:
        outcome.defects.append(f"no last word within {seconds:g} s")
    except aiohttp.ClientError as error:
        outcome.defects.append(f"the connection broke: {error!r}")
    outcome.seconds = time.monotonic() - begun
    return outcome


async def _read_stream(
    response: aiohttp.ClientResponse, outcome: Outcome, on_text: Callable[[int], None]
) -> None:
    ended = False
    async for raw in response.content:
        line = raw.strip()
        if line.startswith(b":"):
            outcome.num_pings += 1
        elif line and ended:
            outcome.defects.append(f"after its end: {line!r}")
        elif line == b"data: [DONE]":
            ended = True
        elif line.startswith(b"data: "):
            event = json.loads(line.removeprefix(b"data: "))
            if "error" in event:
                _take_error(outcome, event)
                ended = True
            else:
                _take_event(outcome, event, on_text)
        elif line:
            outcome.defects.append(f"no event: {line!r}")
    if not ended:
        outcome.defects.append("the stream has no end")
    if outcome.error is None and outcome.finish_reason is None:
        outcome.defects.append("the answer has no finish reason")


def _take_event(outcome: Outcome, event: dict[str, Any], on_text: Callable[[int], None]) -> None:
    if event.get("usage"):
        outcome.usage = event["usage"]
    for choice in event["choices"]:
        if text := choice["delta"].get("content"):
            outcome.text += text
            outcome.times.append(time.monotonic())
            on_text(len(outcome.times))
        if choice.get("finish_reason"):
            if outcome.finish_reason is not None:
                outcome.defects.append("two finish reasons")
            outcome.finish_reason = choice["finish_reason"]


def _take_error(outcome: Outcome, body: dict[str, Any]) -> None:
    if outcome.error is not None:
        outcome.defects.append("two errors")
    error = body.get("error", {})
    if set(error) != {"message", "type", "param", "code"}:
        outcome.defects.append(f"an error of another shape: {body}")
    outcome.error = str(error.get("code"))


@functools.lru_cache(maxsize=4096)
def data_url(colour: int) -> str:
    """A small image; each number is another one."""
    out = io.BytesIO()
    rgb = (colour & 255, colour >> 8 & 255, colour >> 16 & 255)
    Image.new("RGB", (56, 56), rgb).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
