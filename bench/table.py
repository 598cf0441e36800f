"""The goals of speed against what was measured: lines of results in, one row a goal out. Pure.

    make bench ARGS=--table      of bench/results/latest.jsonl and peers.jsonl, nothing measured

Where a benchmark has several lines for one goal, the worst of them answers it. A line tells by its
probes whether the machine had other work; where it had, its figure neither meets nor misses.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from probes import MOST_MOVED

Line = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
FILES = ("latest.jsonl", "peers.jsonl")
HEAD = ("goal", "figure", "at least", "aim", "", "bench")


class Verdict(enum.StrEnum):
    """What a row says."""

    AIM = "aim met"
    MET = "met"
    MISSED = "not met"
    BUSY = "not known: the machine was busy"
    ABSENT = "not measured"


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """One line's figure."""

    value: float
    is_known: bool = True


Figure = Callable[[Sequence[Line]], list[Reading]]


def of(bench: str, *path: str, **fields: object) -> Figure:
    """The figure, or all figures, at `path` of each line of a benchmark that has these fields."""

    def read(lines: Sequence[Line]) -> list[Reading]:
        return [
            Reading(value, is_quiet(line))
            for line in lines
            if line["bench"] == bench and all(line.get(k) == v for k, v in fields.items())
            for value in _numbers(line, path)
        ]

    return read


def is_quiet(line: Line) -> bool:
    """Whether its probes, where it has any, found the same machine all the time."""
    probes = line.get("read_gb_per_second")
    moved = max(probes) / min(probes) if isinstance(probes, list) else 1.0
    return max(moved, line.get("probes_moved", 1.0)) <= MOST_MOVED


def ratio(above: Figure, below: Figure) -> Figure:
    """One figure over another."""

    def read(lines: Sequence[Line]) -> list[Reading]:
        pairs = zip(above(lines), below(lines), strict=False)
        return [Reading(a.value / b.value, a.is_known and b.is_known) for a, b in pairs]

    return read


def together(*figures: Figure) -> Figure:
    """All of them."""
    return lambda lines: [reading for figure in figures for reading in figure(lines)]


def ahead_of(engine: str, what: str) -> Figure:
    """Ours over a peer's, of `make bench-peers`."""
    return ratio(of("peers", what, engine="triptych"), of("peers", what, engine=engine))


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


