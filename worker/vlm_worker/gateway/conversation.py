"""Builds what a chat template sees of a request: messages, tool calls and tools. Pure.

    Message, Tool ─ `change` on every string of the client ─▶ dicts as in transformers

`change` marks texts (`chat_template`). Not changed are the words that templates compare: roles,
the keywords of JSON Schema, and its types. They come from fixed lists, so they hold no control
token.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from vlm_worker.gateway.api.parts import ImagePart, TextPart
from vlm_worker.gateway.api.requests import Effort, Message
from vlm_worker.gateway.api.tools import Tool, ToolCall

Change = Callable[[str], str]

_KEYWORDS: Final = frozenset(
    {"type", "function", "name", "description", "parameters", "properties", "required", "items",
     "enum", "const", "default", "title", "format", "nullable", "anyOf", "oneOf", "allOf", "not",
     "$ref", "$defs", "definitions", "additionalProperties", "patternProperties", "prefixItems",
     "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength",
     "maxLength", "pattern", "minItems", "maxItems", "uniqueItems", "minProperties",
     "maxProperties", "examples", "$schema"}
)  # fmt: skip
_TYPES: Final = frozenset(
    {"string", "number", "integer", "boolean", "array", "object", "null", "function"}
)
_SHORT_ID: Final = 9


@dataclasses.dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What renderings of a chat template show.

    Attributes:
        as_parts: it drops string contents and writes text parts.
        writes_tools: it writes `tools`.
        calls: how it writes the arguments of `tool_calls`: it takes an object, or their JSON text;
            or it writes no calls.
        short_ids: it takes ids of calls of nine letters and digits only, as Mistral's.
    """

    as_parts: bool = False
    writes_tools: bool = False
    calls: Literal["object", "text", "none"] = "none"
    short_ids: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Conversation:
    """What is rendered. `effort` is the request's `reasoning_effort`.

    If it `asks`, the beginning of the answer follows the messages.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    effort: Effort | None = None
    asks: bool = True


def template_messages(
    messages: Sequence[Message], change: Change, facts: TemplateFacts
) -> list[dict[str, Any]]:
    """Build the `messages` of a template."""
    return [_message(message, change, facts) for message in messages]


def template_tools(tools: Sequence[Tool], change: Change) -> list[Any] | None:
    """Build the `tools` of a template; None without tools, as in transformers."""
    return [_schema(tool.body, change) for tool in tools] or None


def client_texts(conversation: Conversation) -> list[str]:
    """Return every string of the client that a template may write."""
    texts: list[str] = []

    def note(text: str) -> str:
        texts.append(text)
        return text

    facts = TemplateFacts(calls="text")
    template_messages(conversation.messages, note, facts)
    template_messages(conversation.messages, note, dataclasses.replace(facts, calls="object"))
    template_tools(conversation.tools, note)
    return texts


def _message(message: Message, change: Change, facts: TemplateFacts) -> dict[str, Any]:
    content: Any
    if isinstance(message.content, str):
        text = change(message.content)
        content = [{"type": "text", "text": text}] if facts.as_parts else text
    else:
        content = [
            {"type": "image"}
            if isinstance(part, ImagePart)
            else {"type": "text", "text": change(part.text)}
            for part in message.content
        ]
    built: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        built["name"] = change(message.name)
    if message.reasoning is not None:
        built["reasoning_content"] = change(message.reasoning)
    if message.tool_calls:
        built["tool_calls"] = [_call(call, change, facts) for call in message.tool_calls]
    if message.tool_call_id is not None:
        built["tool_call_id"] = _id(message.tool_call_id, change, facts)
    return built


def _call(call: ToolCall, change: Change, facts: TemplateFacts) -> dict[str, Any]:
    as_object = facts.calls == "object"
    arguments = _changed(call.values, change) if as_object else change(call.arguments)
    function = {"name": change(call.name), "arguments": arguments}
    return {"type": "function", "id": _id(call.id, change, facts), "function": function}


def _id(call_id: str, change: Change, facts: TemplateFacts) -> str:
    """Return an id that the template takes; equal ids stay equal."""
    if not facts.short_ids:
        return change(call_id)
    if len(call_id) == _SHORT_ID and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.blake2b(call_id.encode()).hexdigest()[:_SHORT_ID]


def _changed(value: Any, change: Change) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _changed(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_changed(inner, change) for inner in value]
    return value


def _schema(value: Any, change: Change, *, is_type: bool = False) -> Any:
    """Change the strings of a tool or a schema, but not its keywords and types."""
    if isinstance(value, str):
        return value if is_type and value in _TYPES else change(value)
    if isinstance(value, Mapping):
        return {
            key if key in _KEYWORDS else change(key): _schema(inner, change, is_type=key == "type")
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_schema(inner, change, is_type=is_type) for inner in value]
    return value


# Contents of a next message that have no beginning in common, as texts and as parts.
_NEXT_CONTENTS: Final = (
    "a",
    "7 Z",
    (TextPart("."),),
    (TextPart("b"), ImagePart("", "auto", "")),
    (ImagePart("", "auto", ""), TextPart("c")),
)
# Results of a call that have no beginning in common.
_NEXT_RESULTS: Final = ("a", "7 Z", '{"b": 1}')
# What an outline keeps of a message.
_OUTLINE_TEXT: Final = 64
_OUTLINE_PARTS: Final = 4


def continued(answer: Message, *, sends_reasoning: bool) -> Iterator[tuple[Message, ...]]:
    """Yield ways in which an answer and what follows it may be told.

    A client that has sent the reasoning of an earlier answer sends this one's, too.
    """
    is_certain = sends_reasoning or answer.reasoning is None
    bare = dataclasses.replace(answer, reasoning=None)
    for told in (answer,) if is_certain else (answer, bare):
        for content in _NEXT_CONTENTS:
            yield told, Message("user", content)
        for text, calls in itertools.product(_NEXT_RESULTS, _answered(answer.tool_calls)):
            results = (
                Message("tool", text, tool_call_id=call.id, name=call.name) for call in calls
            )
            yield told, *results


def _answered(calls: tuple[ToolCall, ...]) -> tuple[tuple[ToolCall, ...], ...]:
    """Calls whose results may follow an answer, in orders with other first ones."""
    return (calls, calls[::-1], calls[:1]) if calls else ()


def outline(said: Conversation) -> Conversation:
    """A short conversation in the form of `said`: its instructions, its last question, one tool."""
    system = [message for message in said.messages[:1] if message.role == "system"]
    users = [message for message in said.messages if message.role == "user"]
    messages = tuple(map(shortened, [*system, *users[-1:]]))
    return dataclasses.replace(said, messages=messages, tools=said.tools[:1])


def shortened(message: Message) -> Message:
    """The message with the beginnings of its texts, and the first of its parts and calls."""
    content = message.content
    if isinstance(content, str):
        content = content[:_OUTLINE_TEXT]
    else:
        content = tuple(
            dataclasses.replace(part, text=part.text[:_OUTLINE_TEXT])
            if isinstance(part, TextPart)
            else part
            for part in content[:_OUTLINE_PARTS]
        )
    reasoning = None if message.reasoning is None else message.reasoning[:_OUTLINE_TEXT]
    calls = message.tool_calls[:_OUTLINE_PARTS]
    return dataclasses.replace(message, content=content, reasoning=reasoning, tool_calls=calls)


PROBE: Final = "a8b1c6"
PROBE_ARGUMENT: Final = "d3e9f2"
"""Texts that no template contains."""
_PROBE_TOOL: Final = Tool(
    PROBE,
    PROBE,
    {"type": "object", "properties": {"x": {"type": "string", "description": PROBE}}},
)


def probe_tools() -> Conversation:
    """A conversation with a tool."""
    return Conversation([Message("user", "hi")], [_PROBE_TOOL])


def probe_calls() -> Conversation:
    """A conversation with a call and its result."""
    values = {PROBE_ARGUMENT: [1]}
    call = ToolCall("a1b2c3d4e", "f", json.dumps(values), values)
    return Conversation(
        [
            Message("user", "hi"),
            Message("assistant", "", tool_calls=(call,)),
            Message("tool", "ok", tool_call_id=call.id, name="f"),
        ],
        [_PROBE_TOOL],
    )


def conversation_without(said: Conversation, dropped: Collection[int]) -> Conversation:
    """Return the conversation without the images whose indices are in `dropped`."""
    return dataclasses.replace(said, messages=without_images(said.messages, sorted(dropped)))


def without_images(messages: Sequence[Message], dropped: Sequence[int]) -> tuple[Message, ...]:
    """Return the messages without the images whose indices are in `dropped`."""
    if not dropped:
        return tuple(messages)
    kept, index = [], 0
    for message in messages:
        if isinstance(message.content, str):
            kept.append(message)
            continue
        parts: list[TextPart | ImagePart] = []
        for part in message.content:
            if isinstance(part, ImagePart):
                index += 1
                if index - 1 in dropped:
                    continue
            parts.append(part)
        kept.append(dataclasses.replace(message, content=tuple(parts)))
    return tuple(kept)
