"""Warm-up: runs the first images and steps before the worker serves requests.

First calls are slower: they allocate memory that later calls reuse, and choose kernels for a size.
So the sizes grow here up to those of a request, for about a second of start-up. Warm-up also
detects weights that compute NaN, with an error that names the model; otherwise each request would
fail.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from vlm_worker.core.families import Family
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.core.step_values import NOT_FINITE, SampleParams, StepInputs, StepOutput
from vlm_worker.types import PreparedImage

GROWTH_SECONDS = 0.25
"""Warm-up stops before a size that is expected to take longer."""

IMAGE_SIDES = (1, 112, 448)
"""Sides of the square warm-up images, in pixels."""


def try_encoder(
    encode: Callable[[Sequence[PreparedImage]], Sequence[object]],
    family: Family,
    *,
    num_images: int = 1,
) -> None:
    """Encode blank images of growing sizes.

    Args:
        encode: encodes images in one call.
        family: the model's family.
        num_images: also encode 2 to this many of the smallest images in one call.

    Raises:
        ModelConfigError: an image fails.
    """
    geometries = {
        geometry.num_tokens: geometry
        for geometry in (family.geometry(side, side) for side in IMAGE_SIDES)
    }

    def encode_plain(num_tokens: int, count: int = 1) -> None:
        grid = geometries[num_tokens].grid_thw
        patches = np.zeros(math.prod(grid) * family.processor.patch_dim, np.float32)
        for embedding in encode([PreparedImage(bytes(32), grid, num_tokens, patches.data)] * count):
            if isinstance(embedding, Exception):
                raise ModelConfigError(f"the vision tower fails on a plain image: {embedding}")

    for count in range(2, num_images + 1):
        encode_plain(min(geometries), count)
    warm_up_sizes(encode_plain, sorted(geometries))


def try_language_model(
    execute: Callable[[StepInputs], StepOutput], family: Family, *, block_size: int
) -> None:
    """Compute one token, then a block of tokens, in KV block 1, which no sequence uses yet.

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

    warm_up_sizes(compute, [1, block_size])


def warm_up_sizes(
    run: Callable[[int], None],
    sizes: Sequence[int],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Run growing sizes, up to the first that is expected to exceed GROWTH_SECONDS.

    A size is timed in its second run, because the first run includes one-time costs.
    """
    run(sizes[0])
    for size, larger in itertools.pairwise(sizes):
        started = clock()
        run(size)
        if (clock() - started) * larger / size > GROWTH_SECONDS:
            return
        run(larger)


def _prompt(num_tokens: int, num_position_rows: int, *, first_slot: int) -> StepInputs:
    """Inputs of one sequence of `num_tokens` tokens 0; the last one is sampled greedily."""
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
