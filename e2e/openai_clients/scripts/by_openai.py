"""The official Python client, with its own helpers."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
from calls import ANSWER, IMAGE_URL, MODEL, PARTS, QUESTION, URL, call
from pydantic import BaseModel

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
USER: Any = {"role": "user", "content": PARTS}


class Seen(BaseModel):
    color: Literal["red", "blue", "yellow"]
    count: Literal[0, 1, 2]


TOOL: Any = openai.pydantic_function_tool(Seen, name="note")


@call("models.list")
def _models() -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


@call("chat.completions.create, an image")
def _chat() -> None:
    reply = client.chat.completions.create(model=MODEL, messages=[USER], temperature=0)
    assert reply.choices[0].message.content == ANSWER
    assert reply.usage is not None
    assert reply.usage.prompt_tokens > 20


@call("chat.completions.create, a stream with usage, n and logprobs")
def _stream() -> None:
    texts, finish, usage, logprobs = ["", ""], [None, None], None, 0
    for chunk in client.chat.completions.create(
        model=MODEL, messages=[USER], n=2, stream=True, temperature=0, logprobs=True,
        top_logprobs=2, stream_options={"include_usage": True},
    ):  # fmt: skip
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            finish[choice.index] = choice.finish_reason or finish[choice.index]
            logprobs += len((choice.logprobs and choice.logprobs.content) or ())
    assert texts == [ANSWER, ANSWER]
    assert finish == ["stop", "stop"]
    assert usage is not None
    assert logprobs >= 2


@call("chat.completions.stream, its events")
def _events() -> None:
    with client.chat.completions.stream(model=MODEL, messages=[USER], temperature=0) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.content == ANSWER
    assert {"chunk", "content.delta", "content.done"} <= kinds


@call("chat.completions.parse, a pydantic class")
def _parse() -> None:
    reply = client.chat.completions.parse(
        model=MODEL, messages=[USER], response_format=Seen, max_tokens=700
    )
    assert isinstance(reply.choices[0].message.parsed, Seen)


@call("chat.completions.parse, a tool, and its result")
def _tools() -> None:
    reply = client.chat.completions.parse(
        model=MODEL, messages=[USER], tools=[TOOL], tool_choice="required", max_tokens=700
    )
    message = reply.choices[0].message
    (tool_call,) = message.tool_calls or ()
    assert isinstance(tool_call.function.parsed_arguments, Seen)
    result = {"role": "tool", "tool_call_id": tool_call.id, "content": json.dumps({"noted": True})}
    given: Any = [USER, message, result]
    after = client.chat.completions.create(
        model=MODEL, messages=given, tools=[TOOL], max_tokens=20, temperature=0
    )
    assert after.choices[0].finish_reason in ("stop", "length")


@call("completions.create")
def _completions() -> None:
    reply = client.completions.create(model=MODEL, prompt="red blue", max_tokens=4, echo=False)
    assert reply.choices[0].finish_reason in ("stop", "length")


@call("responses.create, an image")
def _responses() -> None:
    content = [
        {"type": "input_image", "image_url": IMAGE_URL, "detail": "auto"},
        {"type": "input_text", "text": QUESTION},
    ]
    given: Any = [{"role": "user", "content": content}]
    reply = client.responses.create(model=MODEL, input=given, temperature=0, store=False)
    assert reply.output_text == ANSWER
    assert reply.status == "completed"


@call("responses.stream")
def _responses_stream() -> None:
    with client.responses.stream(model=MODEL, input="red?", max_output_tokens=8) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert final.model == MODEL


@call("responses.parse, a pydantic class")
def _responses_parse() -> None:
    reply = client.responses.parse(
        model=MODEL, input="red?", text_format=Seen, max_output_tokens=700
    )
    assert isinstance(reply.output_parsed, Seen)


@call("responses.create, a function and its output")
def _responses_tools() -> None:
    tool: Any = {
        "type": "function",
        "name": "note",
        "description": "notes a colour",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"color": {"type": "string", "enum": ["red", "blue"]}},
            "required": ["color"],
            "additionalProperties": False,
        },
    }
    asked: Any = [{"role": "user", "content": "red?"}]
    reply = client.responses.create(
        model=MODEL, input=asked, tools=[tool], tool_choice="required", max_output_tokens=700
    )
    (function,) = [item for item in reply.output if item.type == "function_call"]
    assert json.loads(function.arguments)["color"] in ("red", "blue")
    output = {"type": "function_call_output", "call_id": function.call_id, "output": "ok"}
    after = client.responses.create(
        model=MODEL, input=[*asked, *reply.output, output], tools=[tool], max_output_tokens=8
    )
    assert after.status in ("completed", "incomplete")


@call("an error names its parameter")
def _errors() -> None:
    param = None
    try:
        client.chat.completions.create(model=MODEL, messages=[USER], temperature=9)
    except openai.BadRequestError as error:
        param = error.param
    assert param == "temperature"
