"""LangChain's ChatOpenAI: messages, streams, structured output and bound tools."""

from __future__ import annotations

import asyncio
from typing import Literal

from calls import ANSWER, MODEL, PARTS, URL, call
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

model = ChatOpenAI(model=MODEL, base_url=URL, api_key="none", max_retries=0, temperature=0)
USER = HumanMessage(content=PARTS)


class Seen(BaseModel):
    """What is seen."""

    color: Literal["red", "blue", "yellow"]
    count: Literal[0, 1, 2]


@tool
def note(color: Literal["red", "blue"]) -> str:
    """Note a colour."""
    return f"noted {color}"


@call("invoke, an image")
def _invoke() -> None:
    assert model.invoke([USER]).content == ANSWER


@call("stream")
def _stream() -> None:
    assert "".join(str(chunk.content) for chunk in model.stream([USER])) == ANSWER


@call("abatch")
def _batch() -> None:
    replies = asyncio.run(model.abatch([[USER], [USER]]))
    assert [reply.content for reply in replies] == [ANSWER, ANSWER]


@call("with_structured_output, json_schema")
def _structured() -> None:
    structured = model.with_structured_output(Seen, method="json_schema")
    assert isinstance(structured.invoke([USER]), Seen)


@call("with_structured_output, function_calling")
def _structured_by_tool() -> None:
    structured = model.with_structured_output(Seen, method="function_calling")
    assert isinstance(structured.invoke([USER]), Seen)


@call("bind_tools, and the tool's message")
def _tools() -> None:
    reply = model.bind_tools([note], tool_choice="any").invoke([USER])
    (tool_call,) = reply.tool_calls
    result = note.invoke(tool_call)
    assert isinstance(result, ToolMessage)
    after = model.bind_tools([note]).invoke([USER, reply, result])
    assert after.response_metadata["finish_reason"] in ("stop", "tool_calls")


@call("the responses API")
def _responses() -> None:
    other = ChatOpenAI(
        model=MODEL, base_url=URL, api_key="none", temperature=0, use_responses_api=True
    )
    assert other.invoke([USER]).text == ANSWER
