"""Compares recorded lines with goals: one row per goal. Pure, except for reading and writing files.

If a benchmark has several lines for one goal, the worst of them counts. If other processes used the
machine, a single figure neither meets nor misses its goal. A comparison of two programs that run in
turn is known if its rounds agree, or if every round is on the same side of the bound.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from probes import MAX_PROBE_RATIO

Line = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
ALONE = ("visual_tokens", "visual_speed", "gateway_speed")
FILES = ("latest.jsonl", "peers.jsonl", *(f"{name}.jsonl" for name in ALONE))
APART = frozenset(ALONE)
"""Benchmarks that record figures themselves, if asked."""
OTHER = "machine-"
MAX_BY_OTHERS = 0.1
"""Share of processor time that other processes may use."""

RELABELLED = {
    "new picture": "new image",
    "picture seen before": "cached image",
    "picture again": "image again",
    "pictures": "images",
    "ttft_picture_s": "ttft_image_s",
    "stream, made when asked": "stream, built on request",
    "shared-memory, made when asked": "shared-memory, built on request",
}
"""Keys and values in lines recorded before they were renamed."""

HEAD = ("figure", "measured", "goal", "aim", "result", "benchmark")


class Verdict(enum.StrEnum):
    """The result of a row."""

    AIM = "aim met"
    MET = "met"
    MISSED = "not met"
    SHOWN = "no goal"
    BUSY = "unknown: machine busy"
    ABSENT = "not measured"


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """The figure of one line.

    Attributes:
        value: the figure.
        is_known: False if other processes used the machine, so that the figure may be wrong.
        rounds: the figure of each round, if two programs ran in turn.
    """

    value: float
    is_known: bool = True
    rounds: tuple[float, ...] = ()


Figure = Callable[[Sequence[Line]], list[Reading]]


def of(bench: str, *path: str | int, **fields: object) -> Figure:
    """The figures at `path` in each line of a benchmark with these fields.

    Each part of `path` is a key of an object or an index of a list.
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
    """Whether no other work disturbed the benchmark.

    Its probes agree, if it has any, and its `took` line reports little processor time of others.
    """
    took = f"{line['bench'].partition('.')[0]}.took"
    by_others = [other.get("by_others", 0.0) for other in lines if other["bench"] == took]
    return (
        line.get("probes_moved", 1.0) <= MAX_PROBE_RATIO
        and max(by_others, default=0.0) <= MAX_BY_OTHERS
    )


def ratio(above: Figure, below: Figure) -> Figure:
    """One figure divided by another."""

    def read(lines: Sequence[Line]) -> list[Reading]:
        pairs = zip(above(lines), below(lines), strict=False)
        return [Reading(a.value / b.value, a.is_known and b.is_known) for a, b in pairs]

    return read


def median_of_rounds(rounds: Figure) -> Figure:
    """The median of rounds in which two programs ran in turn.

    It is known if the rounds agree within `MAX_PROBE_RATIO`: a ratio does not change if both
    programs slow down equally.
    """

    def read(lines: Sequence[Line]) -> list[Reading]:
        values = tuple(reading.value for reading in rounds(lines))
        agree = bool(values) and max(values) <= MAX_PROBE_RATIO * min(values)
        return [Reading(statistics.median(values), agree, values)] if values else []

    return read


def all_of(*figures: Figure) -> Figure:
    """The readings of all figures."""
    return lambda lines: [reading for figure in figures for reading in figure(lines)]


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """A figure with its goal (`least`) and its aim; None means no bound."""

    what: str
    bench: str
    figure: Figure
    least: float | None
    aim: float | None = None
    is_most: bool = False
    """True: the bounds are upper ones."""


def upper_bound(
    what: str, bench: str, figure: Figure, at_most: float | None, aim: float | None = None
) -> Goal:
    """A goal whose figure is better if it is smaller."""
    return Goal(what, bench, figure, at_most, aim, is_most=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A goal and its result; `value` is None if nothing was measured."""

    goal: Goal
    value: float | None
    verdict: Verdict


def rows(lines: Sequence[Line], goals: Sequence[Goal]) -> list[Row]:
    """One row per goal, in order."""
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
    """The header, then the cells of each row."""
    return [HEAD, *(_cells(row) for row in answers)]


def markdown(cells: Sequence[Sequence[str]]) -> str:
    """A table with columns of equal width; the first row is the header."""
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
    """Lines of the latest runs on this machine, peers included."""
    return [line for name in FILES for line in read(folder / name)]


def elsewhere(folder: Path = RESULTS) -> dict[str, list[Line]]:
    """Lines of runs on other machines, by the name of the machine."""
    files = {file.stem.removeprefix(OTHER): file for file in sorted(folder.glob(f"{OTHER}*.jsonl"))}
    return {name: read(file) for name, file in files.items()}


def file_of(machine: str, folder: Path = RESULTS) -> Path:
    """The file with the lines of another machine."""
    return folder / f"{OTHER}{machine}.jsonl"


def replace(file: Path, bench: str, lines: Sequence[Line]) -> None:
    """Replace the lines of this benchmark in a file."""
    write(file, [*without(read(file), {bench}), *lines])


def without(lines: Sequence[Line], benches: Collection[str]) -> list[Line]:
    """The lines of all other benchmarks."""
    return [line for line in lines if line["bench"].partition(".")[0] not in benches]


def read(file: Path) -> list[Line]:
    """All lines, with current labels; empty if there is no file."""
    if not file.exists():
        return []
    text = file.read_text()
    for old, new in RELABELLED.items():
        text = text.replace(f'"{old}"', f'"{new}"')
    return [json.loads(line) for line in text.splitlines()]


def write(file: Path, lines: Sequence[Line]) -> None:
    """Replace the content of a file by these lines."""
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
