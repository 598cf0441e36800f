"""Log-probabilities go with the text that their tokens make, whatever holds the text back."""

from __future__ import annotations

import functools
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from worker.gateway.test_detokenization import cut, tokenizer

from vlm_worker.core.token_texts import TokenTexts
from vlm_worker.gateway.detokenization import ChosenToken, TextAssembler, TextChunk
from vlm_worker.gateway.echo import completion_body
from vlm_worker.gateway.responses import chat_body
from vlm_worker.types import TokenLogprobs
from vlm_worker.wire.logprob_messages import LOGPROBS

EMOJI = "😀é한"


@functools.cache
def texts() -> TokenTexts:
    return TokenTexts(tokenizer())


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def pieces(token_ids: list[int], *stop: str) -> list[TextChunk]:
    """One piece per token until a stop string is complete, and the last words."""
    assembler = TextAssembler(tokenizer(), texts(), stop=stop)
    found = []
    for number, token_id in enumerate(token_ids):
        found.append(assembler.feed(token_id, TokenLogprobs(-float(number), ((token_id, -0.5),))))
        if assembler.stopped:
            break
    return [*found, assembler.finish()]


def test_a_token_without_any_probability_is_json_from_the_wire_on() -> None:
    (token_id, other) = ids_of("ab")
    on_the_wire = LOGPROBS.encode(TokenLogprobs(-math.inf, ((other, -0.5), (token_id, -math.inf))))
    piece = TextAssembler(tokenizer(), texts(), stop=[]).feed(
        token_id, LOGPROBS.decode(on_the_wire, "")
    )
    for body in (chat_body(piece.tokens), completion_body(piece.tokens)):
        assert "-9999.0" in json.dumps(body, allow_nan=False)


def text_of(found: list[TextChunk]) -> str:
    return "".join(piece.text for piece in found)


words = st.text(st.sampled_from([*"abc re", *EMOJI]), max_size=30)


@given(words)
def test_the_bytes_of_all_tokens_are_the_text(text: str) -> None:
    found = pieces(ids_of(text))
    tokens = [token for piece in found for token in piece.tokens]
    assert text_of(found) == text
    assert b"".join(token.chosen.utf8_bytes for token in tokens) == text.encode()
    assert [token.chosen.logprob for token in tokens] == [-float(i) for i in range(len(tokens))]
    assert all(token.top[0].utf8_bytes == token.chosen.utf8_bytes for token in tokens)


@given(words)
def test_a_token_goes_with_the_text_that_it_begins(text: str) -> None:
    sent = 0
    for piece in pieces(ids_of(text)):
        for token in piece.tokens:
            assert token.offset < sent + len(piece.text)
            assert text[token.offset :].encode().startswith(token.chosen.utf8_bytes) or (
                "\\x" in token.chosen.text  # a part of a character
            )
        sent += len(piece.text)


@given(words, st.lists(st.text(st.sampled_from([*"abc ", *EMOJI]), min_size=1, max_size=3),
                       min_size=1, max_size=3))  # fmt: skip
def test_no_token_behind_the_cut_of_a_stop_string_is_told(text: str, stops: list[str]) -> None:
    found = pieces(ids_of(text), *stops)
    want = cut(text, stops)
    assert text_of(found) == want
    told = [token for piece in found for token in piece.tokens]
    whole = [token for piece in pieces(ids_of(text)) for token in piece.tokens]
    stopped = any(stop in text for stop in stops)
    kept = [token for token in whole if token.offset < len(want)] if stopped else whole
    assert told == kept


