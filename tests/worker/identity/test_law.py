"""The law itself can fail, and forgives ties alone."""

from __future__ import annotations

import numpy as np
import pytest
from worker.identity.law import Law
from worker.identity.questions import Question
from worker.identity.reference import Answer

QUESTION = Question("color", (), (1, 2, 3), (), ())


def answer(*token_ids: int, gaps: dict[int, float] | None = None) -> Answer:
    """Logits whose best two differ by 1, or by what `gaps` says of a position."""
    logits = np.zeros((len(token_ids), 10), np.float32)
    for position, token in enumerate(token_ids):
        logits[position, token] = (gaps or {}).get(position, 1.0)
    return Answer(token_ids, logits)


def test_equal_answers_hold() -> None:
    law = Law([(QUESTION, answer(4, 5)), (QUESTION, answer(6))])
    law.record([[4, 5], [6]])
    assert not law.pending
    law.check()


@pytest.mark.parametrize("got", [[4, 6, 7], [4, 5], [4, 5, 7, 8], []], ids=str)
def test_another_answer_fails(got: list[int]) -> None:
    law = Law([(QUESTION, answer(4, 5, 7))])
    law.record([got])
    with pytest.raises(AssertionError, match=r"color #0: .*want \[4, 5, 7\]"):
        law.check()


def test_after_a_tie_decoding_goes_on_from_the_reference_token() -> None:
    law = Law([(QUESTION, answer(*[4] * 2000, gaps={3: 5e-5}))])
    law.record([[4, 4, 4, 9, 9]])
    assert law.pending == [(QUESTION, (4, 4, 4, 4))]
    law.record([[4] * 1996])
    law.check()
    assert law.num_ties == 1


def test_many_ties_fail() -> None:
    law = Law([(QUESTION, answer(4, 5, gaps={1: 5e-5}))])
    law.record([[4, 6]])
    assert not law.pending
    with pytest.raises(AssertionError):
        law.check()
