"""Plots as SVG, drawn by hand: lines (axes from 0, a tick at each point's x), and stacked bars."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 480, 300, 60, 40, 20, 50
COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8a5fbf", "#b8860b", "#5f6b7a", "#c77dba")
BAR_LEFT, BAR_RIGHT, BAR_HEIGHT = 140, 70, 22
NUM_TICKS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Points (x, y), x rising."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclasses.dataclass(frozen=True, slots=True)
class Plot:
    """One coordinate system; `title` names what y is, with its unit."""

    title: str
    x_name: str
    lines: Sequence[Line]


@dataclasses.dataclass(frozen=True, slots=True)
class Bars:
    """One horizontal bar a row, made of its parts in order; all rows have the same parts."""

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
    points = [point for line in plot.lines for point in line.points]
    max_x, max_y = max(x for x, _ in points), 1.05 * max(y for _, y in points)
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            round(LEFT + (right - LEFT) * x / max_x, 1),
            round(bottom - (bottom - TOP) * y / max_y, 1),
        )

    out = [
        _text(WIDTH / 2, 18, plot.title, "middle", ' font-weight="bold"'),
        _text(WIDTH / 2, HEIGHT - 12, plot.x_name, "middle"),
        f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="black"/>',
    ]
    ticks = sorted({x for x, _ in points})
    out.extend(_text(at(x, 0)[0], bottom + 16, f"{x:g}", "middle") for x in ticks)
    for i in range(NUM_TICKS + 1):
        y = max_y * i / NUM_TICKS
        out.append(_text(LEFT - 6, at(0, y)[1] + 4, f"{y:.3g}", "end"))
    for i, line in enumerate(plot.lines):
        colour = COLOURS[i % len(COLOURS)]
        places = " ".join(f"{x},{y}" for x, y in (at(*point) for point in line.points))
        out.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out.append(_text(LEFT + 10, TOP + 14 * i, line.name, "start", f' fill="{colour}"'))
    return "\n".join(out)


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
    for number, (part, colour) in enumerate(colours.items()):
        x, y = BAR_LEFT + 110 * (number % 3), HEIGHT - 44 + 16 * (number // 3)
        out.append(f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        out.append(_text(x + 14, y, part, "start"))
    return "\n".join(out)


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{more}>{html.escape(text)}</text>'
