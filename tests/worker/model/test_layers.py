"""Layers of every family become kernels, and compute what transformers' modules do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from worker.checkpoints import make_checkpoint
from worker.identity.families import random_questions
from worker.identity.questions import Question
from worker.identity.stepper import Stepper

from vlm_kernels.native_layers import has_layers
from vlm_worker.core.families import FAMILIES, load_family
from vlm_worker.model.build import RunnerSettings, build_runner
from vlm_worker.model.layers import DecoderLayer, Mlp, Norm
from vlm_worker.model.linear import can_pack
from vlm_worker.model.loader import load_model
from vlm_worker.model.vision_blocks import VisionBlock
from vlm_worker.types import Stage

ANSWER = list(range(10, 18))

needs_bfloat16 = pytest.mark.skipif(
    not can_pack(torch.bfloat16, torch.device("cpu")), reason="this CPU has no fast bfloat16"
)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("layers") / request.param, request.param)


def test_every_decoder_layer_and_every_mlp_is_ours(model_dir: Path) -> None:
    model = load_model(model_dir, tuple(Stage), dtype="float32").model
    assert all(isinstance(layer, DecoderLayer) for layer in model.get_decoder().layers)
    kinds = {type(module).__name__: type(module) for module in model.modules()}
    left = {name for name in kinds if name.endswith(("RMSNorm", "MLP", "Mlp", "VisionBlock"))}
    assert left <= {Mlp.__name__, VisionBlock.__name__, Norm.__name__}
    assert any(isinstance(module, Mlp) for module in _tower(model).modules())
    assert not any(type(module) is torch.nn.LayerNorm for module in model.modules())


@needs_bfloat16
def test_packed_in_bfloat16_a_model_is_as_near_float32_as_transformers_modules(
    model_dir: Path,
) -> None:
    """Whatever is fused: the error of packed layers is that of plain ones."""
    family = load_family(model_dir)
    asked = random_questions(model_dir, family, count=2, seed=0)
    exact = _logits(model_dir, asked, dtype="float32")
    plain = _logits(model_dir, asked, dtype="bfloat16", packed_weights=False)
    packed = _logits(model_dir, asked, dtype="bfloat16")
    assert _error(packed, exact) > 0, "bfloat16 took effect"
    assert _error(packed, exact) <= 1.5 * _error(plain, exact)


def _tower(model: Any) -> Any:
    return model.model.vision_tower if hasattr(model.model, "vision_tower") else model.model.visual


def _error(some: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sqrt(((some - exact) ** 2).mean()))


def _logits(model_dir: Path, asked: list[Question], **options: Any) -> np.ndarray:
    runner = build_runner(
        RunnerSettings(model_dir, tuple(Stage), kv_memory_bytes=32 << 20, **options)
    )
    stepper = Stepper(runner)
    sequences = [stepper.start(question, (), max_tokens=len(ANSWER)) for question in asked]
    return np.concatenate(
        stepper.forced_logits(sequences, [ANSWER] * len(asked), chunk=2048), axis=0
    )


@needs_bfloat16
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "vision=int8", "text=int8", "vision=kivi4"])
def test_the_native_decoder_gives_what_transformers_loop_over_the_layers_gives(
    model_dir: Path, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_layers():
        pytest.skip("this CPU has no AVX512-BF16")
    family = load_family(model_dir)
    asked = random_questions(model_dir, family, count=2, seed=0)
    native = _logits(model_dir, asked, dtype="bfloat16", kv_dtype=kv_dtype, block_size=32)
    loops: list[None] = []
    monkeypatch.setattr("vlm_worker.model.layers._native_layers", lambda *_: loops.append(None))
    by_layer = _logits(model_dir, asked, dtype="bfloat16", kv_dtype=kv_dtype, block_size=32)
    assert len(loops) == 1, "the loop took effect"
    assert np.array_equal(native, by_layer)
