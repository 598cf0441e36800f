"""Writes plots as SVG: curves (axes from 0, a tick at each point's x), and stacked bars."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 480, 300, 60, 40, 20, 50
COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8a5fbf", "#b8860b", "#5f6b7a", "#c77dba")
BAR_LEFT, BAR_RIGHT, BAR_HEIGHT = 140, 70, 22
LEGEND, MAX_TICKS = 14, 5


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Points (x, y) with increasing x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclasses.dataclass(frozen=True, slots=True)
class Plot:
    """One coordinate system; `title` names y and its unit."""

    title: str
    x_name: str
    lines: Sequence[Line]


@dataclasses.dataclass(frozen=True, slots=True)
class Bars:
    """One horizontal bar per row, stacked from its parts; all rows have the same parts.

    A part without a name is in no legend.
    """

    title: str
    rows: Mapping[str, Mapping[str, float]]


def write_svg(path: Path, plots: Sequence[Plot | Bars]) -> None:
    """Write plots side by side."""
    path.parent.mkdir(exist_ok=True)
    parts = [
        f'<g transform="translate({WIDTH * i},0)">{draw(plot)}</g>' for i, plot in enumerate(plots)
    ]
    size = f'width="{WIDTH * len(plots)}" height="{HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{background}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def draw(plot: Plot | Bars) -> str:
    """The elements of one coordinate system, its corner at 0, 0."""
    return _bars(plot) if isinstance(plot, Bars) else _lines(plot)


def _lines(plot: Plot) -> str:
    """A plot of curves, with the legend above the axes."""
    points = [point for line in plot.lines for point in line.points]
    max_x, ticks_y = max(x for x, _ in points), round_ticks(max(y for _, y in points))
    top, bottom, right = TOP + LEGEND * (len(plot.lines) - 1), HEIGHT - BOTTOM, WIDTH - RIGHT

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            round(LEFT + (right - LEFT) * x / max_x, 1),
            round(bottom - (bottom - top) * y / ticks_y[-1], 1),
        )

    out = [
        _text(WIDTH / 2, 18, plot.title, "middle", ' font-weight="bold"'),
        _text(WIDTH / 2, HEIGHT - 12, plot.x_name, "middle"),
        f'<path d="M{LEFT} {top}V{bottom}H{right}" fill="none" stroke="black"/>',
    ]
    ticks_x = sorted({x for x, _ in points})
    out.extend(_text(at(x, 0)[0], bottom + 16, f"{x:g}", "middle") for x in ticks_x)
    out.extend(_text(LEFT - 6, at(0, y)[1] + 4, f"{y:g}", "end") for y in ticks_y)
    for i, line in enumerate(plot.lines):
        colour = COLOURS[i % len(COLOURS)]
        places = " ".join(f"{x},{y}" for x, y in (at(*point) for point in line.points))
        out.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out.append(_text(LEFT + 10, TOP + LEGEND * i, line.name, "start", f' fill="{colour}"'))
    return "\n".join(out)


def round_ticks(largest: float) -> list[float]:
    """From 0 to at least `largest`, in steps of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(largest / MAX_TICKS))
    step = next(k * power for k in (1, 2, 5, 10) if k * power * MAX_TICKS >= largest)
    return [step * i for i in range(math.ceil(largest / step) + 1)]


def _bars(plot: Bars) -> str:
    scale = (WIDTH - BAR_LEFT - BAR_RIGHT) / max(
        sum(parts.values()) for parts in plot.rows.values()
    )
    colours = dict(zip(next(iter(plot.rows.values())), COLOURS, strict=False))
    out = [_text(WIDTH / 2, 18, plot.title, "middle", ' font-weight="bold"')]
    for number, (name, parts) in enumerate(plot.rows.items()):
        left, top = float(BAR_LEFT), TOP + number * (BAR_HEIGHT + 14)
        middle = top + BAR_HEIGHT / 2 + 4
        out.append(_text(BAR_LEFT - 6, middle, name, "end"))
        for part, value in parts.items():
            place = f'x="{left:.1f}" y="{top}" width="{value * scale:.1f}" height="{BAR_HEIGHT}"'
            out.append(f'<rect {place} fill="{colours[part]}"/>')
            left += value * scale
        out.append(_text(left + 6, middle, f"{sum(parts.values()):.4g}", "start"))
    named = {part: colour for part, colour in colours.items() if part}
    for number, (part, colour) in enumerate(named.items()):
        x, y = BAR_LEFT + 110 * (number % 3), HEIGHT - 44 + 16 * (number // 3)
        out.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        out.append(_text(x + 14, y, part, "start"))
    return "\n".join(out)


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{more}>{html.escape(text)}</text>'
