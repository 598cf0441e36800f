"""Nothing that was counted is lost, whichever edges it is counted by."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.measurements import Histogram

SIZES = st.lists(st.floats(0, 100), max_size=40)
EDGES = st.lists(st.floats(0.001, 90), min_size=1, max_size=12)


@given(SIZES, EDGES)
def test_each_size_counts_at_every_edge_at_or_above_it(
    sizes: list[float], edges: list[float]
) -> None:
    histogram = Histogram(edges)
    for size in sizes:
        histogram.add(size)
    for name, count in histogram.buckets.cumulative:
        edge = math.inf if name == "+Inf" else float(name)
        assert count == sum(size <= edge for size in sizes)
    assert histogram.buckets.total == sum(sizes)


@given(SIZES, EDGES, EDGES)
def test_other_edges_lose_nothing_and_never_move_a_size_down(
    sizes: list[float], first: list[float], second: list[float]
) -> None:
    histogram = Histogram(first)
    for size in sizes:
        histogram.add(size)
    histogram.regroup(second)
    found = dict(histogram.buckets.cumulative)
    assert found["+Inf"] == len(sizes)
    for edge in histogram.buckets.edges:
        assert found[f"{edge:g}"] <= sum(size <= edge for size in sizes)


def test_edges_that_read_alike_are_one() -> None:
    assert list(Histogram([0.3, 0.1 + 0.2]).buckets.edges) == [0.3]
