"""Plots show the recorded numbers."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from charts import first_token, write_all
from plot import HEIGHT, MAX_TICKS, WIDTH, Bars, Line, Plot, draw, round_ticks

SVG = "{http://www.w3.org/2000/svg}"
sizes = st.floats(0.1, 1e4)


def elements(plot: Plot | Bars, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(f"<g>{draw(plot)}</g>").iter(tag))


@given(st.lists(st.tuples(sizes, sizes), min_size=1, max_size=4))
def test_the_length_of_a_bar_is_its_sum(rows: list[tuple[float, float]]) -> None:
    plot = Bars("ms", {f"row {i}": {"a & b": a, "c": c} for i, (a, c) in enumerate(rows)})
    drawn = [float(rect.attrib["width"]) for rect in elements(plot, "rect")][: 2 * len(rows)]
    lengths = [a + c for a, c in zip(drawn[::2], drawn[1::2], strict=True)]
    longest = max(map(sum, rows))
    assert lengths == pytest.approx([max(lengths) * sum(row) / longest for row in rows], abs=0.2)


@given(st.lists(sizes, min_size=2, max_size=6))
def test_curves_rise_with_their_values_and_stay_inside_the_plot(values: list[float]) -> None:
    plot = Plot("ms", "requests", [Line("ours", list(enumerate(values, start=1)))])
    (drawn,) = elements(plot, "polyline")
    points = [tuple(map(float, pair.split(","))) for pair in drawn.attrib["points"].split()]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in points)
    order = sorted(range(len(values)), key=lambda i: values[i])
    heights = [points[i][1] for i in order]
    assert heights == sorted(heights, reverse=True)


@given(sizes)
def test_ticks_are_few_and_end_just_above_the_largest_value(largest: float) -> None:
    ticks = round_ticks(largest)
    assert len(ticks) <= MAX_TICKS + 1
    assert ticks[-2] < largest <= ticks[-1] * (1 + 1e-9)


def test_small_stages_are_drawn_as_one() -> None:
    stages = {"gateway": 1.0, "media": 2.0, "encode": 500.0, "prefill": 300.0}
    bars = first_token([{"bench": "ttft", "what": "new image", "stages": stages}])
    assert bars is not None
    assert bars.rows == {"new image": {"encode": 500.0, "prefill": 300.0, "other stages": 3.0}}


def test_a_part_without_a_name_is_not_in_the_legend() -> None:
    rows = {"text": {"": 2.0}, "image": {"": 3.0}}
    assert len(elements(Bars("ms", rows), "rect")) == len(rows)


def test_only_recorded_plots_are_drawn(tmp_path: Path) -> None:
    write_all([], tmp_path)
    assert not list(tmp_path.iterdir())
    write_all([{"bench": "curves.kv", "side_pixels": 448, "kv_bytes": 1 << 20}], tmp_path)
    (written,) = tmp_path.iterdir()
    assert len(list(ElementTree.parse(written).getroot().iter(f"{SVG}polyline"))) == 1
