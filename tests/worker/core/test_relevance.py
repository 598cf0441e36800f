"""Relevance and its regions: each cell in one group, and as many groups as counted. Integers."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_worker.core.relevance import (
    ONE,
    allocate,
    balance,
    entropy,
    log2,
    perspectival,
    propositional,
    regions_of,
    relevance_of,
)

sides = st.integers(1, 24)


def drawn(rows: int, columns: int, seed: int) -> np.ndarray:
    """Relevance with ties: a few values, or all of them."""
    rng = np.random.default_rng(seed)
    return rng.integers(1, [2, 9, ONE][seed % 3], (rows, columns)).astype(np.uint16)


@settings(max_examples=300, deadline=None)
@given(sides, sides, st.integers(0, 30), st.data())
def test_each_cell_is_in_one_group_and_groups_are_as_many_as_counted(
    rows: int, columns: int, seed: int, data: st.DataObject
) -> None:
    num_kept = data.draw(st.integers(1, rows * columns))
    relevance = drawn(rows, columns, seed)
    groups = allocate(relevance, num_kept)
    assert len(groups) == num_kept
    assert sorted(cell for group in groups for cell in group) == list(range(rows * columns))
    assert groups == allocate(relevance.copy(), num_kept)


@settings(deadline=None)
@given(sides, sides, st.integers(0, 30), st.integers(1, 100))
def test_the_first_cell_of_a_group_is_nearest_to_its_centre(
    rows: int, columns: int, seed: int, percent: int
) -> None:
    for group in allocate(drawn(rows, columns, seed), max(1, rows * columns * percent // 100)):
        places = np.stack(np.divmod(group, columns), axis=1)
        distances = ((places - places.mean(axis=0)) ** 2).sum(axis=1)
        assert distances[0] <= distances.min() + 1e-9


@pytest.mark.parametrize("cells", [(1, 1), (4, 7), (13, 11)])
def test_all_rows_leave_each_cell_alone(cells: tuple[int, int]) -> None:
    total = cells[0] * cells[1]
    assert sorted(allocate(drawn(*cells, 2), total)) == [[i] for i in range(total)]


def test_the_most_relevant_cells_stay_alone_and_the_rest_of_a_region_is_one_group() -> None:
    relevance = np.full((5, 5), 100, np.uint16)
    relevance[1, 2] = relevance[4, 4] = 9000
    groups = sorted(allocate(relevance, 3), key=len)
    assert sorted(groups[:2]) == [[7], [24]]
    assert groups[2][0] == 12


def test_more_tokens_divide_groups_and_join_none() -> None:
    """Regions stay the same from 12 tokens on: there are 12 of them."""
    relevance = drawn(12, 17, 2)
    for num_kept in range(12, 12 * 17):
        less, more = allocate(relevance, num_kept), allocate(relevance, num_kept + 1)
        group_of = {cell: number for number, group in enumerate(less) for cell in group}
        assert all(len({group_of[cell] for cell in group}) == 1 for group in more)


def test_an_even_region_becomes_one_token_and_a_relevant_one_keeps_its_cells() -> None:
    relevance = np.full((10, 10), 100, np.uint16)
    relevance[:5, :5] = 30_000
    groups = allocate(relevance, 28)
    assert sorted(map(len, groups)) == [1] * 25 + [25] * 3
    relevance[9, 9] = 40_000
    assert [99] in allocate(relevance, 5)


@given(sides, sides, st.integers(1, 600))
def test_regions_cover_the_image_and_are_no_more_than_its_tokens(
    rows: int, columns: int, most: int
) -> None:
    regions = regions_of((rows, columns), most)
    assert 1 <= len(regions) <= most
    assert sorted(cell for region in regions for cell in region) == list(range(rows * columns))


@given(st.integers(1, 1 << 62))
def test_logarithms_are_rounded_down_to_16_bits(n: int) -> None:
    assert math.log2(n) - 2 / 65536 < log2(n) / 65536 <= math.log2(n) + 1e-12


def test_logarithms_of_powers_are_exact() -> None:
    assert [log2(1 << bits) for bits in range(63)] == [bits << 16 for bits in range(63)]
    assert log2(0) == 0


@given(st.lists(st.integers(0, 300), min_size=1, max_size=64))
def test_entropy_is_that_of_the_shares(counts: list[int]) -> None:
    shares = np.array([n for n in counts if n]) / max(1, sum(counts))
    wanted = float(-(shares * np.log2(shares)).sum()) if len(shares) else 0.0
    assert abs(int(entropy(np.array(counts))) / 65536 - wanted) < 1e-3


@given(sides, sides, st.integers(0, 30))
def test_streams_and_their_balance_are_shares(rows: int, columns: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    histogram = rng.multinomial(196, np.full(8, 1 / 8), (rows, columns))
    for stream in (propositional(histogram), perspectival(*rng.integers(0, 9, (2, rows, columns)))):
        assert stream.min() >= 0
        assert stream.max() <= ONE
        relevance = balance(stream)
        assert relevance.dtype == np.uint16


def test_an_even_image_has_even_relevance() -> None:
    histogram = np.zeros((4, 6, 8), np.int64)
    histogram[..., 3] = 196
    nothing = np.zeros((4, 6), np.int64)
    assert len(np.unique(relevance_of(histogram, nothing, nothing))) == 1


def test_spread_relevance_is_compared_to_its_neighbours_and_a_single_peak_is_not() -> None:
    spread = np.full((9, 9), 20_000)
    spread[4, 4] = 40_000
    assert balance(spread)[4, 4] > 4 * balance(spread)[0, 0]
    peak = np.zeros((9, 9), np.int64)
    peak[4, 4] = ONE
    assert balance(peak)[4, 4] == ONE


def test_the_choice_is_the_same_on_every_machine() -> None:
    """A change of this digest is another selection: raise `reduction.VERSION` with it."""
    numbers = np.arange(13 * 17 * 10).reshape(13, 17, 10) ** 2 * 31
    edge, contrast = numbers[..., 8] % 4001, numbers[..., 9] % 5003
    relevance = relevance_of(numbers[..., :8] % 97, edge, contrast)
    groups = allocate(relevance, 55)
    digest = hashlib.sha256(relevance.astype("<u2").tobytes() + str(groups).encode()).hexdigest()
    assert digest[:16] == "b451d4de312dee1b"
