"""The table of goals follows from the recorded lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import run
from goals import GOALS
from table import (
    APART,
    FILES,
    RELABELLED,
    Goal,
    Verdict,
    cells,
    elsewhere,
    file_of,
    markdown,
    median_of_rounds,
    of,
    ratio,
    recorded,
    replace,
    rows,
    upper_bound,
)

BENCH = Path(__file__).parents[2] / "bench"
RANK = [Verdict.MISSED, Verdict.MET, Verdict.AIM]
FIGURE = of("speed", "share")
figures = st.floats(0.01, 100)
bounds = st.tuples(figures, figures).map(sorted)


def line(value: float, **fields: object) -> dict[str, object]:
    return {"bench": "speed", "share": value, **fields}


def verdict(goal: Goal, *lines: dict[str, object]) -> Verdict:
    (row,) = rows(lines, [goal])
    return row.verdict


@given(bounds, figures)
def test_a_verdict_compares_the_figure_with_both_bounds(
    low_high: list[float], value: float
) -> None:
    low, high = low_high
    more = verdict(Goal("g", "speed", FIGURE, low, high), line(value))
    assert RANK.index(more) == (value >= low) + (value >= high)
    less = verdict(upper_bound("g", "speed", FIGURE, high, low), line(value))
    assert RANK.index(less) == (value <= high) + (value <= low)


@given(bounds, st.lists(figures, min_size=1, max_size=4))
def test_the_worst_line_counts(low_high: list[float], values: list[float]) -> None:
    goal = Goal("g", "speed", FIGURE, *low_high)
    alone = [RANK.index(verdict(goal, line(value))) for value in values]
    assert RANK.index(verdict(goal, *map(line, values))) == min(alone)


@given(st.floats(1.0, 100), st.floats(1.31, 10))
def test_on_a_busy_machine_the_result_is_unknown(value: float, moved: float) -> None:
    goal = Goal("g", "speed", FIGURE, 1.0)
    busy = line(value, probes_moved=moved)
    assert verdict(goal, busy) is Verdict.BUSY
    assert verdict(goal, line(0.5, probes_moved=moved)) is Verdict.BUSY
    assert verdict(goal, line(value, probes_moved=1.3), busy) is Verdict.BUSY
    took = {"bench": "speed.took", "by_others": moved / 10}
    assert verdict(goal, line(value), took) is Verdict.BUSY
    quiet = line(value, probes_moved=1.3)
    took["by_others"] = 0.1
    assert verdict(goal, quiet, took) is verdict(goal, line(value))


def test_a_known_miss_is_a_miss_even_with_a_disturbed_line() -> None:
    goal = Goal("g", "speed", FIGURE, 1.0)
    assert verdict(goal, line(0.5), line(2.0, probes_moved=2.0)) is Verdict.MISSED


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=6))
def test_a_loss_in_every_round_is_a_loss_even_if_rounds_differ(rounds: list[float]) -> None:
    lines = [{"bench": "speed", "per_round": rounds}]
    higher = Goal("g", "speed", median_of_rounds(of("speed", "per_round")), 1.0)
    assert verdict(higher, *lines) is Verdict.MISSED
    lower = upper_bound("g", "speed", median_of_rounds(of("speed", "per_round")), 0.001)
    assert verdict(lower, *lines) is Verdict.MISSED


@given(st.lists(st.floats(1.0, 100), min_size=1, max_size=6))
def test_a_goal_met_in_every_round_is_met_even_if_rounds_differ(rounds: list[float]) -> None:
    lines = [{"bench": "speed", "per_round": rounds}]
    goal = Goal("g", "speed", median_of_rounds(of("speed", "per_round")), 1.0, 10.0)
    assert verdict(goal, *lines) in (Verdict.MET, Verdict.AIM)


def test_rounds_on_both_sides_of_a_bound_say_nothing() -> None:
    goal = Goal("g", "speed", median_of_rounds(of("speed", "per_round")), 1.0)
    assert verdict(goal, {"bench": "speed", "per_round": [0.5, 2.0]}) is Verdict.BUSY


def test_a_figure_without_bounds_is_shown_and_not_judged() -> None:
    goal = Goal("g", "speed", FIGURE, None)
    (row,) = rows([line(0.5)], [goal])
    assert (row.value, row.verdict) == (0.5, Verdict.SHOWN)


def test_a_path_may_contain_the_index_of_a_list() -> None:
    goal = Goal("g", "speed", of("speed", "tokens", 1), 5.0)
    assert verdict(goal, {"bench": "speed", "tokens": [1, 5]}) is Verdict.MET
    assert verdict(goal, {"bench": "speed", "tokens": [1]}) is Verdict.ABSENT


def test_a_missing_figure_is_neither_met_nor_missed() -> None:
    goal = Goal("g", "speed", FIGURE, 1.0)
    for lines in ([], [{"bench": "speed.other", "share": 2.0}], [{"bench": "speed"}]):
        (row,) = rows(lines, [goal])
        assert (row.value, row.verdict) == (None, Verdict.ABSENT)


def test_a_ratio_uses_two_lines() -> None:
    ours, theirs = (of("speed", "share", engine=name) for name in ("ours", "theirs"))
    both = [line(3.0, engine="ours"), line(2.0, engine="theirs")]
    goal = Goal("g", "speed", ratio(ours, theirs), 1.5)
    assert verdict(goal, *both) is Verdict.MET
    assert verdict(goal, both[0]) is Verdict.ABSENT


@given(st.lists(st.floats(1.0, 1.3), min_size=1, max_size=5), st.floats(1.31, 10))
def test_rounds_that_agree_are_known_even_if_probes_differ(rounds: list[float], far: float) -> None:
    goal = Goal("g", "speed", median_of_rounds(of("speed", "per_round")), 0.5)
    probes = {"probes_moved": 2.0, "bench": "speed"}
    assert verdict(goal, probes | {"per_round": rounds}) is Verdict.MET
    assert verdict(goal, probes | {"per_round": [*rounds, 0.4, far]}) is Verdict.BUSY
    assert verdict(goal, probes | {"per_round": []}) is Verdict.ABSENT


def test_a_figure_by_cases_has_all_cases() -> None:
    goal = upper_bound("g", "speed", of("speed", "us", "256"), 5.0)
    assert verdict(goal, {"bench": "speed", "us": {"256": {"10": 4, "100": 5}}}) is Verdict.MET
    assert verdict(goal, {"bench": "speed", "us": {"256": {"10": 4, "100": 6}}}) is Verdict.MISSED


def test_every_goal_is_measured_by_default_and_every_benchmark_exists() -> None:
    assert {goal.bench for goal in GOALS} == {*run.GOALS, "peers"}
    assert len(set(run.ALL)) == len(run.ALL)
    assert all((BENCH / f"{name}.py").exists() for name in run.ALL)
    assert run.chosen([]) == list(run.GOALS)
    assert run.chosen(["decode", "goals"])[0] == "decode"
    assert set(run.chosen(["all"])) == set(run.ALL)


def test_each_goal_of_a_recorded_benchmark_has_a_figure_on_some_machine() -> None:
    answered: set[str] = set()
    names: set[str] = set()
    for lines in (recorded(), *elsewhere().values()):
        names |= {str(line["bench"]).partition(".")[0] for line in lines}
        answered |= {
            row.goal.what for row in rows(lines, GOALS) if row.verdict is not Verdict.ABSENT
        }
    assert {goal.what for goal in GOALS if goal.bench in names} - answered == set()
    assert names & set(run.GOALS)


@pytest.mark.parametrize(("old", "new"), RELABELLED.items())
def test_lines_recorded_under_old_labels_are_found(tmp_path: Path, old: str, new: str) -> None:
    (tmp_path / FILES[0]).write_text(json.dumps({"bench": "speed", "what": old, old: 2}) + "\n")
    (reading,) = of("speed", new, what=new)(recorded(tmp_path))
    assert reading.value == 2.0


def test_the_table_has_one_row_per_goal(tmp_path: Path) -> None:
    (tmp_path / FILES[0]).write_text(json.dumps(line(0.5)) + "\n")
    goal = Goal("decode, batch 1", "speed", FIGURE, 0.75, 0.85)
    head, rule, row = markdown(cells(rows(recorded(tmp_path), [goal]))).splitlines()
    assert len(head) == len(rule) == len(row)
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        "decode, batch 1",
        "0.5",
        "0.75",
        "0.85",
        "not met",
        "`speed`",
    ]


def test_a_benchmark_without_time_left_keeps_its_earlier_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    latest = tmp_path / "latest.jsonl"
    latest.write_text(json.dumps(line(0.5)) + "\n")
    assert run.measure(["speed"], latest, seconds=0.0) == {}
    assert "speed is skipped" in capsys.readouterr().out
    assert json.loads(latest.read_text())["share"] == 0.5


def test_one_file_never_has_figures_of_two_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = run.Run(0, 1.0, [json.dumps(line(0.5)), json.dumps({"bench": "speed.took"})])
    monkeypatch.setattr(run, "_measure", lambda *_: speed)
    monkeypatch.setattr(run.Run, "is_quiet", True)
    file = tmp_path / "latest.jsonl"
    for cpu, want in (("one", ["others", "speed"]), ("another", ["speed"])):
        machine = {"bench": "machine", "cpu": cpu}
        file.write_text(f"{json.dumps(machine)}\n{json.dumps({'bench': 'others'})}\n")
        monkeypatch.setattr(run, "_machine", lambda: {"bench": "machine", "cpu": "one"})
        run.measure(["speed"], file, seconds=60.0)
        kept = [json.loads(text)["bench"] for text in file.read_text().splitlines()]
        assert [name for name in kept if "." not in name] == ["machine", *want]


@pytest.mark.parametrize("cpu", ["one", "another"])
@pytest.mark.parametrize("name", sorted(APART))
def test_a_benchmark_with_a_record_of_its_own_leaves_the_latest_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu: str, name: str
) -> None:
    few = run.Run(0, 1.0, [json.dumps({"bench": name}), json.dumps({"bench": f"{name}.took"})])
    monkeypatch.setattr(run, "_measure", lambda *_: few)
    monkeypatch.setattr(run, "_machine", lambda: {"bench": "machine", "cpu": "one"})
    file = tmp_path / "latest.jsonl"
    file.write_text(f"{json.dumps({'bench': 'machine', 'cpu': cpu})}\n{json.dumps(line(0.5))}\n")
    before = file.read_text()
    assert run.measure([name], file, seconds=60.0) == {name: few}
    assert file.read_text() == before


@given(st.floats(0, 1), st.floats(0, 1))
def test_of_two_complete_runs_the_less_disturbed_counts(first: float, second: float) -> None:
    figure = json.dumps(line(0.5))
    one, other = (
        run.Run(0, 1.0, [figure, json.dumps({"bench": "speed.took", "by_others": by_others})])
        for by_others in (first, second)
    )
    assert min(one, other, key=run.Run.disturbance) is (one if first <= second else other)
    failed = run.Run(1, 0.1, [json.dumps({"bench": "speed.took", "by_others": 0.0})])
    assert min(failed, one, key=run.Run.disturbance) is one


def test_another_machine_keeps_lines_that_are_not_measured_again(tmp_path: Path) -> None:
    file = file_of("amx", tmp_path)
    replace(file, "peers", [{"bench": "peers", "engine": "old"}])
    with file.open("a") as lines:
        lines.write(json.dumps(line(1.0)) + "\n")
    replace(file, "peers", [{"bench": "peers", "engine": "new"}])
    kept = elsewhere(tmp_path)["amx"]
    assert kept == [line(1.0), {"bench": "peers", "engine": "new"}]
