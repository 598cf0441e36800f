"""Of every family a role loads its half bit by bit, and encodes as the whole model does."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from worker.checkpoints import make_checkpoint
from worker.identity.families import random_questions

from vlm_worker.core.families import FAMILIES, load_family
from vlm_worker.model.build import RunnerSettings, build_runner
from vlm_worker.model.loader import UnloadedModule, load_model
from vlm_worker.types import Stage


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("roles") / request.param, request.param)


def reference(model_dir: Path) -> Any:
    """The whole model, loaded by transformers."""
    spec = load_family(model_dir).spec
    model_class = getattr(importlib.import_module(spec.module), spec.model_class)
    return model_class.from_pretrained(model_dir, dtype=torch.float32).eval()


def content(weight: torch.Tensor) -> tuple[tuple[int, ...], bytes]:
    """What a tensor holds, wherever it is named."""
    return tuple(weight.shape), weight.contiguous().numpy().tobytes()


@pytest.mark.parametrize(
    "stages",
    [(Stage.ENCODER,), (Stage.PREFILL,), (Stage.DECODE,), tuple(Stage)],
    ids=",".join,
)
def test_a_role_holds_its_own_weights_and_no_others(
    model_dir: Path, stages: tuple[Stage, ...]
) -> None:
    loaded = load_model(model_dir, stages)
    spec, whole = loaded.family.spec, reference(model_dir).state_dict()
    own = loaded.model.state_dict().values()
    prefixes = tuple(f"model.{child}." for child in spec.encoder_children)
    vision = {name for name in whole if name.startswith(prefixes)}
    wanted = vision if loaded.has_encoder else set()
    wanted = wanted | (whole.keys() - vision if loaded.has_lm else set())
    assert vision
    # layers that have kernels name their weights otherwise
    assert sorted(map(content, own)) == sorted(content(whole[name]) for name in wanted)
    absent = {
        name for name, part in loaded.model.named_modules() if isinstance(part, UnloadedModule)
    }
    left_out = [] if loaded.has_encoder else [f"model.{child}" for child in spec.encoder_children]
    left_out += [] if loaded.has_lm else [*(f"model.{c}" for c in spec.lm_children), spec.head]
    assert absent == set(left_out)


def test_images_encoded_together_are_those_of_transformers(model_dir: Path) -> None:
    runner = build_runner(RunnerSettings(model_dir, (Stage.ENCODER,), dtype="float32"))
    family = runner.family
    questions = random_questions(model_dir, family, count=9, seed=0)
    images = [image for question in questions for image in question.prepared_images]
    together = runner.encode(images)
    whole = reference(model_dir)
    for image, embedding in zip(images, together, strict=True):
        values = torch.frombuffer(bytearray(image.patches), dtype=torch.float32)
        if "qwen" in family.model_type:
            grid = torch.tensor([image.grid_thw])
            made = whole.get_image_features(values.view(int(grid.prod()), -1), image_grid_thw=grid)
        else:
            side = whole.config.vision_config.image_size
            made = whole.get_image_features(pixel_values=values.view(1, 3, side, side))
        assert not isinstance(embedding, Exception), embedding
        torch.testing.assert_close(embedding.rows, made.pooler_output[0], atol=1e-4, rtol=1e-4)
