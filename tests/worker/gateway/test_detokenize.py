"""Text leaves in whole characters, and never past a stop string, however tokens cut it."""

from __future__ import annotations

import functools

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from worker.gateway.stack import MODEL

from vlm_worker.gateway.detokenize import Detokenizer, StopScanner


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def pieces(token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer())
    return [*(detokenizer.feed(token_id) for token_id in token_ids), detokenizer.flush()]


@given(st.lists(st.integers(0, 996), max_size=60))
def test_the_pieces_of_any_tokens_join_to_the_whole(token_ids: list[int]) -> None:
    assert "".join(pieces(token_ids)) == tokenizer().decode(token_ids, skip_special_tokens=True)


@given(st.text(max_size=40))
def test_no_piece_of_a_text_holds_half_a_character(text: str) -> None:
    found = pieces(tokenizer().encode(text, add_special_tokens=False).ids)
    assert "".join(found) == text
    assert not any("�" in piece for piece in found) or "�" in text


def test_an_answer_cut_inside_a_character_ends_with_the_replacement() -> None:
    token_ids = tokenizer().encode("ok 😀", add_special_tokens=False).ids
    found = pieces(token_ids[:-1])
    assert "".join(found[:-1]) == "ok "
    assert found[-1] == "�"


def cut(text: str, stops: list[str]) -> str:
    """The definition: read character by character, stop at the first stop string complete."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)]
    return text


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_an_answer_is_cut_where_the_definition_cuts_it(stops: list[str], texts: list[str]) -> None:
    scanner = StopScanner(stops)
    sent = "".join(scanner.feed(text) for text in texts) + scanner.flush()
    whole = "".join(texts)
    assert sent == cut(whole, stops)
    assert scanner.stopped == any(stop in whole for stop in stops)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    scanner = StopScanner(["END"])
    assert [scanner.feed(text) for text in ("a E", "N", "x", "EN")] == ["a ", "", "ENx", ""]
    assert scanner.flush() == "EN"
