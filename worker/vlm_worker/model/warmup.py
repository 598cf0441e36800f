"""The first pictures and the first steps, before anybody waits for them.

First calls cost what later ones do not, and sizes have costs of their own: memory that is reused
later, kernels that are chosen now. So sizes grow here to those of a request, as far as a second of
start-up allows. And weights that compute nothing but NaN are found here, where the message names
the model, and not by every request.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from vlm_worker.core.families import Family
from vlm_worker.core.inputs import NOT_FINITE, SampleParams, StepInputs, StepOutput
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.types import PreparedImage

GROWTH_SECONDS = 0.25
"""A size that is expected to take longer is left to the first request that has it."""

PICTURE_SIDES = (1, 112, 448)
"""Of square pictures, in pixels."""


def try_encoder(
    encode: Callable[[Sequence[PreparedImage]], Sequence[object]],
    family: Family,
    *,
    num_pictures: int = 1,
) -> None:
    """Encode plain pictures, small ones first, and so many of these in one call.

    Raises ModelConfigError where that fails.
    """
    geometries = {
        geometry.num_tokens: geometry
        for geometry in (family.geometry(side, side) for side in PICTURE_SIDES)
    }

    def encode_plain(num_tokens: int, count: int = 1) -> None:
        grid = geometries[num_tokens].grid_thw
        patches = np.zeros(math.prod(grid) * family.processor.patch_dim, np.float32)
        for embedding in encode([PreparedImage(bytes(32), grid, num_tokens, patches.data)] * count):
            if isinstance(embedding, Exception):
                raise ModelConfigError(f"the vision tower fails on a plain picture: {embedding}")

    for count in range(2, num_pictures + 1):
        encode_plain(min(geometries), count)
    grow(encode_plain, sorted(geometries))


def try_language_model(
    execute: Callable[[StepInputs], StepOutput], family: Family, *, block_size: int
) -> None:
    """Compute one token, then a block of them, in block 1, which nobody owns yet.

    Raises:
        ModelConfigError: the logits are not finite.
    """

    def compute(num_tokens: int) -> None:
        inputs = _prompt(num_tokens, family.num_position_rows, first_slot=block_size)
        if execute(inputs).token_ids[0] == NOT_FINITE:
            raise ModelConfigError(
                "the language model's logits are not finite: its weights are damaged, or --dtype "
                "has too small a range for them"
            )

    grow(compute, [1, block_size])


def grow(
    run: Callable[[int], None],
    sizes: Sequence[int],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run ever larger sizes, up to the first that is expected to take too long.

    Each is timed on its second run: the first also makes what is made only once.
    """
    run(sizes[0])
    for size, larger in itertools.pairwise(sizes):
        started = clock()
        run(size)
        if (clock() - started) * larger / size > GROWTH_SECONDS:
            return
        run(larger)


def _prompt(num_tokens: int, num_position_rows: int, *, first_slot: int) -> StepInputs:
    """One sequence of token 0, whose last token is sampled greedily."""
    one = np.ones(1, np.int64)
    numbers = np.arange(num_tokens, dtype=np.int64)
    return StepInputs(
        token_ids=np.zeros(num_tokens, np.int64),
        positions=np.tile(numbers, (num_position_rows, 1)),
        slot_mapping=first_slot + numbers,
        query_start=np.array([0, num_tokens], np.int32),
        context_lens=np.zeros(1, np.int32),
        block_table=np.ones((1, 1), np.int32),
        spans=((),),
        image_rows=(),
        sample_rows=one * (num_tokens - 1),
        sampling=SampleParams.all_greedy(1),
    )
