"""Levels of windows: as many tokens as counted, each place once, and scale where it is relevant."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_worker.core.pyramid import Pyramid, Window, places_of, plan
from vlm_worker.core.relevance import ONE
from vlm_worker.reduction import Method, Reduction, num_windows

sides = st.integers(1, 15)


def drawn(rows: int, columns: int, seed: int) -> np.ndarray:
    """Relevance with ties: a few values, or all of them."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, [2, 9, ONE][seed % 3], (rows, columns)).astype(np.uint16)


@settings(max_examples=300, deadline=None)
@given(sides, sides, st.integers(0, 30), st.data())
def test_a_pyramid_has_as_many_tokens_as_counted_each_at_a_place_of_its_own(
    rows: int, columns: int, seed: int, data: st.DataObject
) -> None:
    num_kept = data.draw(st.integers(num_windows((rows, columns)), rows * columns))
    relevance = drawn(rows, columns, seed)
    pyramid = plan(relevance, num_kept)
    assert len(pyramid.groups) == len(pyramid.places) == num_kept
    used = sorted(token for group in pyramid.groups for token in group)
    assert used == list(range(pyramid.num_tokens))
    assert num_kept <= pyramid.num_tokens < num_kept + 12, "`PreparedImage.encoded_tokens`"
    cells = pyramid.places[:, 0].astype(int) * columns + pyramid.places[:, 1]
    assert (np.diff(cells) > 0).all(), "raster order"
    assert pyramid.places.min() >= 0
    assert (pyramid.places.max(0) < (rows, columns)).all()
    again = plan(relevance.copy(), num_kept)
    assert again.windows == pyramid.windows
    assert again.groups == pyramid.groups


@given(sides, sides, st.integers(1, 1000), st.integers(0, 9))
@settings(deadline=None)
def test_every_share_that_the_gateway_counts_has_a_pyramid(
    rows: int, columns: int, permille: int, seed: int
) -> None:
    num_kept = Reduction(Method.ARRCOC_PYRAMID, permille).num_tokens((rows, columns))
    assert num_windows((rows, columns)) <= num_kept <= rows * columns
    assert len(plan(drawn(rows, columns, seed), num_kept).groups) == num_kept


@given(sides, sides, st.integers(0, 9))
@settings(deadline=None)
def test_windows_cover_each_cell_once(rows: int, columns: int, seed: int) -> None:
    pyramid = plan(drawn(rows, columns, seed), (num_windows((rows, columns)) + rows * columns) // 2)
    covered = np.zeros((rows, columns), int)
    for window in pyramid.windows:
        covered[window.top :, window.left :][: window.rows, : window.columns] += 1
    assert (covered == 1).all()


@pytest.mark.parametrize("cells", [(1, 1), (4, 7), (13, 11)])
def test_all_tokens_are_the_cells_at_scale_1(cells: tuple[int, int]) -> None:
    total = cells[0] * cells[1]
    pyramid = plan(drawn(*cells, 2), total)
    assert pyramid.num_tokens == total
    assert {window.level for window in pyramid.windows} == {0}
    assert pyramid.places.tolist() == [list(divmod(i, cells[1])) for i in range(total)]


def levels(pyramid: Pyramid) -> list[int]:
    return [window.level for window in pyramid.windows]


def test_the_fewest_tokens_are_one_per_window_at_the_finest_scale_with_one() -> None:
    pyramid = plan(drawn(9, 6, 2), 6)
    assert levels(pyramid) == [2, 2, 2, 2, 2, 1]
    assert pyramid.windows[-1] == Window(8, 4, 1, 2, 1)


def test_the_most_relevant_windows_have_the_finest_scale() -> None:
    relevance = np.full((8, 12), 10, np.uint16)
    relevance[1, 5], relevance[6, 2] = 9000, 900
    assert levels(plan(relevance, 6 + 3)) == [2, 1, 2, 2, 2, 2]
    assert levels(plan(relevance, 6 + 15)) == [2, 0, 2, 2, 2, 2]
    assert levels(plan(relevance, 6 + 15 + 3)) == [2, 0, 2, 1, 2, 2]


def test_a_level_that_makes_too_many_tokens_joins_the_least_relevant_ones() -> None:
    relevance = np.full((4, 4), 5, np.uint16)
    relevance[0, 3], relevance[2, 1] = 70, 80
    pyramid = plan(relevance, 3)
    assert levels(pyramid) == [1]
    assert pyramid.groups == ((0, 3), (1,), (2,)), "2x2 tokens: 1 and 2 have these cells"
    pyramid = plan(relevance, 5)
    assert levels(pyramid) == [0]
    assert pyramid.num_tokens == 16
    assert sorted(map(len, pyramid.groups)) == [1, 1, 1, 1, 12]
    assert {(3,), (9,)} < set(pyramid.groups)


def test_a_token_is_in_the_middle_of_its_cells_and_never_beyond_the_edge() -> None:
    assert places_of(Window(4, 8, 4, 4, 2)).tolist() == [[5, 9]]
    assert places_of(Window(4, 8, 4, 4, 1)).tolist() == [[4, 8], [4, 10], [6, 8], [6, 10]]
    assert places_of(Window(4, 8, 1, 3, 2)).tolist() == [[4, 9]]
    assert places_of(Window(4, 8, 1, 3, 1)).tolist() == [[4, 8], [4, 10]]


def test_the_plan_is_the_same_on_every_machine() -> None:
    """A change of this digest is another selection: raise `reduction.VERSION` with it."""
    relevance = (np.arange(13 * 18).reshape(13, 18) ** 2 * 31 % 4001).astype(np.uint16)
    pyramid = plan(relevance, 70)
    text = str((levels(pyramid), pyramid.groups, pyramid.places.tolist()))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "3c63493b6889e779"
