"""Models whose layers are compiled, and images for them: on any device, with any kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch._dynamo.utils import counters
from worker.identity.questions import Question
from worker.identity.stepper import Stepper

from vlm_kernels import gpu
from vlm_worker.core.families import Family
from vlm_worker.model.gpu.layers import use_gpu_kernels
from vlm_worker.model.loader import load_model
from vlm_worker.model.memory import make_kv_layout
from vlm_worker.model.runner import ModelRunner
from vlm_worker.types import ImageItem, PreparedImage, Stage

traced = functools.partial(torch.compile, fullgraph=True, dynamic=True, backend="aot_eager")
"""Traced and checked as everything that is compiled, then computed by torch's operations."""


def num_graphs() -> int:
    """That were compiled since `counters` was cleared."""
    return counters["stats"]["unique_graphs"]


def runner_of(model_dir: Path, device: torch.device, *, weights: str = "auto") -> ModelRunner:
    """With the layers that a GPU has, whatever the device; nothing is compiled."""
    loaded = load_model(
        model_dir, tuple(Stage), dtype="float32", device=str(device), packed_weights=False,
        weights=weights,
    )  # fmt: skip
    if not gpu.serves(device):
        use_gpu_kernels(loaded.model)
    layout = make_kv_layout(
        loaded.model.config.get_text_config(), "", dtype=loaded.dtype, kv_dtype="auto", block_size=4
    )
    return ModelRunner(loaded, "", kv_layout=layout, num_blocks=32)


def images(family: Family, sides: Sequence[int]) -> list[PreparedImage]:
    """Square ones."""
    rng = np.random.default_rng(sum(sides))
    made = []
    for side in sides:
        place = family.geometry(side, side)
        values = rng.standard_normal(math.prod(place.grid_thw) * family.processor.patch_dim)
        patches = values.astype(np.float32).data
        made.append(PreparedImage(rng.bytes(32), place.grid_thw, place.num_tokens, patches))
    return made


def rows(runner: ModelRunner, batches: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Of all images, a call for each batch."""
    found = [one for sides in batches for one in runner.encode(images(runner.family, sides))]
    errors = [one for one in found if isinstance(one, Exception)]
    assert not errors, errors
    return [one.rows.cpu() for one in found]


def answer(runner: ModelRunner) -> list[int]:
    """To text and an image."""
    (image,) = images(runner.family, (56,))
    token_ids = (10, *[runner.family.image_token_id] * image.num_tokens, 11, 12)
    item = ImageItem(image.image_key, 1, image.num_tokens, image.grid_thw)
    stepper = Stepper(runner)
    question = Question("seen", (), token_ids, (item,), (image,))
    sequence = stepper.start(question, (), max_tokens=3)
    stepper.generate([sequence], max_tokens=3, chunk=128, eos=None)
    return sequence.answer
