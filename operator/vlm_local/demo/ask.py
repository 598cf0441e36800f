"""Asks one question about an image with the `openai` client."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from vlm_cli.client import data_url
from vlm_local.errors import LocalError, ToolMissingError

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

QUESTION = "What is to the right of the circle?"
ANSWER = "blue triangle"
DESCRIBE = "Describe the image."
MAX_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Answer:
    """The gateway's answer.

    Attributes:
        ttft_seconds: time to the first token, measured by this client.
        stages: milliseconds by stage, measured by the gateway.
    """

    text: str
    ttft_seconds: float
    stages: Mapping[str, float]


async def ask(
    url: str, *, model: str, question: str, image: bytes, on_text: Callable[[str], None]
) -> Answer:
    """Ask `question` about `image`; call `on_text` with each part of the answer.

    Raises:
        LocalError: the gateway refused; the message is the gateway's.
        ToolMissingError: the package openai is not installed.
    """
    try:
        import openai
    except ImportError as error:
        raise ToolMissingError(
            "The demo needs the openai client, which is not installed.",
            "pip install openai",
        ) from error
    messages: list[ChatCompletionMessageParam] = [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": data_url(image)}},
                {"type": "text", "text": question},
            ],
        }
    ]
    text, ttft = [], 0.0
    stages: Mapping[str, float] = {}
    try:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            start = time.perf_counter()
            stream = await client.chat.completions.create(
                model=model,
                messages=messages,
                max_tokens=MAX_TOKENS,
                temperature=0,
                stream=True,
            )
            async for chunk in stream:
                timing = (chunk.model_extra or {}).get("timing") or {}
                stages = timing.get("stages") or stages
                piece = chunk.choices[0].delta.content if chunk.choices else None
                if piece:
                    ttft = ttft or time.perf_counter() - start
                    text.append(piece)
                    on_text(piece)
    except openai.OpenAIError as error:
        raise LocalError(f"The question was refused: {error}", "") from error
    return Answer("".join(text), ttft, stages)


def is_right(answer: str, expected: str | None) -> bool:
    """Whether an answer is correct; if `expected` is None, any answer is."""
    words = " ".join(answer.lower().strip().rstrip(".").split())
    return bool(words) if expected is None else words.endswith(expected)
