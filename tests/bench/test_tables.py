"""The document's tables are those of the recorded lines, each in its place."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from table import recorded
from tables import TABLES, filled, said

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"
SPEED = {"engine": "triptych", "trace_s": 8.0, "decode16_tok_s": 500.0}
PEER = {"engine": "other", "trace_s": 16.0, "decode16_tok_s": 250.0}
HIT = {"ratio": 1.0, "floor": 0.25}


def test_the_document_has_a_place_for_each_table() -> None:
    assert sorted(re.findall(r"<!-- table (\w+) -->", DOCUMENT.read_text())) == sorted(TABLES)


def test_filling_touches_nothing_else_and_twice_is_once() -> None:
    text = "before\n<!-- table cache -->\nold\n<!-- end -->\nafter\n"
    lines = [{"bench": "cache", "model": "m", "repeated": HIT, "text again": HIT}]
    lines[0]["picture again"] = HIT
    once = filled(text, lines)
    assert once.startswith("before\n<!-- table cache -->\n\n|")
    assert once.endswith("|\n\n<!-- end -->\nafter\n")
    assert "old" not in once
    assert filled(once, lines) == once
    whole = DOCUMENT.read_text()
    assert filled(filled(whole, []), recorded()) == filled(whole, recorded())


def test_an_unknown_table_is_an_error() -> None:
    with pytest.raises(KeyError, match="guesses"):
        filled("<!-- table guesses -->\n<!-- end -->\n", [])


def test_what_was_not_measured_is_no_table() -> None:
    for name in TABLES.keys() - {"goals"}:
        assert "Not measured" in said(name, [])


def test_a_table_of_a_busy_machine_says_so() -> None:
    lines = [
        {"bench": "batching.chunks", "tokens_of_a_step": 512, "longest_gap_ms": 58.0},
        {"bench": "batching.took", "by_others": 0.05},
    ]
    lines[0]["ttft_of_prompt_ms"] = 218.0
    assert "other work" not in said("chunks", lines)
    lines[1]["by_others"] = 0.5
    assert "other work" in said("chunks", lines)


def test_ahead_of_a_peer_is_above_one_for_times_and_speeds() -> None:
    rest = ("ttft_picture_s", "ttft_text_s", "prefill_s", "decode1_tok_s", "decode4_tok_s")
    same = {"bench": "peers", **dict.fromkeys(rest, 1.0)}
    text = said("peers", [same | SPEED, same | PEER])
    ours, other = (
        [cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines()[2:]
    )
    assert ours == ["triptych", "1", "1", "1", "1", "1", "500", "8"]
    assert other[-3:] == ["1 (1.00)", "250 (2.00)", "16 (2.00)"]
