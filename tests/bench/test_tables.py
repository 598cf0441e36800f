"""The document's tables are those of the recorded lines, each in its place."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from table import elsewhere, recorded
from tables import TABLES, filled, said

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"
HIT = {"ratio": 1.0, "floor": 0.25}


def peer(engine: str, seconds: float) -> dict[str, object]:
    """An engine that takes so long for everything in one round, and half as long in the next."""
    names = "ttft_picture_s", "ttft_text_s", "prefill_s", "trace_s"
    speeds = {f"decode{batch}_tok_s": 32 / seconds for batch in (1, 4, 16)}
    figures = dict.fromkeys(names, seconds) | speeds
    rounds = {name: [value, value / 2] for name, value in figures.items()}
    return {"bench": "peers", "engine": engine, **figures, "per_round": rounds}


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
    whole, others = DOCUMENT.read_text(), elsewhere()
    empty: dict[str, list[dict[str, object]]] = {name: [] for name in others}
    again = filled(filled(whole, [], empty), recorded(), others)
    assert again == filled(whole, recorded(), others)


def test_a_table_of_another_machine_is_of_its_own_lines() -> None:
    lines = [{"bench": "cache", "model": "m", "repeated": HIT, "text again": HIT}]
    lines[0]["picture again"] = HIT
    text = filled("<!-- table cache at amx -->\n<!-- end -->\n", [], {"amx": lines})
    assert text.startswith("<!-- table cache at amx -->\n\n|")


def test_an_unknown_table_or_machine_is_an_error() -> None:
    with pytest.raises(KeyError, match="guesses"):
        filled("<!-- table guesses -->\n<!-- end -->\n", [])
    with pytest.raises(KeyError, match="atari"):
        filled("<!-- table cache at atari -->\n<!-- end -->\n", [])


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
    text = said("peers", [peer("triptych", 1.0), peer("other", 2.0)])
    ours, other = (
        [cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines()[2:]
    )
    assert ours == ["triptych", *["1"] * 3, *["32"] * 3, "1"]
    assert other == ["other", *["2 (2.00)"] * 3, *["16 (2.00)"] * 3, "2 (2.00)"]
