"""What a choice has of its prompt: offsets of tokens, and the parts that workers send."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import pytest

from vlm_worker.errors import CorruptTransferError
from vlm_worker.gateway.detokenization import ChosenToken, LikelyToken, TextChunk
from vlm_worker.gateway.echo import Echo, after, offsets_in
from vlm_worker.gateway.orchestrate.prepared_request import DeliveredTokens
from vlm_worker.gateway.prompts import Prompt
from vlm_worker.types import PromptLogprobs


@pytest.mark.parametrize(
    ("text", "tokens", "offsets"),
    [
        ("a red", [b"a", b" red"], [0, 1]),
        ("a red", [b"<s>", b"a", b" red"], [0, 0, 1]),
        ("a red", [b"<s>", b" a", b" red"], [0, 0, 1]),
        ("a<s>b", [b"a", b"<s>", b"b"], [0, 1, 4]),
        ("\u00e9!", [b"\xc3", b"\xa9", b"!"], [0, 0, 1]),
        ("x\U0001f600y", [b"x", b"\xf0\x9f", b"\x98\x80", b"y"], [0, 1, 1, 2]),
        (" a", [b" a"], [0]),
        ("", [b"<s>"], [0]),
    ],
)
def test_the_offset_of_a_token_is_where_its_text_begins(
    text: str, tokens: list[bytes], offsets: list[int]
) -> None:
    assert offsets_in(text, tokens) == offsets


def test_a_text_that_is_not_that_of_its_tokens_still_has_offsets_within_it() -> None:
    offsets = offsets_in("caf\u00e9", [b"cafe", b"\xcc\x81"])
    assert offsets == sorted(offsets)
    assert all(0 <= offset < 4 for offset in offsets)


def test_an_answer_behind_its_prompt_has_later_offsets() -> None:
    token = ChosenToken(LikelyToken("b", b"b", -1.0), (), 3)
    piece = TextChunk("abcb", (token,))
    assert after(Echo("12345"), piece).tokens[0].offset == 8
    assert after(Echo(), piece) is piece


NUM_TOP = 2


def part(first_index: int, count: int) -> PromptLogprobs:
    values = array("f", [-float(first_index + one) for one in range(count)])
    ids = array("I", range(NUM_TOP * count))
    likeliest = array("f", [-1.0] * len(ids))
    return PromptLogprobs(first_index, values, array("I", [1] * count), NUM_TOP, ids, likeliest)


def delivered() -> DeliveredTokens:
    async def emit(*_: Any) -> bool:
        return True

    made = DeliveredTokens(emit)
    made.prompt = Prompt((5, 6, 7, 8, 9))
    return made


@pytest.mark.parametrize(
    "parts", [[(1, 4)], [(1, 1), (2, 3)], [(1, 2), (3, 1), (4, 1)]], ids=["one", "two", "three"]
)
def test_the_parts_of_a_prompt_are_joined(parts: list[tuple[int, int]]) -> None:
    made = delivered()
    for one in parts:
        made.take_scores(part(*one))
    made.end_scores()
    assert made.scored is not None
    assert list(made.scored.scores.logprobs) == [-1.0, -2.0, -3.0, -4.0]
    assert len(made.scored.scores.top_ids) == 4 * NUM_TOP
    assert made.scored.token_ids == (5, 6, 7, 8, 9)


@pytest.mark.parametrize(
    "parts",
    [[], [(1, 3)], [(2, 3)], [(1, 5)], [(1, 2), (2, 3)], [(1, 2), (4, 1)], [(1, 4), (1, 4)]],
)
def test_parts_that_are_not_the_whole_prompt_in_order_are_refused(
    parts: list[tuple[int, int]],
) -> None:
    made = delivered()
    for one in parts:
        made.take_scores(part(*one))
    with pytest.raises(CorruptTransferError, match="those of the 5 tokens"):
        made.end_scores()


def test_parts_with_different_numbers_of_likeliest_tokens_are_refused() -> None:
    made = delivered()
    made.take_scores(part(1, 2))
    made.take_scores(dataclasses.replace(part(3, 2), num_top=1))
    with pytest.raises(CorruptTransferError, match="those of the 5 tokens"):
        made.end_scores()


async def test_parts_of_a_lost_attempt_are_dropped_and_those_of_an_answer_are_not_taken() -> None:
    made = delivered()
    made.take_scores(part(1, 2))
    made.forget_early()
    made.take_scores(part(1, 4))
    made.end_scores()
    scored = made.scored
    await made.deliver(0, (3,))
    made.forget_early()
    made.take_scores(part(1, 4))
    assert made.scored is scored
