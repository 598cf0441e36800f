"""Bad tools, choices and calls, and the error of each."""

from __future__ import annotations

from typing import Any

from worker.gateway.corpus import Bad, chat

INVALID, TYPE, MISSING = "invalid_value", "invalid_type", "missing_required_parameter"
UNKNOWN, UNSUPPORTED = "unknown_parameter", "unsupported_parameter"


def tool(name: Any = "f", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def tools(*listed: Any, **changes: Any) -> dict[str, Any]:
    return chat(tools=list(listed), **changes)


def schema(**fields: Any) -> dict[str, Any]:
    return tools(tool(parameters={"type": "object", **fields}))


def call(**changes: Any) -> dict[str, Any]:
    return {
        "id": "c1",
        "type": "function",
        "function": {"name": "f", "arguments": "{}"},
        **changes,
    }


def called(*calls: Any, answer: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    asked = {"role": "user", "content": "x"}
    messages: list[dict[str, Any]] = [
        asked,
        {"role": "assistant", "tool_calls": list(calls), **fields},
    ]
    return chat(messages=[*messages, *([answer] if answer else [])])


def arguments(text: Any) -> dict[str, Any]:
    return called(call(function={"name": "f", "arguments": text}))


F = "tools[0].function"
P = f"{F}.parameters"
C = "messages[1].tool_calls[0]"
A = f"{C}.function.arguments"
NAMED = {"type": "function", "function": {"name": "f"}}

TOOL_ROWS = [
    Bad("no tools", tools(), 400, INVALID, "tools"),
    Bad("tools as an object", chat(tools={}), 400, TYPE, "tools"),
    Bad("129 tools", tools(*(tool(f"f{i}") for i in range(129))), 400, INVALID, "tools"),
    Bad("a tool as text", tools("f"), 400, TYPE, "tools[0]"),
    Bad("a tool without a type", tools({"function": {}}), 400, MISSING, "tools[0].type"),
    Bad("a hosted tool", tools({"type": "web_search"}), 400, UNSUPPORTED, "tools[0].type"),
    Bad("no function", tools({"type": "function"}), 400, MISSING, F),
    Bad("more in a tool", tools({**tool(), "x": 1}), 400, UNKNOWN, "tools[0].x"),
    Bad("more in a function", tools(tool(x=1)), 400, UNKNOWN, f"{F}.x"),
    Bad("a function without a name", tools(tool(None)), 400, MISSING, f"{F}.name"),
    Bad("a name with a space", tools(tool("a b")), 400, INVALID, f"{F}.name"),
    Bad("a name of a control token", tools(tool("<|im_end|>")), 400, INVALID, f"{F}.name"),
    Bad("a long name", tools(tool("f" * 65)), 400, INVALID, f"{F}.name"),
    Bad("a name twice", tools(tool(), tool()), 400, INVALID, "tools[1].function.name"),
    Bad("a description as a number", tools(tool(description=5)), 400, TYPE, f"{F}.description"),
    Bad("parameters as a list", tools(tool(parameters=[])), 400, TYPE, P),
    Bad("parameters of a string", schema(type="string"), 400, INVALID, f"{P}.type"),
    Bad("properties as a list", schema(properties=[]), 400, TYPE, f"{P}.properties"),
    Bad("a property as text", schema(properties={"a": "b"}), 400, TYPE, f"{P}.properties.a"),
    Bad(
        "a type of a property as a number",
        schema(properties={"a": {"type": 5}}),
        400,
        TYPE,
        f"{P}.properties.a.type",
    ),
    Bad("required as text", schema(required="a"), 400, TYPE, f"{P}.required"),
    Bad("required numbers", schema(required=[1]), 400, TYPE, f"{P}.required"),
    Bad(
        "items as text",
        schema(properties={"a": {"type": "array", "items": "b"}}),
        400,
        TYPE,
        f"{P}.properties.a.items",
    ),
    Bad(
        "an enum as text",
        schema(properties={"a": {"enum": "b"}}),
        400,
        TYPE,
        f"{P}.properties.a.enum",
    ),
    Bad("no type", schema(properties={"a": {"type": None}}), 400, TYPE, f"{P}.properties.a.type"),
    Bad("no enum", schema(properties={"a": {"enum": None}}), 400, TYPE, f"{P}.properties.a.enum"),
    Bad("a union as an object", schema(anyOf={}), 400, TYPE, f"{P}.anyOf"),
    Bad("a union of text", schema(anyOf=["a"]), 400, TYPE, f"{P}.anyOf[0]"),
    Bad("strict as text", tools(tool(strict="yes")), 400, TYPE, f"{F}.strict"),
    Bad("a choice of another word", tools(tool(), tool_choice="any"), 400, INVALID, "tool_choice"),
    Bad("a choice without tools", chat(tool_choice="auto"), 400, INVALID, "tool_choice"),
    Bad("a name without tools", chat(tool_choice=NAMED), 400, INVALID, "tool_choice.function.name"),
    Bad(
        "a name of no tool",
        tools(tool("g"), tool_choice=NAMED),
        400,
        INVALID,
        "tool_choice.function.name",
    ),
    Bad(
        "allowed tools",
        tools(tool(), tool_choice={"type": "allowed_tools"}),
        400,
        UNSUPPORTED,
        "tool_choice.type",
    ),
    Bad(
        "a choice without a function",
        tools(tool(), tool_choice={"type": "function"}),
        400,
        MISSING,
        "tool_choice.function",
    ),
    Bad(
        "calls in parallel of no tools",
        chat(parallel_tool_calls=True),
        400,
        INVALID,
        "parallel_tool_calls",
    ),
    Bad(
        "calls in parallel as text",
        tools(tool(), parallel_tool_calls="no"),
        400,
        TYPE,
        "parallel_tool_calls",
    ),
    Bad("functions", chat(functions=[]), 400, UNSUPPORTED, "functions"),
    Bad("an effort of its own", chat(reasoning_effort="much"), 400, INVALID, "reasoning_effort"),
    Bad(
        "an effort of a model that has none",
        chat(reasoning_effort="low"),
        400,
        UNSUPPORTED,
        "reasoning_effort",
    ),
    # shapes' chat template writes neither tools nor calls
    Bad("tools of a model that takes none", tools(tool()), 400, UNSUPPORTED, "tools"),
    Bad(
        "calls of a model that writes none",
        called(call()),
        400,
        UNSUPPORTED,
        "messages[1].tool_calls",
    ),
    Bad("a call as text", called("f"), 400, TYPE, C),
    Bad("a call without an id", called(call(id=None)), 400, MISSING, f"{C}.id"),
    Bad("a call of another type", called(call(type="custom")), 400, UNSUPPORTED, f"{C}.type"),
    Bad("a call without a function", called(call(function=None)), 400, MISSING, f"{C}.function"),
    Bad("more in a call", called(call(x=1)), 400, UNKNOWN, f"{C}.x"),
    Bad(
        "a call of a bad name",
        called(call(function={"name": "a b", "arguments": "{}"})),
        400,
        INVALID,
        f"{C}.function.name",
    ),
    Bad("a call without arguments", arguments(None), 400, MISSING, A),
    Bad("arguments as an object", arguments({}), 400, TYPE, A),
    Bad("arguments of no JSON", arguments("{"), 400, INVALID, A),
    Bad("arguments as a list", arguments("[]"), 400, INVALID, A),
    Bad("arguments with NaN", arguments('{"a": NaN}'), 400, INVALID, A),
    Bad("arguments with a key twice", arguments('{"a": 1, "a": 2}'), 400, INVALID, A),
    Bad("deep arguments", arguments('{"a":' + "[" * 5000 + "]" * 5000 + "}"), 400, INVALID, A),
    Bad("many arguments", arguments('{"a": [' + "0," * 20_000 + "0]}"), 400, INVALID, A),
    Bad("129 calls", called(*[call()] * 129), 400, INVALID, "messages[1].tool_calls"),
    Bad("no content and no call", called(), 400, MISSING, "messages[1].content"),
    Bad(
        "reasoning of a user",
        chat(messages=[{"role": "user", "content": "x", "reasoning_content": "y"}]),
        400,
        INVALID,
        "messages[0].reasoning_content",
    ),
    Bad(
        "the answer to another call",
        called(call(), answer={"role": "tool", "tool_call_id": "c2", "content": "x"}),
        400,
        INVALID,
        "messages[2].tool_call_id",
    ),
    Bad(
        "an image of a tool",
        called(
            call(),
            answer={
                "role": "tool",
                "tool_call_id": "c1",
                "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}],
            },
        ),
        400,
        INVALID,
        "messages[2].content[0]",
    ),
]
