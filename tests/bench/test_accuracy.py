"""The table of accuracy in docs/performance.md: as recorded, and as the model answers here."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import int8_accuracy
from table import recorded
from tables import said

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"
ROW = re.compile(r"^\| ([^|]+?) +\| (\d+) +\| ([\d.]+) \| ([\d.]+) +\|$", re.MULTILINE)
STANDS = DOCUMENT.read_text().split("<!-- table accuracy -->")[1].split("<!-- end -->")[0]
ROWS = {name: (float(right), float(same)) for name, _, right, same in ROW.findall(STANDS)}


def test_the_table_is_of_every_kind_and_as_it_was_recorded() -> None:
    assert list(ROWS) == list(int8_accuracy.KINDS)
    assert STANDS.strip() == said("accuracy", recorded()).strip()


@pytest.mark.parametrize("num_questions", [32, pytest.param(160, marks=pytest.mark.full)])
def test_the_model_answers_as_the_table_says(num_questions: int) -> None:
    """Kinds differ in an answer of 50: as many more may differ here as on another CPU."""
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
