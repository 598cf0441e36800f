"""Calls of a runner with a cache of windows: which images use it, and what memory they take."""

from __future__ import annotations

import dataclasses
import itertools
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from worker.model.test_pyramid import checkpoint, images_of

from vlm_kernels.native_layers import has_layers
from vlm_worker.model.loader import load_model
from vlm_worker.model.memory import WorkSizes
from vlm_worker.model.runner import ModelRunner
from vlm_worker.model.vision import Embedding
from vlm_worker.reduction import Method, Reduction
from vlm_worker.types import PreparedImage, Stage

CACHE_BYTES = 64 << 20
ZIP = Reduction(Method.ZIP, 500)
PYRAMID = Reduction(Method.ARRCOC_PYRAMID, 300)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory, "qwen2_5_vl")


def runner_of(model_dir: Path, dtype: str, cache_bytes: int = CACHE_BYTES) -> ModelRunner:
    loaded = load_model(model_dir, [Stage.ENCODER], dtype=dtype)
    return ModelRunner(loaded, "r", kv_layout=None, num_blocks=0, window_cache_bytes=cache_bytes)


def mixed(model_dir: Path) -> list[PreparedImage]:
    """Each image whole, with scores, and at several scales."""
    return [
        dataclasses.replace(image, reduction=reduction)
        for image in images_of(model_dir, None)
        for reduction in (None, ZIP, PYRAMID)
    ]


def encoded(runner: ModelRunner, images: Sequence[PreparedImage]) -> list[Embedding]:
    found = runner.encode(images)
    assert all(isinstance(one, Embedding) for one in found), found
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        pytest.param(
            "bfloat16",
            marks=pytest.mark.skipif(not has_layers(), reason="this CPU has no AVX512-BF16"),
        ),
    ],
)
def test_images_with_and_without_scores_are_the_same_together_as_alone(
    windowed: Path, dtype: str
) -> None:
    runner, images = runner_of(windowed, dtype), mixed(windowed)
    alone = [encoded(runner, [image])[0] for image in images]
    for image, together, one in zip(images, encoded(runner, images), alone, strict=True):
        if dtype == "bfloat16":
            assert torch.equal(together.rows, one.rows), image.reduction
        torch.testing.assert_close(together.rows, one.rows, rtol=1e-4, atol=1e-3)
        assert (together.rankings.scores is None) == (image.reduction is not ZIP)
        assert (together.places is None) == (image.reduction is not PYRAMID)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[:3])
def test_an_image_without_scores_uses_the_cache_beside_one_with_scores(
    windowed: Path, order: tuple[int, ...]
) -> None:
    whole, other, *_ = images_of(windowed, None)
    batch = [whole, dataclasses.replace(other, reduction=ZIP), other]
    runner = runner_of(windowed, "float32")
    assert runner.windows is not None
    encoded(runner, [whole, other])
    num_windows = runner.windows.num_misses
    assert num_windows > 0
    assert runner.windows.num_hits == 0
    encoded(runner, [batch[number] for number in order])
    assert runner.windows.num_hits == num_windows, "a whole image did not use the cache"
    assert runner.windows.num_misses == num_windows, "an image with scores used the cache"


def test_the_declared_memory_has_the_cache_of_windows(windowed: Path) -> None:
    sizes = WorkSizes(num_visual_tokens=4096)
    plain, cached = (runner_of(windowed, "float32", num_bytes) for num_bytes in (0, CACHE_BYTES))
    assert cached.work_bytes(sizes) - plain.work_bytes(sizes) == CACHE_BYTES


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("permille", [None, 1000])
def test_a_call_with_the_cache_copies_patches_once(
    windowed: Path, permille: int | None, is_warm: bool
) -> None:
    """`encode_bytes` has the bytes of two copies: this one, and one in the type of the model."""
    images = images_of(windowed, permille) * 16
    runner = runner_of(windowed, "float32")
    encoded(runner, images_of(windowed, permille)[: 2 * is_warm])
    num_bytes = sum(image.patches.nbytes for image in images)
    tracemalloc.start()
    try:
        encoded(runner, images)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes <= peak < 1.4 * num_bytes
