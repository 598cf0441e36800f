"""Text leaves in whole characters, and never past a stop string, however tokens cut it."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from worker import tokenizers_by_code as by_code
from worker.gateway.stack import MODEL

from vlm_worker.gateway.detokenization import Detokenizer, StopScanner


@functools.cache
def tokenizer(name: str = "shapes") -> Tokenizer:
    if name == "shapes":
        return Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    made = {"llama": by_code.llama, "late llama": by_code.llama_of_late, "gemma": by_code.gemma}
    return made[name]().backend_tokenizer


names = pytest.mark.parametrize("name", ["shapes", "llama", "late llama", "gemma"])


def pieces(token_ids: list[int], name: str = "shapes") -> list[str]:
    detokenizer = Detokenizer(tokenizer(name))
    return [*(detokenizer.feed(token_id) for token_id in token_ids), detokenizer.flush()]


@names
@given(token_ids=st.lists(st.integers(0, 996), max_size=60))
def test_the_pieces_of_any_tokens_join_to_the_whole(name: str, token_ids: list[int]) -> None:
    whole = tokenizer(name).decode(token_ids, skip_special_tokens=True)
    assert "".join(pieces(token_ids, name)) == whole


@names
@given(text=st.text(max_size=40))
def test_no_piece_of_a_text_holds_half_a_character(name: str, text: str) -> None:
    token_ids = tokenizer(name).encode(text, add_special_tokens=False).ids
    found = pieces(token_ids, name)
    assert "".join(found) == tokenizer(name).decode(token_ids)
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
