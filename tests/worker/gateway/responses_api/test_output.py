"""The events of an output add up to its items, whatever a model says and however it is cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker.gateway.responding.written import CALLS, TOOLS, hermes, loaded
from worker.gateway.responses_api.folding import folded, told, valid

from vlm_worker.gateway.detokenization import ChosenToken, LikelyToken, TextChunk
from vlm_worker.gateway.responding.message import MessageReader
from vlm_worker.gateway.responding.parser import AnswerParser
from vlm_worker.gateway.responses_api.output import Output

SAID = {
    "text": "Red.",
    "text and calls": f"I'll look.{hermes(CALLS)}",
    "calls alone": hermes(CALLS),
    "text around calls": f"a{hermes(CALLS[:1])}\nb{hermes(CALLS[1:])}\nc",
    "reasoning": "<think>\nHm, hm.\n</think>\n\nHm.",
    "reasoning and calls": f"<think>Hm 日本.</think>I'll look.{hermes(CALLS[:1])}",
    "reasoning that is cut": "<think>Hm",
    "a call that is cut": hermes(CALLS[:1])[:60],
    "no call": "a <tool_call> b",
    "nothing": "",
}


def pieces_of(text: str, cuts: list[int]) -> list[TextChunk]:
    """The text in pieces of one token each."""
    ends = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [
        TextChunk(
            text[begin:end],
            (ChosenToken(LikelyToken(text[begin:end], text[begin:end].encode(), -1.0), (), begin),),
        )
        for begin, end in itertools.pairwise(ends)
    ]


def said(
    pieces: list[TextChunk], *, is_cut: bool = False, with_logprobs: bool = True
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """The items and events of an answer, and its message in a chat."""
    reader = MessageReader(AnswerParser(loaded("hermes"), tools=TOOLS), "r/0")
    output, events = Output("r", with_logprobs=with_logprobs), []
    for piece in pieces:
        events += output.add(reader.feed(piece.text), piece)
    events += output.add(reader.finish(), TextChunk(""))
    events += output.end(is_cut=is_cut)
    return output.items, events, reader.message


@given(st.sampled_from(sorted(SAID)), st.lists(st.integers(0, 10_000), max_size=40), st.booleans())
def test_events_add_up_to_the_items_and_the_items_to_the_message_of_a_chat(
    name: str, cuts: list[int], is_cut: bool
) -> None:
    items, events, message = said(pieces_of(SAID[name], cuts), is_cut=is_cut)
    assert folded([valid({**event, "sequence_number": 0}) for event in events]) == items
    texts = {"message": "", "reasoning": ""}
    for item in items:
        if item["type"] in texts:
            texts[item["type"]] += item["content"][0]["text"]
    assert texts["message"] == (message["content"] or "")
    assert texts["reasoning"] == message.get("reasoning_content", "")
    calls = [item for item in items if item["type"] == "function_call"]
    assert [(one["call_id"], one["name"], one["arguments"]) for one in calls] == [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]
    assert len({item["id"] for item in items}) == len(items) > 0
    expected = ["completed"] * (len(items) - 1) + ["incomplete" if is_cut else "completed"]
    assert [item["status"] for item in items] == expected


@given(st.sampled_from(sorted(SAID)), st.lists(st.integers(0, 10_000), max_size=40))
def test_items_do_not_depend_on_how_the_text_is_cut(name: str, cuts: list[int]) -> None:
    pieces = pieces_of(SAID[name], cuts)
    whole = said(pieces_of(SAID[name], []), with_logprobs=False)[0]
    assert said(pieces, with_logprobs=False)[0] == whole


@pytest.mark.parametrize("name", SAID)
def test_a_message_has_the_tokens_of_its_text_and_of_no_other(name: str) -> None:
    """With a token per character they are the text."""
    items, _, _ = said(pieces_of(SAID[name], list(range(1000))))
    for item in items:
        if item["type"] == "message":
            (part,) = item["content"]
            assert "".join(token["token"] for token in part["logprobs"]) == part["text"]
    without = said(pieces_of(SAID[name], list(range(1000))), with_logprobs=False)[0]
    bare = [
        {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}
        if item["type"] == "message"
        else item
        for item in items
    ]
    assert told(without) == told(bare)


def test_text_of_an_answer_that_is_not_parsed_is_one_message_with_all_tokens() -> None:
    output = Output("r", with_logprobs=True)
    pieces = [*pieces_of("Red.", [1, 2]), TextChunk("", pieces_of("x", [])[0].tokens)]
    events = [event for piece in pieces for event in output.add([piece.text], piece)]
    events += output.end(is_cut=False)
    (item,) = output.items
    assert item["content"][0]["text"] == "Red."
    assert [token["token"] for token in item["content"][0]["logprobs"]] == ["R", "e", "d.", "x"]
    assert folded(events) == output.items
