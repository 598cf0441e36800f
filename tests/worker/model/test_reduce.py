"""The arithmetic of reductions: which rows are kept, where they are, and what they hold."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_worker.errors import EngineError
from vlm_worker.model.reduce import Groups, Rankings, diverse_order, merge, rank
from vlm_worker.reduction import Cells, Method, Reduction
from vlm_worker.types import PreparedImage

FREE = (Method.DIVERSE, Method.ZIP, Method.MERGE, Method.ARRCOC)
ARRCOC = Reduction(Method.ARRCOC, 500)
cells_ = st.tuples(st.integers(1, 7), st.integers(1, 7))


def rows_of(cells: Cells, seed: int) -> tuple[torch.Tensor, Rankings]:
    generator = torch.Generator().manual_seed(seed)
    num_tokens = cells[0] * cells[1]
    rows = torch.randn(num_tokens, 8, generator=generator)
    relevance = np.random.default_rng(seed).integers(1, 65536, cells).astype(np.uint16)
    return rows, Rankings(torch.rand(num_tokens, generator=generator), relevance)


def members(groups: Groups) -> list[list[int]]:
    edges = groups.edges.tolist()
    return [groups.sources[a:b].tolist() for a, b in itertools.pairwise(edges)]


@settings(max_examples=60, deadline=None)
@given(cells_, st.integers(0, 9), st.sampled_from(FREE), st.integers(1, 1000))
def test_kept_tokens_are_as_many_as_counted_and_in_raster_order(
    cells: Cells, seed: int, method: Method, permille: int
) -> None:
    rows, known = rows_of(cells, seed)
    reduction = Reduction(method, permille)
    groups = rank(rows, cells, reduction, known)
    kept = merge(rows, groups)
    assert kept.shape == (reduction.num_tokens(cells), 8)
    flat = groups.places[:, 0].astype(int) * cells[1] + groups.places[:, 1]
    assert (np.diff(flat) > 0).all()
    assert [group[0] for group in members(groups)] == flat.tolist()
    for row, group in zip(kept, members(groups), strict=True):
        torch.testing.assert_close(row, rows[group].mean(0))
    used = sorted(groups.sources.tolist())
    assert len(used) == len(set(used)), "a cell is in two groups"


@pytest.mark.parametrize("method", FREE)
def test_all_tokens_kept_are_the_image_itself(method: Method) -> None:
    rows, known = rows_of((4, 5), 3)
    groups = rank(rows, (4, 5), Reduction(method, 1000), known)
    assert torch.equal(merge(rows, groups), rows)
    assert groups.places.tolist() == [list(divmod(i, 5)) for i in range(20)]


@given(cells_, st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_merge_and_pool_lose_no_cell(cells: Cells, seed: int) -> None:
    rows, known = rows_of(cells, seed)
    for reduction in (Reduction(Method.MERGE, 300), Reduction(Method.POOL, 250)):
        groups = rank(rows, cells, reduction, known)
        assert sorted(groups.sources.tolist()) == list(range(len(rows)))


@given(cells_, st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_diverse_is_the_greedy_choice_and_its_order_is_nested(cells: Cells, seed: int) -> None:
    rows, _ = rows_of(cells, seed)
    order = diverse_order(rows, len(rows))
    assert sorted(order) == list(range(len(rows)))
    x = torch.nn.functional.normalize(rows, dim=1)
    distance = 1 - x @ x.T
    for number in range(1, len(order)):
        nearest = distance[:, order[:number]].amin(dim=1)
        left = [i for i in range(len(rows)) if i not in order[:number]]
        assert nearest[order[number]] >= nearest[left].max() - 1e-5
        assert diverse_order(rows, number) == order[:number]


def test_a_lower_share_uses_the_ranking_of_a_higher_one() -> None:
    rows, known = rows_of((6, 6), 1)
    rank(rows, (6, 6), Reduction(Method.DIVERSE, 500), known)
    order = known.order
    groups = rank(rows, (6, 6), Reduction(Method.DIVERSE, 250), known)
    assert known.order is order
    assert sorted(groups.sources.tolist()) == sorted(order[:9])


def test_zip_keeps_the_rows_of_highest_score_and_joins_others_to_the_most_similar() -> None:
    rows = torch.tensor([[1.0, 0], [0, 1], [1, 0.1], [0.1, 1], [1, 0.2], [0, 5], [5, 0], [0, 9]])
    scores = torch.tensor([0.0, 0, 0, 0, 0, 5, 7, 6])
    groups = rank(rows, (2, 4), Reduction(Method.ZIP, 625), Rankings(scores))  # 5: 4 and 1
    assert members(groups)[-3:] == [[5], [6], [7]]
    assert members(groups)[:2] == [[0], [1, 2, 3, 4]]  # scores tie: the lower index is dominant


def test_zip_without_scores_is_refused() -> None:
    known = Rankings()
    assert not known.can(Reduction(Method.ZIP, 500))
    with pytest.raises(EngineError, match="attention scores"):
        rank(torch.zeros(4, 2), (2, 2), Reduction(Method.ZIP, 500), known)


@pytest.mark.parametrize("relevance", [None, np.ones((4, 1), np.uint16)])
def test_arrcoc_without_the_relevance_of_the_cells_is_refused(
    relevance: np.ndarray | None,
) -> None:
    known = Rankings(relevance=relevance)
    assert known.can(ARRCOC) is (relevance is not None)
    with pytest.raises(EngineError, match="relevance of the image's cells"):
        rank(torch.zeros(4, 2), (2, 2), ARRCOC, known)


def test_the_relevance_of_an_image_is_kept_for_its_next_reduction() -> None:
    pixels = np.array([[9, 1], [1, 5]], np.uint16)
    known, bare = Rankings(), PreparedImage(bytes(32), (1, 4, 4), 4, memoryview(b""), ARRCOC)
    known.learn(bare)
    assert not known.can(ARRCOC)
    known.learn(dataclasses.replace(bare, relevance=pixels.tobytes()))
    known.learn(bare)
    assert members(rank(torch.zeros(4, 2), (2, 2), ARRCOC, known)) == [[0], [3, 1, 2]]


def test_rows_of_a_whole_image_serve_no_approximate_reduction() -> None:
    reduction = Reduction(Method.ARRCOC_PYRAMID, 500)
    known = Rankings(relevance=np.ones((2, 2), np.uint16))
    assert not known.can(reduction)
    with pytest.raises(EngineError, match="no rows of the whole image"):
        rank(torch.zeros(4, 2), (2, 2), reduction, known)


def test_merge_joins_the_regions_of_one_colour() -> None:
    colours = torch.tensor([[0, 0, 1], [0, 1, 1], [2, 2, 1]])
    rows = torch.nn.functional.one_hot(colours.flatten(), 3).float()
    groups = rank(rows, (3, 3), Reduction(Method.MERGE, 333), Rankings())
    assert sorted(map(sorted, members(groups))) == [[0, 1, 3], [2, 4, 5, 8], [6, 7]]


def test_pool_averages_blocks_and_smaller_ones_at_the_edge() -> None:
    groups = rank(torch.zeros(15, 2), (3, 5), Reduction(Method.POOL, 250), Rankings())
    assert members(groups) == [[0, 1, 5, 6], [2, 3, 7, 8], [4, 9], [10, 11], [12, 13], [14]]
    assert groups.places.tolist() == [[0, 0], [0, 2], [0, 4], [2, 0], [2, 2], [2, 4]]


def test_rows_that_are_not_the_cells_are_refused() -> None:
    with pytest.raises(EngineError, match="no image of"):
        rank(torch.zeros(5, 2), (2, 2), Reduction(Method.DIVERSE, 500), Rankings())
