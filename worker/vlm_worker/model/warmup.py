"""The first picture and the first step, before anybody waits for them.

First calls cost what later ones do not; and weights that compute nothing but NaN are found here,
where the message names the model, and not by every request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from vlm_worker.core.families import Family
from vlm_worker.core.inputs import SampleParams, StepInputs
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.types import PreparedImage


def try_encoder(
    encode: Callable[[Sequence[PreparedImage]], Sequence[object]], family: Family
) -> None:
    """Encode the smallest picture. Raises ModelConfigError where that fails."""
    side = family.processor.merge_size
    patches = np.zeros(side * side * family.processor.patch_dim, np.float32)
    (embedding,) = encode([PreparedImage(bytes(32), (1, side, side), 1, patches.data)])
    if isinstance(embedding, Exception):
        raise ModelConfigError(f"the vision tower fails on a plain picture: {embedding}")


def try_language_model(
    execute: Callable[[StepInputs], np.ndarray], family: Family, *, block_size: int
) -> None:
    """Compute one token, with its KV in block 1, which nobody owns yet.

    Raises:
        ModelConfigError: its logits are not finite.
    """
    zero = np.zeros(1, np.int64)
    inputs = StepInputs(
        token_ids=zero,
        positions=np.zeros((family.num_position_rows, 1), np.int64),
        slot_mapping=zero + block_size,
        query_start=np.array([0, 1], np.int32),
        context_lens=np.zeros(1, np.int32),
        block_table=np.ones((1, 1), np.int32),
        spans=((),),
        image_rows=(),
        sample_rows=zero,
        sampling=SampleParams(
            greedy=True,
            temperature=np.zeros(1, np.float32),
            top_p=np.ones(1, np.float32),
            top_k=np.zeros(1, np.int32),
            seed=np.zeros(1, np.uint64),
            index=zero,
        ),
    )
    if execute(inputs)[0] < 0:
        raise ModelConfigError(
            "the language model's logits are not finite: its weights are damaged, or --dtype has "
            "too small a range for them"
        )
