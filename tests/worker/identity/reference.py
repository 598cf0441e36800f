"""What transformers itself answers: `generate()`, greedy, float32, one question at a time.

`shapes_reference()` is computed live, once per test session: seconds for all
questions. That needs no stored answers that could grow stale, and no trust in whoever stored them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from worker.identity.questions import IMAGE_TOKEN_ID, NUM_PER_TASK, SHAPES, Question, questions

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
def shapes_reference(per_task: int = NUM_PER_TASK) -> tuple[tuple[Question, Answer], ...]:
    """All questions with transformers' answers."""
    model = load_reference(SHAPES)
    return tuple((question, answer(model, question)) for question in questions(per_task))


def load_reference(model_dir: Path) -> Any:
    """The whole model, as transformers runs it."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

    model = modeling_qwen2_5_vl.Qwen2_5_VLForConditionalGeneration
    return model.from_pretrained(model_dir, dtype=torch.float32).eval()


@torch.inference_mode()
def answer(
    model: Any, question: Question, *, max_tokens: int = MAX_TOKENS, ignore_eos: bool = False
) -> Answer:
    """One greedy answer."""
    ids = torch.tensor([question.token_ids])
    pictures: dict[str, torch.Tensor] = {}
    if question.pictures:
        patches = [_patches(picture.patches, picture.grid_thw) for picture in question.pictures]
        grids = [picture.grid_thw for picture in question.pictures]
        pictures = {
            "pixel_values": torch.from_numpy(np.concatenate(patches)),
            "image_grid_thw": torch.tensor(grids),
            "mm_token_type_ids": (ids == IMAGE_TOKEN_ID).int(),
        }
    model.model.rope_deltas = None
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        output_logits=True,
        return_dict_in_generate=True,
        **({"eos_token_id": NO_TOKEN} if ignore_eos else {}),
        **pictures,
    )
    tokens = out.sequences[0, ids.shape[1] :].tolist()
    return Answer(tuple(tokens), torch.cat(out.logits).numpy().astype(np.float32))


def _patches(patches: memoryview, grid: Sequence[int]) -> np.ndarray:
    return np.frombuffer(patches, np.float32).reshape(int(np.prod(grid)), -1)
