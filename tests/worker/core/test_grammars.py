"""A matcher is a function of its grammar and the answer's tokens; its masks say what may follow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLExecutor, LLParserLimits
from tokenizers import Tokenizer

from vlm_worker.core import grammars
from vlm_worker.core.grammars import GrammarError, Matcher, Vocabulary, fill_masks

SIZE = 700  # logits behind the tokenizer's last token
MODEL = Path(__file__).parents[3] / "examples" / "shapes" / "model"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
EOS = 2
VOCABULARY = Vocabulary(TOKENIZER, vocab_size=SIZE, eos_token_ids=(EOS, 3))
EXECUTOR = LLExecutor(1)


def of_schema(schema: Any) -> bytes:
    return json.dumps({"grammars": [{"json_schema": schema}]}).encode()


ANY = of_schema({"type": "object"})


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


def test_an_answer_leaves_the_limits_of_another_one_alone() -> None:
    """A string of 4,000 characters has more lexer states than one matcher may have."""
    grammar = of_schema({"type": "string", "maxLength": 4000})
    answer = ids('"' + "Some text with spaces, ünïcode and numbers 123." * 80)
    before = VOCABULARY.compile(grammar)
    long = VOCABULARY.compile(grammar)
    for length in range(len(answer) + 1):
        assert allowed(long, answer[:length]), (length, long.error)
    assert allowed(before, answer[:1]) == allowed(VOCABULARY.compile(grammar), answer[:1])
    assert before.error is None


LONG = of_schema({"type": "string", "maxLength": 4000})
PHRASE = "red circle blue, "
HOSTILE = b"start: /(.*a.{400}b|.*c.{390}d|.*e.{380}f)*/"
LIST = {"type": "array", "items": {"type": "string", "maxLength": 40}}


def narrow(**changes: Any) -> Vocabulary:
    """A vocabulary whose matchers soon reach a limit."""
    limits = {"initial_lexer_fuel": 1_000_000, "step_max_items": 20_000, **changes}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammars, "parser_limits", lambda: LLParserLimits(**limits))
        return Vocabulary(TOKENIZER, vocab_size=SIZE, eos_token_ids=(EOS, 3))


def outcomes(matcher: Matcher, answer: Sequence[int], start: int, end: int) -> dict[int, Any]:
    """The allowed tokens and the error after each length, until the answer cannot go on."""
    found: dict[int, Any] = {}
    for length in range(start, end):
        found[length] = allowed(matcher, answer[:length]), matcher.error
        if matcher.error is not None:
            break
    return found


@pytest.mark.parametrize("window", [20, 50, 10_000])
@pytest.mark.parametrize(
    ("grammar", "answer", "limits", "last"),
    [
        (LONG, ids('"' + PHRASE * 20), {}, None),
        (LONG, ids('"' + PHRASE * 100), {"max_lexer_states": 1200}, range(250, 280)),
        (of_schema(LIST), ids("[" + '"red circle", ' * 20), {"max_lexer_states": 400}, None),
        (HOSTILE, ids("a" * 90), {"max_lexer_states": 9_000}, None),
        (HOSTILE, ids("acef" * 40), {"step_lexer_fuel": 20_000}, range(40, 60)),
    ],
)
def test_masks_and_errors_are_those_of_an_answer_that_nobody_interrupts(
    grammar: bytes, answer: list[int], limits: Any, last: range | None, window: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(grammars, "WINDOW", window)
    words, count = narrow(**limits), len(answer) + 1
    want = outcomes(words.compile(grammar), answer, 0, count)
    assert len(want) == count if last is None else len(want) - 1 in last, "where the limit is"
    for cut in range(0, len(want), 7):
        again = outcomes(words.compile(grammar), answer, cut, min(cut + 20, count))
        assert again == {length: want[length] for length in again}
    half = len(want) // 2
    rest = outcomes(words.compile(grammar), answer, half, count)
    assert rest == {length: want[length] for length in range(half, len(want))}


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