PEERS = "peers"
SHARED = "shared-memory / memcpy"
GOALS = (
    most("mixed trace / `generate()`", "mixed_trace", of("mixed_trace", "ratio"), 0.45),
    most("mixed trace / OpenVINO bf16", PEERS, ahead_of("openvino", "trace_s"), None, 0.95),
    Goal("decode, of the limit, batch 1", "decode", of("decode", "of_limit", batch=1), 0.75, 0.85),
    Goal("decode, of the limit, batch 4", "decode", of("decode", "of_limit", batch=4), 0.60, 0.75),
    Goal(
        "decode, of the limit, batch 16", "decode", of("decode", "of_limit", batch=16), 0.65, 0.75
    ),
    Goal("decode / llama.cpp, batch 1", PEERS, ahead_of("llama.cpp", "decode1_tok_s"), 1.0, 1.15),
    Goal("decode / OpenVINO, batch 4", PEERS, ahead_of("openvino", "decode4_tok_s"), 1.0, 1.15),
    Goal("decode / OpenVINO, batch 16", PEERS, ahead_of("openvino", "decode16_tok_s"), 1.0, 1.15),
    *(
        Goal(
            f"paged attention, of bandwidth, {shape}",
            "paged_attention",
            of("paged_attention", "share", shape=shape),
            least,
            aim,
        )
        for shape, least, aim in (
            ("MHA 32/32", 0.70, 0.85),
            ("GQA-4 8/2", 0.55, 0.70),
            ("GQA-8 64/8", 0.40, 0.50),
        )
    ),
    Goal("prefill of 575 tokens, of peak", "prefill", of("prefill.text", "of_limit"), 0.75, 0.88),
    Goal("vision encode, of peak", "prefill", of("prefill.encode", "of_limit"), 0.80, 0.90),
    Goal(
        "attention of a picture / SDPA",
        "attention",
        of("attention", "against_sdpa", shape="ViT 1024 x 12 x 64"),
        None,
        2.0,
    ),
    most(
        "TTFT, new picture / (operations at peak)",
        "ttft",
        of("ttft", "against_limit", what="new picture"),
        1.25,
        1.15,
    ),
    most(
        "TTFT, picture seen before / text alone",
        "ttft",
        of("ttft", "against_text", what="picture seen before"),
        1.05,
    ),
    most(
        "JPEG 4000x3000 to patches / Pillow",
        "image",
        of("image", "ratio", what="JPEG 4000x3000 to 504x364"),
        0.35,
        0.30,
    ),
    most("its mean difference", "image", of("image", "mean_difference"), 1e-3),
    Goal(
        "hand-over between pods / raw TCP",
        "transfer",
        of("transfer", "stream / tcp", "ratio"),
        0.70,
        0.85,
    ),
    Goal(
        "hand-over inside a pod / memcpy",
        "transfer",
        of("transfer", SHARED, "ratio", what="kv"),
        0.40,
        0.60,
    ),
    most(
        "352 MB of KV, exposed / un-overlapped",
        "handoff",
        of("handoff", "of un-overlapped", what="large"),
        0.25,
        0.10,
    ),
    most(
        "scheduler step, 256 running, us",
        "scheduler",
        together(
            *(of("scheduler", "step_us", state, "256") for state in ("full", "lacking", "stalled"))
        ),
        100.0,
        60.0,
    ),
    most(
        "engine, us per sequence-step",
        "engine_step",
        of("engine_step", "us_per_sequence"),
        2.0,
        1.0,
    ),
    most("start to ready less torch, s", "startup", of("startup", "over_torch"), 3.0, 1.0),
    most(
        "p99 between tokens, split / colocated",
        "interference",
        ratio(
            of("interference", "loaded p99", what="split", same_work=True),
            of("interference", "loaded p99", what="colocated", same_work=True),
        ),
        1.0,
    ),
    most(
        "p99 between tokens, split / p50 at rest",
        "interference",
        of("interference", "loaded p99 / rest p50", what="split", same_work=True),
        None,
        1.5,
    ),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A goal and its answer; `value` is None where nothing was measured."""

    goal: Goal
    value: float | None
    verdict: Verdict


def rows(lines: Sequence[Line], goals: Sequence[Goal] = GOALS) -> list[Row]:
    """One a goal, in their order."""
    return [_row(goal, goal.figure(lines)) for goal in goals]


def _row(goal: Goal, readings: Sequence[Reading]) -> Row:
    if not readings:
        return Row(goal, None, Verdict.ABSENT)
    pick = max if goal.is_most else min
    value = pick(reading.value for reading in readings)
    if not all(reading.is_known for reading in readings):
        return Row(goal, value, Verdict.BUSY)
    if _reaches(goal, value, goal.aim):
        return Row(goal, value, Verdict.AIM)
    return Row(goal, value, Verdict.MET if _reaches(goal, value, goal.least) else Verdict.MISSED)


def _reaches(goal: Goal, value: float, bound: float | None) -> bool:
    if bound is None:
        return False
    return value <= bound if goal.is_most else value >= bound


def _numbers(line: Line, path: Sequence[str]) -> Iterable[float]:
    value: Any = line
    for key in path:
        if key not in value:
            return
        value = value[key]
    yield from map(float, value.values() if isinstance(value, dict) else [value])


def markdown(answers: Sequence[Row]) -> str:
    """The table, in columns of equal width."""
    cells = [HEAD, *(_cells(row) for row in answers)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEAD))]
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
    files = [folder / name for name in FILES]
    return [
        json.loads(line)
        for file in files
        if file.exists()
        for line in file.read_text().splitlines()
    ]
