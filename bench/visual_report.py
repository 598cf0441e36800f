"""Tables and goals of `visual_tokens` and `visual_speed`, from their lines. Pure.

`points` are percentage points of accuracy against `off` on the same questions, with their 95 %
interval in brackets; "lost / won" are the answers that only `off`, or only the setting, has right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from table import Figure, Line, Reading, cells, of, ratio, rows, upper_bound

BENCH: Final = "visual_tokens"
SPEED: Final = "visual_speed"
SUMMARY: Final = ("objects", "read", "count", "chart", "cell", "all")
"""The groups that the summary shows."""
CASES: Final = ("new", "seen", "trace", "seen_trace")
"""What `visual_speed` times."""
SHOWN: Final = (
    ("off", ""),
    ("pixels", "1/4"),
    ("pool", "1/4"),
    ("merge", "1/4"),
    ("diverse", "1/4"),
    ("zip", "1/4"),
)
"""The settings that the table of kinds shows: those of a quarter of the pixels or tokens."""

Cells = list[Sequence[str]]


def of_lever(lines: Sequence[Line], lever: str) -> Cells:
    """Every figure of a lever: groups, then kinds, of each of its settings."""
    head = "", "of", "questions", "tokens", "right, %", "lost / won", "points", "changed, %"
    return [
        head,
        *(
            (_name(line), kind, *_all_figures(one))
            for line in _lines(lines)
            if line["lever"] == lever
            for part in ("groups", "kinds")
            for kind, one in line[part].items()
        ),
    ]


def summary(lines: Sequence[Line]) -> Cells:
    """One row per setting, one column per group."""

    def row(line: Line) -> Sequence[str]:
        groups = line["groups"]
        shown = [_difference(groups[name]) for name in SUMMARY]
        if line["lever"] == "off":
            shown = [f"{groups[name]['right']:.1f} %" for name in SUMMARY]
        return _name(line), str(line["per_group"]), f"{groups['all']['tokens']:.0f}", *shown

    return [("", "questions", "tokens", *SUMMARY), *map(row, _lines(lines))]


def kinds(lines: Sequence[Line]) -> Cells:
    """One row per kind of question: accuracy of `off`, and the points of the settings `SHOWN`."""
    found = {(line["lever"], line["value"]): line for line in _lines(lines)}
    shown = [found[setting] for setting in SHOWN if setting in found]
    if not shown:
        return []
    off, *others = shown
    return [
        ("", "questions", *map(_name, shown)),
        *(
            (
                kind,
                str(one["questions"]),
                f"{one['right']:.1f} % {_interval(one, 'right', sign='')}",
                *(_difference(other["kinds"][kind]) for other in others),
            )
            for kind, one in off["kinds"].items()
        ),
    ]


def goals(lines: Sequence[Line]) -> Cells:
    """One row per goal, with its verdict."""
    return cells(rows(lines, GOALS)) if _lines(lines) else []


def speed(lines: Sequence[Line]) -> Cells:
    """One row per lever: times, and their ratios to `off`."""

    def row(line: Line) -> Sequence[str]:
        cases = [(line["ms"].get(case), line["ratio"].get(case)) for case in CASES]
        shown = ["" if ms is None else f"{ms:.0f} ms ({part:.2f})" for ms, part in cases]
        kv = f"{line['kv_bytes'] / 1e6:.1f} MB"
        return line["lever"], str(line["prompt_tokens"]), kv, *shown

    times = "TTFT, new image", "TTFT, cached image", "trace, new images", "trace, cached images"
    return [
        ("", "prompt tokens", "KV", *times),
        *(row(line) for line in lines if line["bench"] == SPEED),
    ]


def speed_goals(lines: Sequence[Line]) -> Cells:
    """One row per goal of `visual_speed`, with its verdict."""
    return cells(rows(lines, SPEED_GOALS)) if speed(lines)[1:] else []


def resolutions(lines: Sequence[Line]) -> Cells:
    """One row per resolution of an image that keeps all its tokens."""
    return [
        ("side", "visual tokens", "embeddings, MB", "KV, MB", "images/s", "hit rate"),
        *(
            (
                str(line["side"]),
                str(line["visual_tokens"]),
                str(line["embedding_mb_per_1000"]),
                str(line["kv_mb_per_1000"]),
                f"{line['images_per_second']:.2g}",
                f"{line['hit_rate']:.2f}",
            )
            for line in lines
            if line["bench"] == f"{SPEED}.pyramid"
        ),
    ]


def _lost(lever: str, value: str, group: str, *, bound: bool = False) -> Figure:
    """The points that a setting loses, or the upper bound of them."""
    read = of(BENCH, "groups", group, "points_low" if bound else "points", lever=lever, value=value)
    return lambda lines: [Reading(0.0 - reading.value) for reading in read(lines)]


def _tokens(lever: str, value: str) -> Figure:
    return of(BENCH, "groups", "all", "tokens", lever=lever, value=value)


GOALS: Final = (
    *(
        upper_bound(
            f"{lever} {value}, {group}: {'bound of ' * bound}points lost",
            BENCH,
            _lost(lever, value, group, bound=bound),
            at_most,
        )
        for lever, value, group, bound, at_most in (
            ("zip", "1/4", "objects", False, 1.0),
            ("zip", "1/4", "objects", True, 2.5),
            ("zip", "1/8", "objects", False, 4.0),
            ("diverse", "1/2", "read", False, 2.0),
            ("diverse", "1/2", "read", True, 3.5),
            ("diverse", "1/4", "read", False, 3.0),
            ("diverse", "1/4", "read", True, 4.5),
            ("arrcoc", "1/4", "objects", False, 2.0),
            ("auto", "Learned", "all", False, 1.5),
            ("auto", "Learned", "read", False, 3.0),
            ("kv", "int8", "all", False, 0.3),
            ("weights", "int8 encoder", "all", False, 0.5),
        )
    ),
    *(
        upper_bound(
            f"{lever} {value}, all: answers changed, %",
            BENCH,
            of(BENCH, "groups", "all", "changed", lever=lever, value=value),
            at_most,
        )
        for lever, value, at_most in (("kv", "int8", 0.5), ("weights", "int8 encoder", 1.0))
    ),
    upper_bound(
        "auto Learned, all: tokens / off's",
        BENCH,
        ratio(_tokens("auto", "Learned"), _tokens("off", "")),
        0.5,
    ),
)


SPEED_GOALS: Final = (
    *(
        upper_bound(
            f"zip 1/4 / off: {what}", SPEED, of(SPEED, "ratio", case, lever="zip 1/4"), at_most
        )
        for what, case, at_most in (
            ("TTFT, new image", "new", 0.85),
            ("TTFT, cached image", "seen", 0.55),
            ("trace, new images", "trace", round(1 / 1.2, 3)),
            ("trace, cached images", "seen_trace", round(1 / 1.2, 3)),
        )
    ),
    upper_bound(
        "zip 1/4 / off: KV bytes of a prompt",
        SPEED,
        ratio(of(SPEED, "kv_bytes", lever="zip 1/4"), of(SPEED, "kv_bytes", lever="off")),
        0.42,
    ),
)


def _lines(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["bench"] == BENCH]


def _name(line: Line) -> str:
    return f"{line['lever']} {line['value']}".strip()


def _all_figures(one: dict[str, Any]) -> Sequence[str]:
    right = f"{one['right']:.1f} {_interval(one, 'right', sign='')}"
    counts = str(one["questions"]), f"{one['tokens']:.1f}"
    return *counts, right, f"{one['lost']} / {one['won']}", _points(one), f"{one['changed']:.1f}"


def _difference(one: dict[str, Any]) -> str:
    return f"{_points(one)}, {one['lost']} / {one['won']}"


def _points(one: dict[str, Any]) -> str:
    return f"{one['points']:+.1f} {_interval(one, 'points', sign='+')}"


def _interval(one: dict[str, Any], name: str, *, sign: str) -> str:
    return f"[{one[f'{name}_low']:{sign}.1f}, {one[f'{name}_high']:{sign}.1f}]"
