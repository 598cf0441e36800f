"""What is swapped inside a vision tower computes the same."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from worker.checkpoints import make_checkpoint
from worker.identity.families import random_questions
from worker.identity.questions import SHAPES

from vlm_kernels.native_layers import has_layers
from vlm_worker.core.families import load_family
from vlm_worker.engine.runner import is_device_lost
from vlm_worker.errors import EngineError
from vlm_worker.model.attention import planes_forward
from vlm_worker.model.loader import load_model
from vlm_worker.model.vision import Embedding, ImageEncoder
from vlm_worker.model.vision_blocks import (
    PatchProjection,
    VisionBlock,
    join_vision_blocks,
    use_patch_projection,
)
from vlm_worker.types import PreparedImage, Stage


class Tower(nn.Module):
    """A tower with one convolution."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Conv3d(3, 7, (2, 5, 5), **options))


def test_a_projection_of_whole_patches_is_the_convolution() -> None:
    torch.manual_seed(0)
    tower = Tower(stride=(2, 5, 5), bias=False)
    patches = torch.randn(11, 3, 2, 5, 5)
    want = tower.embed(patches).view(11, 7)
    names = set(tower.state_dict())
    use_patch_projection(tower)
    assert isinstance(tower.embed[0], PatchProjection)
    assert set(tower.state_dict()) == names
    torch.testing.assert_close(tower.embed(patches), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"stride": (2, 1, 1), "bias": False}, id="overlapping"),
        pytest.param({"stride": (2, 5, 5), "bias": True}, id="with a bias"),
        pytest.param({"stride": (2, 5, 5), "bias": False, "padding": 1}, id="padded"),
    ],
)
def test_other_convolutions_stay(options: dict) -> None:
    tower = Tower(**options)
    use_patch_projection(tower)
    assert isinstance(tower.embed[0], nn.Conv3d)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
def test_images_of_one_size_attend_to_themselves(dtype: torch.dtype, tolerance: float) -> None:
    q, k, v = torch.randn(3, 2, 5, 4, 24).to(dtype).transpose(2, 3)
    got, _ = planes_forward(None, q, k, v, None, scaling=0.4)
    want = nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), scale=0.4)
    torch.testing.assert_close(got.float(), want.transpose(1, 2), atol=tolerance, rtol=tolerance)


def test_the_shipped_model_projects() -> None:
    tower = load_model(SHAPES, (Stage.ENCODER,)).model.model.visual
    assert isinstance(tower.patch_embed.proj, PatchProjection)


@pytest.mark.skipif(not has_layers(), reason="this CPU has no AVX512-BF16")
@pytest.mark.parametrize("family_name", ["qwen2_5_vl", "qwen2_vl"])
@pytest.mark.parametrize("weights", ["auto", "int8"])
def test_blocks_in_one_call_give_what_their_kernels_give_one_by_one(
    family_name: str, weights: str, tmp_path: Path
) -> None:
    model_dir = make_checkpoint(tmp_path / family_name, family_name)
    family = load_family(model_dir)
    model = load_model(model_dir, [Stage.ENCODER], dtype="bfloat16", weights=weights).model
    encoder = ImageEncoder(model, family.processor, device=torch.device("cpu"))
    images = random_questions(model_dir, family, count=3, seed=0)[2].prepared_images
    blocks = [module for module in model.modules() if isinstance(module, VisionBlock)]
    assert blocks
    assert all((block.native is None) == block.is_joined for block in blocks)
    together = _rows(encoder.encode(images))
    for block in blocks:
        block.native, block.is_joined = None, False
    assert torch.equal(_rows(encoder.encode(images)), together)


@pytest.mark.skipif(not has_layers(), reason="this CPU has no AVX512-BF16")
@pytest.mark.parametrize(
    ("whole", "called"), [((), [0]), ((1, 3), [0, 1, 2, 3]), ((0, 1), [0, 2]), ((3,), [0, 3])]
)
def test_blocks_of_the_same_segments_are_one_call(
    whole: tuple[int, ...], called: list[int], tmp_path: Path
) -> None:
    model_dir = make_checkpoint(tmp_path / "model", "qwen2_vl")
    model = load_model(model_dir, [Stage.ENCODER], dtype="bfloat16").model
    block = next(module for module in model.modules() if isinstance(module, VisionBlock))
    block.native = None
    blocks = [copy.deepcopy(block) for _ in range(4)]
    tower = nn.Module()
    tower.blocks = nn.ModuleList(blocks)
    tower.fullatt_block_indexes = whole
    join_vision_blocks(tower)
    assert [number for number, block in enumerate(blocks) if block.native is not None] == called
    assert all((block.native is None) == block.is_joined for block in blocks)


def _rows(embeddings: Sequence[Embedding | Exception]) -> torch.Tensor:
    rows = [one.rows for one in embeddings if isinstance(one, Embedding)]
    assert len(rows) == len(embeddings)
    return torch.cat(rows)


class AcceleratorError(RuntimeError):
    """As torch names a device that is lost."""


class LostTower:
    """A model whose device is lost."""

    def get_image_features(self, **_: object) -> object:
        raise AcceleratorError("CUDA error: an illegal memory access was encountered")


def test_what_the_device_raised_is_the_cause_of_every_images_error() -> None:
    family = load_family(SHAPES)
    encoder = ImageEncoder(LostTower(), family.processor, device=torch.device("cpu"))
    geometry = family.geometry(56, 56)
    values = math.prod(geometry.grid_thw) * family.processor.patch_dim
    patches = np.zeros(values, np.float32).data
    image = PreparedImage(bytes(32), geometry.grid_thw, geometry.num_tokens, patches)
    for count in (1, 2):
        results = encoder.encode([image] * count)
        assert len(results) == count
        for result in results:
            assert isinstance(result, EngineError)
            assert is_device_lost(result)
