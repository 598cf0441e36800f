"""What the native kernel of packed segments cannot read is refused, by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from kernels.batches import Batch, make_batch
from kernels.packed import Case

from vlm_kernels.flash_attention import (
    can_attend_segments,
    flash_attention,
    flash_paged_attention,
)
from vlm_kernels.segments import plan_segments, seen_by

if not can_attend_segments(torch.bfloat16, torch.device("cpu")):
    pytest.skip("this CPU has no AVX512-BF16", allow_module_level=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"num_keys": np.array([5, 5, 5])}, "must be alike", id="numbers"),
        pytest.param({"num_queries": np.array([4, -4])}, "negative", id="negative"),
        pytest.param({"num_queries": np.array([4, 5])}, "one per token", id="too many queries"),
        pytest.param({"end": np.full(8, 6)}, "of its own segment", id="keys of another"),
        pytest.param({"end": np.zeros(8, int)}, "of its own segment", id="no keys"),
        pytest.param({"first": np.full(8, -1)}, "of its own segment", id="before the first"),
    ],
)
def test_segments_that_would_read_elsewhere_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    given = {
        "num_queries": np.array([4, 4]), "num_keys": np.array([5, 5]),
        "first": np.zeros(8, int), "end": np.full(8, 5),
    }  # fmt: skip
    assert len(plan_segments(**given).tokens) == 2
    with pytest.raises(ValueError, match=message):
        plan_segments(**given | changes)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        pytest.param("k", torch.zeros(9, 2, 7).bfloat16(), "must fit q", id="head size"),
        pytest.param("k", torch.zeros(8, 2, 8).bfloat16(), "must fit q", id="keys without values"),
        pytest.param("k", torch.zeros(9, 2, 8), "k is torch.float32", id="type"),
        pytest.param("v", torch.zeros(9, 2, 16).bfloat16()[..., ::2], "v has inner", id="stride"),
        pytest.param("q", torch.zeros(9, 3, 8).bfloat16(), "a multiple of 2", id="heads"),
        pytest.param("q", torch.zeros(8, 4, 8).bfloat16(), "must be .9 or more", id="tokens"),
        pytest.param("out", torch.zeros(9, 4, 9).bfloat16(), "like q", id="out"),
        pytest.param("out", torch.zeros(9, 4, 8), "out is torch.float32", id="type of out"),
    ],
)  # fmt: skip
def test_tensors_of_another_shape_are_refused(
    name: str, tensor: torch.Tensor, message: str
) -> None:
    case = Case(((9, 9),), 2, 2, 8)
    q, k, v = case.tensors()
    given = {"q_THD": q, "k_KHD": k, "v_KHD": v, "out_THD": torch.empty_like(q)}
    key = next(each for each in given if each.startswith(f"{name}_"))
    with pytest.raises(ValueError, match=message):
        flash_attention(case.segments, **{**given, key: tensor}, scale=1.0)


def test_fewer_keys_than_segments_have_are_refused() -> None:
    case = Case(((9, 9),), 2, 2, 8)
    q, k, v = case.tensors()
    with pytest.raises(ValueError, match="the segments have more keys"):
        flash_attention(case.segments, q, k[:8], v[:8], torch.empty_like(q), scale=1.0)


@pytest.mark.parametrize(
    ("table", "layer", "message"),
    [
        pytest.param(np.full((1, 9), 10_000), 0, "a block that is read", id="behind the cache"),
        pytest.param(np.full((1, 9), -1), 0, "a block that is read", id="before the cache"),
        pytest.param(np.ones((1, 2), int), 0, "more keys", id="too few blocks"),
        pytest.param(np.ones((2, 9), int), 0, "a row per segment", id="rows"),
        pytest.param(None, 0, "a row per segment", id="no table"),
        pytest.param(np.ones((1, 9), int), 2, "layer 2", id="layer"),
        pytest.param(np.ones((1, 9), int), -1, "layer -1", id="negative layer"),
    ],
)
def test_blocks_that_are_not_there_are_refused(
    table: np.ndarray | None, layer: int, message: str
) -> None:
    batch: Batch = make_batch([(3, 9)], dtype=torch.bfloat16)
    first, end = seen_by(np.arange(3, 12))
    segments = plan_segments(np.array([9]), np.array([12]), first, end, block_table=table)
    out = torch.empty_like(batch.q)
    with pytest.raises(ValueError, match=message):
        flash_paged_attention(segments, batch.q, batch.kv_cache, layer, out, scale=1.0)
