"""The tokens of the reasoning are those that have a part of its text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker.gateway.responding.written import TOOLS, WRITERS

from vlm_worker.gateway.responding.builtin import builtin
from vlm_worker.gateway.responding.message import MessageReader
from vlm_worker.gateway.responding.parser import AnswerParser


def counted(pieces: Sequence[str], *, opening: str = "") -> tuple[int, str]:
    """The number of reasoning tokens, and the reasoning; each piece is a token."""
    parser = AnswerParser(builtin("hermes"), tools=TOOLS, opening=opening)
    reader = MessageReader(parser, "r/0")
    for piece in pieces:
        reader.feed(piece)
    reader.feed("", num_tokens=0)
    reader.finish()
    return reader.num_reasoning_tokens, reader.message.get("reasoning_content", "")


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["<think>", "a", " b", "</think>", "c", " d"], 2),
        (["<", "think", ">", "\n", "a", "</", "think", ">", "\n\n", "c"], 2),
        (["a", "</", "x", "</think>", "c"], 0),
        (["<think>", "a", "</", "b", "</think>", "c"], 3),
        (["<think>", "a", "", "b"], 3),
        (["<think>", "a", "</thi"], 2),
        (["<think>", "</think>", "c"], 0),
        (["<think>", "a", "</think>", "b", "<think>", "c", "</think>"], 2),
        (["x", "y"], 0),
        (["<think>a</think>b", "c"], 1),
        (["<think>", "a", "</think>", *WRITERS["hermes"]([("get_weather", {"city": "x"})])], 1),
    ],
)
def test_tokens_with_text_of_the_reasoning_are_counted(pieces: list[str], expected: int) -> None:
    assert counted(pieces)[0] == expected


def test_the_prompt_may_have_begun_it() -> None:
    assert counted(["a", "b", "</think>", "c"], opening="<think>\n") == (2, "ab")


@given(st.lists(st.sampled_from(["<think>", "</think>", "a", " ", "b\n", "</", "<tool_call>"])))
def test_there_are_no_more_than_all_and_none_without_reasoning(pieces: list[str]) -> None:
    count, reasoning = counted(pieces)
    assert (count > 0) == (reasoning != "")
    assert count <= len(pieces)
    letters = sum(reasoning.count(letter) for letter in "ab")
    assert count >= letters
