"""What models write: calls in each format, as the published chat templates write them."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from vlm_worker.gateway.responding.builtin import builtin
from vlm_worker.gateway.responding.calls import CallArguments, CallBegins
from vlm_worker.gateway.responding.parser import AnswerParser, Event, Text
from vlm_worker.gateway.responding.template import Kind, ResponseTemplate

Call = tuple[str, dict[str, Any]]


def hermes(calls: Sequence[Call]) -> str:
    return "".join(
        f"\n<tool_call>\n{json.dumps({'name': name, 'arguments': given}, ensure_ascii=False)}"
        "\n</tool_call>"
        for name, given in calls
    )


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def qwen3_xml(calls: Sequence[Call]) -> str:
    return "".join(
        f"\n<tool_call>\n<function={name}>\n"
        + "".join(
            f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in given.items()
        )
        + "</function>\n</tool_call>"
        for name, given in calls
    )


def glm4(calls: Sequence[Call]) -> str:
    return "".join(
        f"\n<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n"
            for key, value in given.items()
        )
        + "</tool_call>"
        for name, given in calls
    )


def gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(gemma_value, value)) + "]"
    return json.dumps(value)


def gemma4(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|tool_call>call:{name}{gemma_value(given)}<tool_call|>" for name, given in calls
    )


def mistral(calls: Sequence[Call]) -> str:
    listed = [{"name": name, "arguments": given} for name, given in calls]
    return "[TOOL_CALLS]" + json.dumps(listed, ensure_ascii=False) if calls else ""


def mistral_args(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{plain(given)}" for name, given in calls)


def llama3_json(calls: Sequence[Call]) -> str:
    listed = [
        json.dumps({"name": name, "parameters": given}, ensure_ascii=False) for name, given in calls
    ]
    return "; ".join(listed)


WRITERS = {
    "hermes": hermes, "qwen3_xml": qwen3_xml, "glm4": glm4, "gemma4": gemma4, "mistral": mistral,
    "mistral_args": mistral_args, "llama3_json": llama3_json,
}  # fmt: skip

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "places": {"type": "array", "items": {"type": "string"}},
            "options": {"type": "object"},
        },
    },
    "no-arguments_2": {"type": "object", "properties": {}},
}
CALLS: list[Call] = [
    ("get_weather", {"city": 'Zürich "n\'\n\t\\ord" 🌨', "days": 3, "exact": True,
                     "places": ["a", "b}]", "</x>"],
                     "options": {"deep": [{"er": None}], "n": -1.5e3}}),
    ("no-arguments_2", {}),
    ("get_weather", {"city": "", "days": 0}),
]  # fmt: skip


loaded = functools.cache(builtin)


def parsed(
    template: ResponseTemplate | str, pieces: Sequence[str], **options: Any
) -> tuple[str, str, list[tuple[str, str]]]:
    """Content, reasoning, and calls with the text of their arguments."""
    chosen = loaded(template) if isinstance(template, str) else template
    parser = AnswerParser(chosen, **{"tools": TOOLS, **options})
    events: list[Event] = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.finish()])


def joined(events: Sequence[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    texts = {Kind.CONTENT: "", Kind.REASONING: ""}
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, Text):
            texts[event.kind] += event.text
        elif isinstance(event, CallBegins):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            assert event.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return texts[Kind.CONTENT], texts[Kind.REASONING], calls
