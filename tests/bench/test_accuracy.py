"""The table of accuracy in docs/performance.md equals the records, and the model reproduces it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import int8_accuracy
from table import recorded
from tables import render

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"
ROW = re.compile(r"^\| ([^|]+?) +\| (\d+) +\| ([\d.]+) \| ([\d.]+) +\|$", re.MULTILINE)
STANDS = DOCUMENT.read_text().split("<!-- table accuracy -->")[1].split("<!-- end -->")[0]
ROWS = {name: (float(right), float(same)) for name, _, right, same in ROW.findall(STANDS)}


def test_the_table_has_every_kind_and_the_recorded_figures() -> None:
    assert list(ROWS) == list(int8_accuracy.KINDS)
    assert STANDS.strip() == render("accuracy", recorded()).strip()


@pytest.mark.timeout(600)  # a CPU that does not multiply bfloat16 takes minutes
@pytest.mark.parametrize("num_questions", [32, pytest.param(160, marks=pytest.mark.full)])
def test_the_model_reproduces_the_table(num_questions: int) -> None:
    """Another CPU may change as many answers as another kind of weights does: one of 50."""
    from worker.identity.questions import questions

    asked = [question for question in questions() if question.prepared_images][:num_questions]
    tokens = {
        name: int8_accuracy.answers_of(int8_accuracy.runner_of(options), asked)
        for name, options in int8_accuracy.KINDS.items()
    }
    exact = tokens["float32"]
    right = {name: int8_accuracy.share_right(asked, found) for name, found in tokens.items()}
    more = 2 / num_questions
    for name, (_, same) in ROWS.items():
        found = int8_accuracy.share(tokens[name], exact)
        assert found >= same - more - 0.02, f"{name}: {found} of the answers have float32's tokens"
        assert abs(right[name] - right["float32"]) <= 1 - found
    assert num_questions < 160 or abs(right["float32"] - ROWS["float32"][0]) <= 0.0125
