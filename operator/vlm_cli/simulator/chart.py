"""Draws the Pareto chart as SVG: tuning points as dots, compared autoscalers with labels."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 640, 420, 60, 40, 110, 50
_COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8a5fbf", "#b8860b", "#444444", "#17becf")
_NUM_TICKS = 5


@dataclasses.dataclass(frozen=True)
class Point:
    """One point of the chart; less is better in both coordinates."""

    x: float
    y: float
    name: str


def draw(
    title: str, *, x_name: str, cloud: Sequence[Point], named: Sequence[Point], highlight: str
) -> str:
    """Return the SVG; points of one name share a colour, and `highlight` is drawn larger."""
    points = [*cloud, *named]
    most_x = 1.08 * max(point.x for point in points)
    most_y = 1.08 * max(1.0, *(point.y for point in points))
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    names = sorted({point.name for point in points})
    colour = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}

    def at(x: float, y: float) -> tuple[float, float]:
        from_left = _LEFT + (right - _LEFT) * x / most_x
        return round(from_left, 1), round(bottom - (bottom - _TOP) * y / most_y, 1)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(_WIDTH / 2, 20, title, "middle", ' font-weight="bold"'),
        _text(_WIDTH / 2, _HEIGHT - 12, x_name, "middle"),
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="black"/>',
    ]
    for index in range(_NUM_TICKS + 1):
        x, y = most_x * index / _NUM_TICKS, most_y * index / _NUM_TICKS
        lines.append(_text(at(x, 0)[0], bottom + 16, f"{x:.3g}", "middle"))
        lines.append(_text(_LEFT - 6, at(0, y)[1] + 4, f"{y:.3g}", "end"))
    for point in cloud:
        x, y = at(point.x, point.y)
        lines.append(
            f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour[point.name]}" opacity="0.4"/>'
        )
    for point in named:
        x, y = at(point.x, point.y)
        radius = 7 if point.name == highlight else 5
        lines.append(f'<circle cx="{x}" cy="{y}" r="{radius}" fill="{colour[point.name]}"/>')
        lines.append(_text(x + 9, y + 4, point.name, "start", f' fill="{colour[point.name]}"'))
    return "\n".join([*lines, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, anchor: str, attributes: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{attributes}>{html.escape(text)}</text>'
