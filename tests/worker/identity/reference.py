"""What transformers itself answers: `generate()`, greedy, float32, one question at a time.

`shapes_reference()` is computed live, once per test session: seconds for all
questions. That needs no stored answers that could grow stale, and no trust in whoever stored them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText
from worker.identity.questions import NUM_PER_TASK, SHAPES, Question, questions

from vlm_worker.core.families import load_family

MAX_TOKENS = 48
TIE = 1e-4
NO_TOKEN = 1 << 20  # an end that never comes


@dataclasses.dataclass(frozen=True)
class Answer:
    """Greedy tokens, and the logits that they were chosen from, float32 `[len(token_ids), V]`."""

    token_ids: tuple[int, ...]
    logits: np.ndarray

    @property
    def ties(self) -> frozenset[int]:
        """Positions whose two best logits differ by less than 1e-4."""
        best = np.partition(self.logits, -2, axis=-1)[:, -2:]
        return frozenset(np.flatnonzero(best[:, 1] - best[:, 0] < TIE).tolist())


@functools.cache
def shapes_reference(
    per_task: int = NUM_PER_TASK, *, count: int | None = None
) -> tuple[tuple[Question, Answer], ...]:
    """The first `count` questions, or all, with transformers' answers."""
    model = load_reference(SHAPES)
    return tuple((question, answer(model, question)) for question in questions(per_task)[:count])


def load_reference(model_dir: Path) -> Any:
    """The whole model, as transformers runs it; of any family."""
    spec = load_family(model_dir).spec
    model_class = AutoModelForImageTextToText
    if spec.is_listed:
        model_class = getattr(importlib.import_module(spec.module), spec.model_class)
    model = model_class.from_pretrained(model_dir, dtype=torch.float32).eval()
    if (
        spec.attends.keeps_images_whole or not spec.is_listed
    ):  # the plain implementation honours every mask to the letter
        model.set_attn_implementation("eager")
    return model


@torch.inference_mode()
def answer(
    model: Any, question: Question, *, max_tokens: int = MAX_TOKENS, ignore_eos: bool = False,
    **how: Any,
) -> Answer:  # fmt: skip
    """One greedy answer; `how` goes to `generate`."""
    ids = torch.tensor([question.token_ids])
    model.model.rope_deltas = None
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        output_logits=True,
        return_dict_in_generate=True,
        **({"eos_token_id": NO_TOKEN} if ignore_eos else {}),
        **how,
        **_images(model.config, question),
    )
    tokens = out.sequences[0, ids.shape[1] :].tolist()
    return Answer(tuple(tokens), torch.cat(out.logits).numpy().astype(np.float32))


def _images(config: Any, question: Question) -> dict[str, torch.Tensor]:
    """What the family's own processor returns beside the tokens."""
    token_ids = torch.tensor([question.token_ids])
    types = (token_ids == config.image_token_id).int()
    marks = {"gemma3": types, "paligemma": torch.zeros_like(token_ids)}
    own = marks.get(config.model_type)
    inputs = {} if own is None else {"token_type_ids": own}
    if not question.prepared_images:
        return inputs
    values = torch.cat(
        [torch.from_numpy(np.frombuffer(p.patches, np.float32)) for p in question.prepared_images]
    )
    if not hasattr(config.vision_config, "spatial_merge_size"):
        size = config.vision_config.image_size
        side = size if isinstance(size, int) else size[0]
        return {**inputs, "pixel_values": values.view(-1, 3, side, side)}
    grids = torch.tensor([image.grid_thw for image in question.prepared_images])
    return {
        "pixel_values": values.view(int(grids.prod(dim=1).sum()), -1),
        "image_grid_thw": grids,
        "mm_token_type_ids": types,
    }
