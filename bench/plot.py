"""Line plots as SVG, drawn by hand: axes from 0, a tick at each point's x, a legend."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 480, 300, 60, 40, 20, 50
COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8a5fbf", "#b8860b")
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


def write_svg(path: Path, plots: Sequence[Plot]) -> None:
    """Write plots side by side."""
    path.parent.mkdir(exist_ok=True)
    parts = [
        f'<g transform="translate({WIDTH * i},0)">{_draw(plot)}</g>' for i, plot in enumerate(plots)
    ]
    size = f'width="{WIDTH * len(plots)}" height="{HEIGHT}"'
    style = 'font-family="sans-serif" font-size="11"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{background}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _draw(plot: Plot) -> str:
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


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{more}>{html.escape(text)}</text>'
