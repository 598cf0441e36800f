"""The tables of pages of docs are rendered from the recorded lines."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from run import DOCUMENTS
from table import elsewhere, recorded
from tables import TABLES, fill, render

HIT = {"ratio": 1.0, "floor": 0.25}


def peer(engine: str, seconds: float) -> dict[str, object]:
    """An engine that needs `seconds` for everything in one round, and half in the next."""
    names = "ttft_image_s", "ttft_text_s", "prefill_s", "trace_s"
    speeds = {f"decode{batch}_tok_s": 32 / seconds for batch in (1, 4, 16)}
    figures = dict.fromkeys(names, seconds) | speeds
    rounds = {name: [value, value / 2] for name, value in figures.items()}
    return {"bench": "peers", "engine": engine, **figures, "per_round": rounds}


def test_the_documents_have_a_mark_for_each_table() -> None:
    texts = "".join(document.read_text() for document in DOCUMENTS)
    assert sorted(re.findall(r"<!-- table (\w+) -->", texts)) == sorted(TABLES)


def test_filling_changes_only_tables_and_is_idempotent() -> None:
    text = "before\n<!-- table cache -->\nold\n<!-- end -->\nafter\n"
    lines = [{"bench": "cache", "model": "m", "repeated": HIT, "text again": HIT}]
    lines[0]["image again"] = HIT
    once = fill(text, lines)
    assert once.startswith("before\n<!-- table cache -->\n\n|")
    assert once.endswith("|\n\n<!-- end -->\nafter\n")
    assert "old" not in once
    assert fill(once, lines) == once
    others = elsewhere()
    empty: dict[str, list[dict[str, object]]] = {name: [] for name in others}
    for document in DOCUMENTS:
        whole = document.read_text()
        again = fill(fill(whole, [], empty), recorded(), others)
        assert again == fill(whole, recorded(), others)


def test_a_table_of_another_machine_has_its_lines() -> None:
    lines = [{"bench": "cache", "model": "m", "repeated": HIT, "text again": HIT}]
    lines[0]["image again"] = HIT
    text = fill("<!-- table cache at amx -->\n<!-- end -->\n", [], {"amx": lines})
    assert text.startswith("<!-- table cache at amx -->\n\n|")


def test_an_unknown_table_or_machine_is_an_error() -> None:
    with pytest.raises(KeyError, match="guesses"):
        fill("<!-- table guesses -->\n<!-- end -->\n", [])
    with pytest.raises(KeyError, match="atari"):
        fill("<!-- table cache at atari -->\n<!-- end -->\n", [])


def test_a_table_without_lines_says_not_measured() -> None:
    for name in TABLES.keys() - {"goals"}:
        assert "Not measured" in render(name, [])


def test_a_table_of_a_busy_machine_says_so() -> None:
    lines = [
        {"bench": "batching.chunks", "tokens_of_a_step": 512, "longest_gap_ms": 58.0},
        {"bench": "batching.took", "by_others": 0.05},
    ]
    lines[0]["ttft_of_prompt_ms"] = 218.0
    assert "Other processes" not in render("chunks", lines)
    lines[1]["by_others"] = 0.5
    assert "Other processes" in render("chunks", lines)


def test_a_speedup_over_a_peer_is_above_one_for_times_and_speeds() -> None:
    text = render("peers", [peer("triptych", 1.0), peer("other", 2.0)])
    ours, other = (
        [cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines()[2:]
    )
    assert ours == ["triptych", *["1"] * 3, *["32"] * 3, "1"]
    assert other == ["other", *["2 (2.00)"] * 3, *["16 (2.00)"] * 3, "2 (2.00)"]
