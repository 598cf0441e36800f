"""What the comparison of pruned answers counts."""

from __future__ import annotations

import pytest
import visual_pruning
import visual_tokens
from visual_questions import prompts


def test_an_answer_ends_with_its_turn_and_what_follows_counts_apart() -> None:
    end = prompts().end
    off = [(11, end, 5), (12, 13, end), (11, end, 7), (14, 15, 16)]
    given = [(11, end, 6), (12, 13, end), (11, 12, end), (14, 15, 16)]
    counted = {"pruned": 4, "dropped": 300, "hits": 3}
    line = visual_pruning.figures(given, off, [250, 250, 250, 250], counted)
    assert (line["unchanged"], line["tokens_unchanged"]) == (75.0, 50.0)
    assert line["low"] < 75 < line["high"]
    assert (line["history"], line["hit"], line["pruned"]) == (0.7, 75.0, 4)


@pytest.mark.parametrize("flags", [["--lever=zip"], ["--record"]])
def test_pruning_is_measured_alone_and_not_recorded(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        visual_tokens.arguments(["--lever=prune", *flags])
    assert "prune" in capsys.readouterr().err
