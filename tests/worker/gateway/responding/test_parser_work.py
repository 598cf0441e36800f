"""The work of a parser grows with the text, also if the text is of calls that fail."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from worker.gateway.responding.written import CALLS, WRITERS, parsed

from vlm_worker.gateway.responding.template import load_template

HELD = '<tool_call>{"x": "'
"""A call that does not begin: the parser holds all that follows."""
ANGLES = load_template(
    {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "content": {},
            "reasoning_content": {"open": "<think>", "close": "</think>"},
            "tool_calls": {
                "open": "<call>",
                "close": "</call>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [["<<", ">>"]]},
                "transform": {"type": "function", "function": "{content}"},
            },
        },
    }
)
HOSTILE = {
    "anchors": ("hermes", "", "<tool_call>"),
    "anchors in a string": ("hermes", HELD, "<tool_call>"),
    "keys": ("hermes", "", '<tool_call>{"name": "get_weather"'),
    "keys in a string": ("hermes", HELD, '<tool_call>{"name": "get_weather", '),
    "unknown names": ("hermes", "", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    "no object": ("hermes", "", '<tool_call>{"name": "get_weather", "arguments": 1}</tool_call>'),
    "calls": ("hermes", "", WRITERS["hermes"](CALLS[:1])),
    "tags of unknown names": ("qwen3_xml", "", "<tool_call><function=other>"),
    "lists": ("mistral", "", '[TOOL_CALLS][{"name": "get_weather", '),
    "plain objects": ("llama3_json", "", '{"name": "other", '),
    "objects within": ("llama3_json", "", '{"name": "get_weather", "x": '),
    "strings within strings": (ANGLES, "", "<call>{x:<<"),
    "arguments before the name": ("hermes", '<tool_call>{"arguments": {"city": "', "x\\n"),
}


def num_calls(form: Any, pieces: list[str]) -> int:
    """The functions that one answer calls, those of the interpreter included."""
    count = 0

    def note(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        parsed(form, pieces)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("size", [None, 5], ids=["whole", "in pieces"])
def test_twice_the_text_is_at_most_twice_the_work(name: str, size: int | None) -> None:
    form, lead, unit = HOSTILE[name]
    work = []
    for count in (100, 200):
        text = lead + unit * count
        step = size or len(text)
        work.append(num_calls(form, [text[at : at + step] for at in range(0, len(text), step)]))
    assert work[1] < 2.2 * work[0], work


def test_text_of_a_call_that_failed_is_not_read_again() -> None:
    """A complete call within a string of one that fails stays content."""
    inner = '<tool_call>{\\"name\\": \\"get_weather\\"}</tool_call>'
    text = f'<tool_call>{{"x": "{inner}" oh'
    assert parsed("hermes", [text]) == parsed("hermes", list(text)) == (text, "", [])