@functools.cache
def falls_back() -> Tokenizer:
    """As sentencepiece does: "a" and "re" are tokens, all else is bytes."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"a": 256, "re": 257}
    model = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    model.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return model


def with_bytes(text: str) -> list[int]:
    """The tokens of a text for `falls_back`."""
    found: list[int] = []
    for part in re.split("(a|re)", text):
        found += [{"a": 256, "re": 257}[part]] if part in ("a", "re") else part.encode()
    return found


def told_with_bytes(token_ids: list[int], *stop: str) -> tuple[str, list[ChosenToken]]:
    assembler = TextAssembler(falls_back(), TokenTexts(falls_back()), stop=stop)
    found = []
    for token_id in token_ids:
        found.append(assembler.feed(token_id, TokenLogprobs(-1.0)))
        if assembler.stopped:
            break
    found.append(assembler.finish())
    return text_of(found), [token for piece in found for token in piece.tokens]


@given(words, st.text(st.sampled_from([*"are ", *EMOJI]), min_size=1, max_size=3) | st.none())
def test_tokens_that_are_bytes_join_to_the_text_too(text: str, stop: str | None) -> None:
    """Also to a text that is cut amid a run of them, unless the cut is amid a token."""
    stops = [stop] if stop else []
    want = cut(text, stops)
    shown, told = told_with_bytes(with_bytes(text), *stops)
    assert shown == want
    joined = b"".join(token.chosen.utf8_bytes for token in told).decode()
    assert joined.removesuffix("e") == want.removesuffix("e")
    for token in told:
        here = text[token.offset :].encode()
        assert token.chosen.utf8_bytes in here[:4]


def test_a_token_behind_a_run_of_bytes_begins_behind_it() -> None:
    text, told = told_with_bytes(with_bytes("é한are"))
    assert text == "é한are"
    assert [token.offset for token in told] == [0, 0, 1, 1, 1, 2, 3]


def test_bytes_that_are_no_text_show_one_by_one() -> None:
    text, told = told_with_bytes([0xF0, 0x9F, 256])
    assert text == "\ufffd\ufffda"
    assert [token.offset for token in told] == [0, 1, 2]


def test_a_stop_string_in_the_very_first_token_leaves_nothing() -> None:
    found = pieces(ids_of("red circle"), "r")
    assert len(found) == 2
    assert not any(found)


def test_control_tokens_are_not_told() -> None:
    end = tokenizer().token_to_id("<|im_end|>")
    found = pieces([*ids_of("red"), end, 10**6])
    assert text_of(found) == "red"
    assert b"".join(t.chosen.utf8_bytes for piece in found for t in piece.tokens) == b"red"


def test_a_part_of_a_character_shows_its_bytes() -> None:
    shown = [texts().of(token_id) for token_id in ids_of("😀")]
    assert len(shown) > 1
    assert b"".join(utf8_bytes for _, utf8_bytes in shown).decode() == "😀"
    assert all(text.startswith("\\x") for text, _ in shown)


@pytest.mark.parametrize(
    ("piece", "utf8_bytes"),
    [("▁red", b" red"), ("<0xF0>", b"\xf0"), ("s", b"s"), ("<0xZZ>", b"<0xZZ>")],
)
def test_sentencepiece_s_pieces_are_read_as_they_decode(piece: str, utf8_bytes: bytes) -> None:
    model = Tokenizer(models.BPE(vocab={piece: 0}, merges=[], byte_fallback=True))
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    assert TokenTexts(model).of(0)[1] == utf8_bytes


def test_a_stop_token_has_no_text_and_lets_go_what_was_held_for_a_stop_string() -> None:
    (first, second, last) = ids_of("a") + ids_of("b") + ids_of("c")
    assembler = TextAssembler(tokenizer(), texts(), stop=("bc",), stop_token_ids=[last])
    found = [assembler.feed(one, TokenLogprobs(-1.0, ())) for one in (first, second, last)]
    assert [assembler.stopped, text_of(found)] == [True, "a"]
    found.append(assembler.finish())
    assert text_of(found) == "ab"
    assert [token.chosen.text for piece in found for token in piece.tokens] == ["a", "b"]


def test_no_stop_string_is_found_in_the_first_tokens() -> None:
    """One that begins in them and ends later is not found either: its beginning is sent."""
    ids = ids_of("a") + ids_of("b") + ids_of("a") + ids_of("b") + ids_of("c")
    for min_tokens, want in enumerate(("", "ab", "ab", "ababc", "ababc", "ababc")):
        assembler = TextAssembler(tokenizer(), texts(), stop=("ab",), min_tokens=min_tokens)
        found = []
        for token_id in ids:
            found.append(assembler.feed(token_id, None))
            if assembler.stopped:
                break
        found.append(assembler.finish())
        assert text_of(found) == want
