"""Writes a request of `/v1/responses` as the body of a chat. Pure.

The chat's own parser then checks the values. So one parser decides what is valid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from vlm_worker.gateway.api.errors import ApiError, invalid, unsupported
from vlm_worker.gateway.api.schema import MAX_TEXT, Fields, refuse
from vlm_worker.gateway.api.tools import MAX_NAME, MAX_TOOLS, parse_tools
from vlm_worker.gateway.responses_api.fields import (
    ENCRYPTED,
    FUNCTION_TOOL,
    LOGPROBS,
    OF_CHAT,
    RESPONSES,
    SAME,
)
from vlm_worker.gateway.responses_api.items import messages_of
from vlm_worker.gateway.responses_api.paths import Paths
from vlm_worker.gateway.turns import Steps

_MAX_INCLUDES: Final = 16
_CHOICES: Final = ("none", "auto", "required")
# Fields of a request that its answer repeats, with what an absent one counts as.
_REPEATED: Final[Mapping[str, Any]] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "reasoning": None,
    "safety_identifier": None,
    "text": None,
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "user": None,
}

_encode = msgspec.json.Encoder().encode


@dataclasses.dataclass(frozen=True, slots=True)
class Repeated:
    """What an answer repeats of its request: JSON texts by field."""

    fields: Mapping[str, msgspec.Raw]
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Translated:
    """The body of the chat, and what the answer repeats of the request."""

    chat: dict[str, Any]
    repeated: Repeated


def translated(body: dict[str, Any], paths: Paths) -> Steps[Translated]:
    """Translate a request; `paths` gets the names of its parts.

    Raises:
        ApiError: 400; it names the invalid part.
    """
    fields = Fields("", body)
    refuse(fields, RESPONSES)
    refuse(fields, OF_CHAT)
    said, instructions = fields.take("input"), fields.text("instructions", max_length=MAX_TEXT)
    if said is None:
        raise fields.missing("input")
    chat = {name: value for name in SAME if (value := fields.take(name)) is not None}
    limit = fields.take("max_output_tokens")
    chat |= {} if limit is None else {"max_completion_tokens": limit}
    chat |= _logprobs(fields, fields.take("top_logprobs"))
    chat |= _stream_options(fields)
    chat |= _text(fields.child("text"))
    chat |= _reasoning(fields.child("reasoning"))
    chat |= yield from _tools(fields, paths)
    fields.done()
    chat["messages"] = yield from messages_of(said, instructions, paths)
    return Translated(chat, (yield from _repeated(body)))


def _logprobs(fields: Fields, num_top: Any) -> dict[str, Any]:
    """Return `logprobs` and `top_logprobs` of the chat."""
    included = fields.array("include", max_length=_MAX_INCLUDES) or []
    for index, value in enumerate(included):
        if value not in (LOGPROBS, ENCRYPTED):
            where = f"include[{index}]"
            raise unsupported(where, f"'{where}' must be '{LOGPROBS}' or '{ENCRYPTED}'.")
    if LOGPROBS in included:
        return {"logprobs": True} | ({} if num_top is None else {"top_logprobs": num_top})
    if num_top is not None and (num_top != 0 or isinstance(num_top, bool)):
        raise invalid(f"'top_logprobs' needs 'include': ['{LOGPROBS}'].", param="top_logprobs")
    return {}


def _stream_options(fields: Fields) -> dict[str, Any]:
    options = fields.child("stream_options")
    if options is None:
        return {}
    options.only("include_obfuscation", (False,), "events are not padded.")
    options.done()
    return {"stream_options": {}}  # the chat checks that there is a stream


def _text(text: Fields | None) -> dict[str, Any]:
    if text is None:
        return {}
    text.only("verbosity", ("medium",), "the model has no such setting.")
    given = text.child("format")
    text.done()
    if given is None:
        return {}
    kind = given.take("type")
    names = ("name", "description", "schema", "strict")
    inner = {name: value for name in names if (value := given.take(name)) is not None}
    given.done()
    if kind == "json_schema":
        return {"response_format": {"type": kind, "json_schema": inner}}
    return {"response_format": {"type": kind, **inner}}


def _reasoning(reasoning: Fields | None) -> dict[str, Any]:
    if reasoning is None:
        return {}
    effort = reasoning.take("effort")
    for name in ("summary", "generate_summary"):
        reasoning.only(name, ("auto",), "reasoning is given in full, and not summarized.")
    reasoning.only("context", ("auto",), "the chat template decides what the model reads.")
    reasoning.only("mode", ("standard",), "the model has no such setting.")
    reasoning.done()
    return {} if effort is None else {"reasoning_effort": effort}


def _tools(fields: Fields, paths: Paths) -> Steps[dict[str, Any]]:
    """Return `tools`, `tool_choice` and `parallel_tool_calls` of the chat.

    Without tools, the defaults of the choice have no effect; clients send them.
    """
    values = fields.array("tools", max_length=MAX_TOOLS) or []
    tools = []
    for index, value in enumerate(values):
        path = f"tools[{index}]"
        tools.append(_tool(path, value))
        paths.put(f"{path}.function", path)
        yield
    choice, parallel = fields.take("tool_choice"), fields.take("parallel_tool_calls")
    if isinstance(choice, dict):
        choice, tools = yield from _named(choice, tools, paths)
    elif choice is not None and choice not in _CHOICES:
        raise _wrong_choice()
    if not tools:
        choice = None if choice == "auto" or choice == "none" else choice
        parallel = None if parallel is True else parallel
    chat = {"tools": tools or None, "tool_choice": choice, "parallel_tool_calls": parallel}
    return {name: value for name, value in chat.items() if value is not None}


def _tool(path: str, value: Any) -> dict[str, Any]:
    fields = Fields(path, value)
    if fields.required_text("type", max_length=64) != "function":
        raise unsupported(
            f"{path}.type",
            f"'{path}.type' must be 'function': hosted and custom tools are not built.",
        )
    refuse(fields, FUNCTION_TOOL)
    names = ("name", "description", "parameters", "strict")
    function = {name: value for name in names if (value := fields.take(name)) is not None}
    fields.done()
    return {"type": "function", "function": function}


def _named(
    value: dict[str, Any], tools: list[dict[str, Any]], paths: Paths
) -> Steps[tuple[Any, list[dict[str, Any]]]]:
    """Return the choice of a chat, and the tools that it allows."""
    choice = Fields("tool_choice", value)
    kind = choice.required_text("type", max_length=64)
    if kind == "function":
        name = choice.take("name")
        choice.done()
        return {"type": "function", "function": {"name": name}}, tools
    if kind != "allowed_tools":
        raise unsupported("tool_choice.type", f"'tool_choice.type' is not supported: {_EXPECTED}.")
    mode = choice.choice("mode", ("auto", "required"))
    if mode is None:
        raise choice.missing("mode")
    allowed = choice.array("tools", min_length=1, max_length=MAX_TOOLS)
    if allowed is None:
        raise choice.missing("tools")
    choice.done()
    try:  # also those that are not allowed
        yield from parse_tools(Fields("", {"tools": tools or None}))
    except ApiError as error:
        raise paths.renamed(error) from error
    return mode, _allowed(allowed, tools, paths)


def _allowed(
    values: Sequence[Any], tools: Sequence[dict[str, Any]], paths: Paths
) -> list[dict[str, Any]]:
    """Return the tools that `tool_choice.tools` names, in the order of `tools`."""
    places = {tool["function"]["name"]: index for index, tool in enumerate(tools)}
    kept = set()
    for index, value in enumerate(values):
        fields = Fields(f"tool_choice.tools[{index}]", value)
        if fields.required_text("type", max_length=64) != "function":
            raise unsupported(f"{fields.path}.type", f"'{fields.path}.type' must be 'function'.")
        name = fields.required_text("name", max_length=MAX_NAME)
        fields.done()
        if name not in places:
            where = f"{fields.path}.name"
            raise invalid(f"'{where}' is the name of no tool of 'tools'.", param=where)
        kept.add(places[name])
    for place, index in enumerate(sorted(kept)):
        paths.put(f"tools[{place}]", f"tools[{index}]")
        paths.put(f"tools[{place}].function", f"tools[{index}]")
    return [tools[index] for index in sorted(kept)]


_EXPECTED: Final = (
    "send 'none', 'auto', 'required', {'type': 'function', 'name': NAME}, or 'allowed_tools'"
)


def _wrong_choice() -> ApiError:
    return invalid(f"'tool_choice' is not known: {_EXPECTED}.", param="tool_choice")


def _repeated(body: Mapping[str, Any]) -> Steps[Repeated]:
    """Write what the answer repeats, once for all events of a stream."""
    fields = {}
    for name, absent in _REPEATED.items():
        value = body.get(name)
        value = absent if value is None else value
        if name == "tools":
            value = [_shown_tool(tool) for tool in value]
        elif name == "text":
            value = {**(value or {}), "format": (value or {}).get("format") or {"type": "text"}}
        elif name == "reasoning":
            value = {"effort": (value or {}).get("effort"), "summary": None}
        fields[name] = _encode(value)
        yield
    num_bytes = sum(map(len, fields.values()))
    return Repeated({name: msgspec.Raw(text) for name, text in fields.items()}, num_bytes)


def _shown_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("parameters"),
        "strict": tool.get("strict") or False,
    }
