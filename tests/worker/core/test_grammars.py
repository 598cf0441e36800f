"""A matcher is a function of its grammar and the answer's tokens; its masks say what may follow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLExecutor
from tokenizers import Tokenizer

from vlm_worker.core.grammars import GrammarError, Matcher, Vocabulary, fill_masks

SIZE = 700  # logits behind the tokenizer's last token
MODEL = Path(__file__).parents[3] / "examples" / "shapes" / "model"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
EOS = 2
VOCABULARY = Vocabulary(TOKENIZER, vocab_size=SIZE, eos_token_ids=(EOS, 3))
EXECUTOR = LLExecutor(1)
ANY = json.dumps({"grammars": [{"json_schema": {"type": "object"}}]}).encode()


def allowed(matcher: Matcher, answer: Sequence[int]) -> set[int]:
    words = np.full((1, VOCABULARY.num_words), 7, np.uint32)
    fill_masks([(matcher, np.array(answer, np.int32))], words, EXECUTOR)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    assert TOKENIZER.decode(found) == text
    return found


def test_an_answer_may_end_only_where_the_grammar_accepts_it() -> None:
    matcher = VOCABULARY.compile(b'start: "ab" "c"?')
    answer = ids("ab")
    assert not {EOS, 3} & allowed(matcher, answer[:-1])
    assert {EOS, 3} < allowed(matcher, answer)
    assert allowed(matcher, [*answer, *ids("c")]) == {EOS, 3}


def test_a_matcher_that_follows_step_by_step_is_one_that_is_built_at_once() -> None:
    answer = ids('{"red": [1, "blue"]}')
    stepping = VOCABULARY.compile(ANY)
    for length in range(len(answer) + 1):
        masks = [allowed(one, answer[:length]) for one in (stepping, VOCABULARY.compile(ANY))]
        assert masks[0] == masks[1]
        assert masks[0]
    assert allowed(stepping, answer) == masks[0], "the same tokens twice are consumed once"


def test_a_copy_follows_another_answer() -> None:
    first = VOCABULARY.compile(b"start: /[abc]+/")
    second = first.copy()
    assert allowed(first, ids("a")) == allowed(second, ids("c"))
    assert first.num_consumed == second.num_consumed == 1


def test_tokens_that_the_grammar_refuses_leave_no_token() -> None:
    matcher = VOCABULARY.compile(b'start: "a"')
    assert allowed(matcher, ids("b")) == set()
    assert matcher.error is not None
    assert allowed(matcher, ids("b")) == set()


def test_no_control_token_and_no_id_beyond_the_vocabulary_is_in_an_answer() -> None:
    special = {i for i, token in TOKENIZER.get_added_tokens_decoder().items() if token.special}
    within = allowed(VOCABULARY.compile(b"start: /(.|\\n)*/"), [])
    assert len(within) > 100
    assert within & special <= {EOS, 3}
    assert max(within) < TOKENIZER.get_vocab_size()


def test_a_step_after_a_limit_is_an_error() -> None:
    """Each position of this pattern has states of its own: the lexer soon exceeds its fuel."""
    matcher = VOCABULARY.compile(b"start: /(.*a.{400}b|.*c.{390}d|.*e.{380}f)*/")
    answer = ids("a" * 1200)
    for length in range(0, len(answer), 100):
        if not allowed(matcher, answer[:length]):
            assert "limit" in (matcher.error or "")
            return
    pytest.fail("no limit is reached")


@pytest.mark.parametrize("text", [b"start: foo", b"\xff", b"", b"{}", b" " * (256 * 1024 + 1)])
def test_a_text_that_is_no_grammar_is_an_error(text: bytes) -> None:
    with pytest.raises(GrammarError):
        VOCABULARY.compile(text)


def test_a_model_without_an_end_of_answers_has_no_grammars() -> None:
    with pytest.raises(GrammarError, match="ends an answer"):
        Vocabulary(TOKENIZER, vocab_size=SIZE, eos_token_ids=(SIZE,))
