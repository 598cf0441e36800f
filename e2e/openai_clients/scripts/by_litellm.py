"""LiteLLM's SDK with its OpenAI-compatible provider."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import litellm
from calls import ANSWER, IMAGE_URL, MODEL, PARTS, QUESTION, URL, call
from pydantic import BaseModel

GIVEN: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": URL, "api_key": "none"}
USER: Any = {"role": "user", "content": PARTS}


class Seen(BaseModel):
    color: Literal["red", "blue", "yellow"]
    count: Literal[0, 1, 2]


TOOL = {
    "type": "function",
    "function": {"name": "note", "description": "notes", "parameters": Seen.model_json_schema()},
}


@call("completion, an image")
def _completion() -> None:
    reply = litellm.completion(**GIVEN, messages=[USER], temperature=0)
    assert reply.choices[0].message.content == ANSWER


@call("completion, a stream")
def _stream() -> None:
    chunks = litellm.completion(**GIVEN, messages=[USER], temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER


@call("acompletion")
def _acompletion() -> None:
    reply = asyncio.run(litellm.acompletion(**GIVEN, messages=[USER], temperature=0))
    assert reply.choices[0].message.content == ANSWER


@call("completion, response_format of a pydantic class")
def _format() -> None:
    reply = litellm.completion(**GIVEN, messages=[USER], response_format=Seen, max_tokens=700)
    Seen.model_validate_json(reply.choices[0].message.content)


@call("completion, tools in a stream")
def _tools() -> None:
    chunks = litellm.completion(
        **GIVEN, messages=[USER], tools=[TOOL], tool_choice="required", max_tokens=700, stream=True
    )
    whole = litellm.stream_chunk_builder(list(chunks))
    (tool_call,) = whole.choices[0].message.tool_calls
    Seen.model_validate(json.loads(tool_call.function.arguments))


@call("text_completion")
def _text() -> None:
    given = GIVEN | {"model": f"text-completion-openai/{MODEL}"}
    reply = litellm.text_completion(**given, prompt="red", max_tokens=4)
    assert reply.choices[0].finish_reason in ("stop", "length")


@call("responses")
def _responses() -> None:
    content = [
        {"type": "input_image", "image_url": IMAGE_URL, "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    reply = litellm.responses(**GIVEN, input=[{"role": "user", "content": content}], temperature=0)
    assert reply.output[-1].content[0].text == ANSWER
