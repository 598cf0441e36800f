"""Goals against what was measured: lines of results in, one row a goal out. Pure.

If a benchmark has several lines for one goal, the worst of them answers it. If the machine had
other work meanwhile, a single figure neither meets nor misses. A comparison of two sides that take
turns is known if its rounds agree, or if every round is on the same side of the bound.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from probes import MOST_MOVED

Line = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
FILES = ("latest.jsonl", "peers.jsonl")
OTHER = "machine-"
MOST_BY_OTHERS = 0.1
"""Of the processors' time."""

HEAD = ("goal", "figure", "at least", "aim", "", "bench")


class Verdict(enum.StrEnum):
    """What a row says."""

    AIM = "aim met"
    MET = "met"
    MISSED = "not met"
    SHOWN = "no goal"
    BUSY = "not known: the machine was busy"
    ABSENT = "not measured"


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """One line's figure.

    Attributes:
        value: the figure.
        is_known: False if the machine had other work and the figure may be off.
        rounds: the same figure by round, if both sides of a comparison took turns.
    """

    value: float
    is_known: bool = True
    rounds: tuple[float, ...] = ()


Figure = Callable[[Sequence[Line]], list[Reading]]


def of(bench: str, *path: str | int, **fields: object) -> Figure:
    """The figure, or all figures, at `path` of each line of a benchmark that has these fields.

    A part of `path` is a key of an object, or the index in a list.
    """

    def read(lines: Sequence[Line]) -> list[Reading]:
        return [
            Reading(value, is_quiet(line, lines))
            for line in lines
            if line["bench"] == bench and all(line.get(k) == v for k, v in fields.items())
            for value in _numbers(line, path)
        ]

    return read


def is_quiet(line: Line, lines: Sequence[Line]) -> bool:
    """Whether the machine was the benchmark's own all the time.

    Its probes, where it has any, found the same machine, and among the lines the one that says how
    long it took says that no other work had much of the processors.
    """
    took = f"{line['bench'].partition('.')[0]}.took"
    by_others = [other.get("by_others", 0.0) for other in lines if other["bench"] == took]
    return (
        line.get("probes_moved", 1.0) <= MOST_MOVED
        and max(by_others, default=0.0) <= MOST_BY_OTHERS
    )


def ratio(above: Figure, below: Figure) -> Figure:
    """One figure over another."""

    def read(lines: Sequence[Line]) -> list[Reading]:
        pairs = zip(above(lines), below(lines), strict=False)
        return [Reading(a.value / b.value, a.is_known and b.is_known) for a, b in pairs]

    return read


def typical(rounds: Figure) -> Figure:
    """The median of rounds in which both sides of a comparison took turns.

    It is known if the rounds agree within `MOST_MOVED`: what slows both sides alike moves no ratio.
    """

    def read(lines: Sequence[Line]) -> list[Reading]:
        values = tuple(reading.value for reading in rounds(lines))
        agree = bool(values) and max(values) <= MOST_MOVED * min(values)
        return [Reading(statistics.median(values), agree, values)] if values else []

    return read


def together(*figures: Figure) -> Figure:
    """All of them."""
    return lambda lines: [reading for figure in figures for reading in figure(lines)]


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """A figure, what it has to reach and what it aims at; None: there is no such bound."""

    what: str
    bench: str
    figure: Figure
    least: float | None
    aim: float | None = None
    is_most: bool = False
    """True: the bounds are upper ones."""


def most(
    what: str, bench: str, figure: Figure, at_most: float | None, aim: float | None = None
) -> Goal:
    """A goal whose figure is better where it is smaller."""
    return Goal(what, bench, figure, at_most, aim, is_most=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A goal and its answer; `value` is None where nothing was measured."""

    goal: Goal
    value: float | None
    verdict: Verdict


def rows(lines: Sequence[Line], goals: Sequence[Goal]) -> list[Row]:
    """One a goal, in their order."""
    return [_row(goal, goal.figure(lines)) for goal in goals]


def _row(goal: Goal, readings: Sequence[Reading]) -> Row:
    if not readings:
        return Row(goal, None, Verdict.ABSENT)
    pick = max if goal.is_most else min
    value = pick(reading.value for reading in readings)
    verdicts = [_verdict(goal, reading) for reading in readings]
    for verdict in (Verdict.MISSED, Verdict.BUSY, Verdict.SHOWN, Verdict.MET):
        if verdict in verdicts:
            return Row(goal, value, verdict)
    return Row(goal, value, Verdict.AIM)


def _verdict(goal: Goal, reading: Reading) -> Verdict:
    if goal.least is None and goal.aim is None:
        return Verdict.SHOWN
    if reading.is_known:
        return _reached(goal, reading.value)
    sides = {_reached(goal, value) for value in reading.rounds}
    if sides == {Verdict.MET, Verdict.AIM}:
        return Verdict.MET
    return sides.pop() if len(sides) == 1 else Verdict.BUSY


def _reached(goal: Goal, value: float) -> Verdict:
    if _reaches(goal, value, goal.aim):
        return Verdict.AIM
    return Verdict.MET if _reaches(goal, value, goal.least) else Verdict.MISSED


def _reaches(goal: Goal, value: float, bound: float | None) -> bool:
    if bound is None:
        return False
    return value <= bound if goal.is_most else value >= bound


def _numbers(line: Line, path: Sequence[str | int]) -> Iterable[float]:
    value: Any = line
    for key in path:
        try:
            value = value[key]
        except LookupError:
            return
    if isinstance(value, dict):
        value = list(value.values())
    yield from map(float, value if isinstance(value, list) else [value])


def cells(answers: Sequence[Row]) -> list[Sequence[str]]:
    """A line a row, below the names of the columns."""
    return [HEAD, *(_cells(row) for row in answers)]


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """A table in columns of equal width; the first line names them."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "| "
        + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        + " |"
        for line in cells
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def _cells(row: Row) -> tuple[str, ...]:
    goal = row.goal
    sign = "≤ " if goal.is_most else ""
    bounds = ("" if bound is None else f"{sign}{bound:g}" for bound in (goal.least, goal.aim))
    value = "" if row.value is None else f"{row.value:.3g}"
    return (goal.what, value, *bounds, str(row.verdict), f"`{goal.bench}`")


def recorded(folder: Path = RESULTS) -> list[Line]:
    """What the latest runs left, of this machine and of peers."""
    return [line for name in FILES for line in read(folder / name)]


def elsewhere(folder: Path = RESULTS) -> dict[str, list[Line]]:
    """What runs on other machines left, by the name that each was given."""
    files = {file.stem.removeprefix(OTHER): file for file in sorted(folder.glob(f"{OTHER}*.jsonl"))}
    return {name: read(file) for name, file in files.items()}


def file_of(machine: str, folder: Path = RESULTS) -> Path:
    """Where the lines of a machine elsewhere are kept."""
    return folder / f"{OTHER}{machine}.jsonl"


def replace(file: Path, bench: str, lines: Sequence[Line]) -> None:
    """Keep these lines in place of what the file has of this benchmark."""
    write(file, [*beside(read(file), {bench}), *lines])


def beside(lines: Sequence[Line], benches: Collection[str]) -> list[Line]:
    """Those of other benchmarks than these."""
    return [line for line in lines if line["bench"].partition(".")[0] not in benches]


def read(file: Path) -> list[Line]:
    """All lines; none where there is no file."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def write(file: Path, lines: Sequence[Line]) -> None:
    """All lines, in place of what the file has."""
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
