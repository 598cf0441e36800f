"""Asks one question about an image with the `openai` client."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_cli.images import data_url, media_type
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
        text: The whole answer.
        ttft_seconds: time to the first token, measured by this client.
        stages: Milliseconds by stage, as the gateway measured.
    """

    text: str
    ttft_seconds: float
    stages: Mapping[str, float]


async def ask(
    url: str, *, model: str, question: str, image: bytes, on_text: Callable[[str], None]
) -> Answer:
    """Ask `question` about `image`; call `on_text` with each part of the answer.

    Raises:
        LocalError: the gateway refused; the message is that of the gateway.
        ToolMissingError: The openai package is not installed.
    """
    try:
        import openai
    except ImportError as error:
        raise ToolMissingError(
            "The demo asks through the openai client, which is not installed.",
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
            began = time.perf_counter()
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
                    ttft = ttft or time.perf_counter() - began
                    text.append(piece)
                    on_text(piece)
    except openai.OpenAIError as error:
        raise LocalError(f"The question was refused: {error}", "") from error
    return Answer("".join(text), ttft, stages)


def read_image(image: Path) -> bytes:
    """Return the bytes of an image.

    Raises:
        LocalError: it cannot be read, or has a format that the gateway does not accept.
    """
    try:
        data = image.read_bytes()
    except OSError as error:
        raise LocalError(
            f"There is no image {image}: {error.strerror}.", "Give --image a file."
        ) from error
    if media_type(data) is None:
        raise LocalError(f"{image} is not a PNG, JPEG, WebP or GIF.", "Convert it to PNG.")
    return data


def is_right(answer: str, expected: str | None) -> bool:
    """Whether an answer is the expected one; without an expectation, whether there is one."""
    said = " ".join(answer.lower().strip().rstrip(".").split())
    return bool(said) if expected is None else said.endswith(expected)
