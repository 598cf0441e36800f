"""Reductions: counts from the grid alone, one key per policy, and positions that stay."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker.checkpoints import SHAPES

from vlm_worker.core.families import load_family
from vlm_worker.errors import InvalidRequestError
from vlm_worker.reduction import Method, Reduction, cells_of
from vlm_worker.types import ImageItem, PreparedImage

sides = st.integers(1, 40)
reductions = st.one_of(
    st.builds(
        Reduction,
        st.sampled_from([method for method in Method if method is not Method.POOL]),
        st.integers(1, 1000),
    ),
    st.builds(Reduction, st.just(Method.POOL), st.sampled_from([250, 500])),
)


@given(sides, sides, reductions)
def test_a_reduction_keeps_at_least_one_token_and_at_most_all(
    rows: int, columns: int, reduction: Reduction
) -> None:
    assert 1 <= reduction.num_tokens((rows, columns)) <= rows * columns


@given(sides, sides, st.integers(1, 999))
def test_a_lower_share_keeps_no_more_tokens(rows: int, columns: int, permille: int) -> None:
    less, more = Reduction(Method.ZIP, permille), Reduction(Method.ZIP, permille + 1)
    assert less.num_tokens((rows, columns)) <= more.num_tokens((rows, columns))


@given(st.lists(reductions, min_size=2, max_size=2, unique=True))
def test_two_reductions_have_two_keys(two: list[Reduction]) -> None:
    keys = {bytes(32), *(reduction.key(bytes(32)) for reduction in two)}
    assert len(keys) == 3
    assert two[0].key(b"\1" * 32) not in keys


def test_a_pool_of_another_share_is_refused() -> None:
    with pytest.raises(ValueError, match="500 or 250 permille, not 300"):
        Reduction(Method.POOL, 300).num_tokens((4, 4))


@pytest.mark.parametrize(
    ("grid", "tokens"), [((1, 4, 4), 3), ((1, 4, 4), 0), ((4, 4, 4), 16), ((1, 24, 24), 577)]
)
def test_tokens_that_are_no_cells_are_refused(grid: tuple[int, int, int], tokens: int) -> None:
    with pytest.raises(ValueError, match="no grid of cells"):
        cells_of(grid, tokens)


def test_an_image_without_cells_cannot_be_reduced() -> None:
    """CLIP's class token is in no cell; only a forged message asks for it."""
    image = PreparedImage(bytes(32), (1, 24, 24), 577, memoryview(b""), HALF)
    with pytest.raises(InvalidRequestError, match="reduction: 577 tokens are no grid of cells"):
        _ = image.kept_tokens
    assert dataclasses.replace(image, reduction=None).kept_tokens == 577


def test_an_image_without_a_reduction_keeps_its_key_and_tokens() -> None:
    image = PreparedImage(b"k" * 32, (1, 4, 6), 6, memoryview(b""))
    assert (image.kept_key, image.kept_tokens, image.cells) == (b"k" * 32, 6, (2, 3))


HALF = Reduction(Method.DIVERSE, 500)


def test_text_after_a_reduced_image_has_the_positions_that_it_has_after_the_whole_one() -> None:
    family = load_family(SHAPES)
    pad, grid = family.image_token_id, (1, 8, 12)  # 4 x 6 cells
    whole, _ = family.positions([5, 6, *[pad] * 24, 7, 8], [ImageItem(bytes(32), 2, 24, grid)])
    kept, delta = family.positions(
        [5, 6, *[pad] * 12, 7, 8], [ImageItem(bytes(32), 2, 12, grid, HALF)]
    )
    assert (kept[:, :2] == whole[:, :2]).all()
    assert (kept[:, -2:] == whole[:, -2:]).all()
    assert (kept[:, 2:14] == 2).all()
    assert kept.shape[1] + delta == whole[0, -1] + 1


def test_a_reduced_image_at_the_end_advances_the_position_as_the_whole_one() -> None:
    family = load_family(SHAPES)
    pad, grid = family.image_token_id, (1, 8, 12)
    _, whole = family.positions([5, *[pad] * 24], [ImageItem(bytes(32), 1, 24, grid)])
    _, kept = family.positions([5, *[pad] * 12], [ImageItem(bytes(32), 1, 12, grid, HALF)])
    assert 25 + whole == 13 + kept


def test_a_count_that_is_not_the_reductions_is_refused() -> None:
    family = load_family(SHAPES)
    tokens = [family.image_token_id] * 11
    with pytest.raises(InvalidRequestError, match=r"items\[0\].num_tokens is 11"):
        family.positions(tokens, [ImageItem(bytes(32), 0, 11, (1, 8, 12), HALF)])
