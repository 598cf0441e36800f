"""Tiles of attention fit into the shared memory that a GPU has for one program."""

from __future__ import annotations

import pytest
import torch

from vlm_kernels.gpu import FLOATS
from vlm_kernels.gpu.attention_shapes import SIZES, Heads, Shape

ADA, AMPERE, HOPPER = (kib << 10 for kib in (99, 163, 227))
LIMITS = (ADA, AMPERE, HOPPER)
DIMS = (16, 32, 64, 72, 80, 96, 128, 160, 192, 256)
LARGEST = Shape(64, 64)
ALL = [Heads(dim, dtype.itemsize, copies) for dim in DIMS for dtype in FLOATS for copies in (1, 2)]
# the shared memory that Triton 3.7.1 reports for sm_89: rows, keys, head size, type, copies, bytes
COMPILED = [
    (16, 64, 128, torch.bfloat16, 1, 39168),
    (64, 64, 128, torch.bfloat16, 1, 57600),
    (16, 64, 256, torch.bfloat16, 1, 76032),
    (64, 64, 256, torch.bfloat16, 1, 106752),
    (64, 32, 256, torch.bfloat16, 1, 69760),
    (64, 64, 128, torch.float32, 1, 115200),
    (64, 32, 128, torch.float32, 1, 74112),
    (64, 64, 128, torch.bfloat16, 2, 40960),
    (64, 64, 64, torch.float32, 2, 98304),
    (64, 64, 80, torch.float32, 2, 180480),
    (64, 32, 80, torch.float32, 2, 106752),
    (64, 64, 256, torch.float32, 2, 344320),
]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("heads", ALL, ids=str)
def test_a_tile_fits_and_a_larger_one_would_not(heads: Heads, limit: int) -> None:
    found = heads.prefill_shape(limit=limit)
    assert heads.shared_bytes(found) <= limit
    assert found.rows in SIZES
    assert found.keys in SIZES
    for larger in (Shape(2 * found.rows, SIZES[-1]), Shape(found.rows, 2 * found.keys)):
        if max(larger.rows, larger.keys) <= SIZES[0]:
            assert heads.shared_bytes(larger) > limit
    for rows in (16, 32):  # of decode, by heads per KV head
        assert heads.shared_bytes(heads.shape_of_rows(rows, limit=limit)) <= limit


@pytest.mark.parametrize("heads", ALL, ids=str)
def test_on_hopper_tiles_are_the_largest_but_where_those_never_fitted(heads: Heads) -> None:
    never = heads.num_copies == 2 and heads.element_bytes == 4 and heads.dim > 128
    assert (heads.prefill_shape(limit=HOPPER) == LARGEST) == (not never)


def test_the_two_kernels_that_an_l40s_refused_have_smaller_tiles_there() -> None:
    gemma, float32 = Heads(256, 2), Heads(128, 4)
    assert [gemma.prefill_shape(limit=limit).keys for limit in LIMITS] == [32, 64, 64]
    assert [float32.prefill_shape(limit=limit).keys for limit in LIMITS] == [32, 64, 64]
    assert Heads(256, 4).prefill_shape(limit=ADA) == Shape(32, 16)


@pytest.mark.parametrize(("rows", "keys", "dim", "dtype", "copies", "num_bytes"), COMPILED)
def test_no_less_is_expected_than_the_compiler_needs(
    rows: int, keys: int, dim: int, dtype: torch.dtype, copies: int, num_bytes: int
) -> None:
    assert Heads(dim, dtype.itemsize, copies).shared_bytes(Shape(rows, keys)) >= num_bytes


def test_heads_that_fit_nowhere_are_refused_with_what_they_need() -> None:
    with pytest.raises(ValueError, match=r"heads of 1024 .* needs \d+ bytes .* has 101376"):
        Heads(1024, 4).prefill_shape(limit=ADA)
