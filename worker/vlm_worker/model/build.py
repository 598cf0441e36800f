"""Builds a model runner that is ready to serve: loaded, memory allocated, shapes warmed up.

load ─▶ measure memory of CUDA graphs ─▶ allocate KV blocks ─▶ warm up, compile ─▶ capture graphs

First calls are slower: they allocate memory that later calls reuse, and choose kernels for a size.
So the sizes of the warm-up grow up to those of a request, for about a second of start-up. Warm-up
also detects weights that compute NaN.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np
import torch

from vlm_kernels import gpu
from vlm_worker.core.block_kinds import BlockKinds
from vlm_worker.core.families import Family
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.core.step_values import NOT_FINITE, SampleParams, StepInputs, StepOutput
from vlm_worker.model.cgroup import num_cpus
from vlm_worker.model.gpu.compiled import compile_layers, freeze
from vlm_worker.model.gpu.decode_steps import graph_sizes
from vlm_worker.model.gpu.graphs import captured, trial_bytes
from vlm_worker.model.gpu.streams import streams_for
from vlm_worker.model.loader import LoadedModel, StartProgress, load_model, no_progress
from vlm_worker.model.memory import (
    WorkSizes,
    check_kv_device,
    device_work_bytes,
    make_kv_layout,
    num_kv_blocks,
)
from vlm_worker.model.pyramid import tower_of
from vlm_worker.model.runner import ModelRunner
from vlm_worker.model.verify import verified
from vlm_worker.reduction import WINDOW
from vlm_worker.settings import ComputeSettings
from vlm_worker.types import KVLayout, PreparedImage, Stage


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerSettings(ComputeSettings):
    """What to load.

    Attributes:
        model_dir: a directory in transformers' layout.
        stages: the stages that this worker runs.
        model_revision: part of the layout fingerprints; empty = derived from the content.
        block_size: tokens per KV block.
        max_graph_seqs: on a GPU, decode steps of at most this many sequences run as CUDA graphs.
        max_model_len: tokens of the longest sequence of such a step.
        sizes: of the work that must fit beside the KV cache on a GPU.
    """

    model_dir: Path
    stages: Collection[Stage]
    model_revision: str = ""
    block_size: int = 64
    max_graph_seqs: int = 0
    max_model_len: int = 4096
    sizes: WorkSizes = dataclasses.field(default_factory=WorkSizes)


def build_runner(settings: RunnerSettings, progress: StartProgress = no_progress) -> ModelRunner:
    """Load a model, allocate its KV cache, warm up, and capture decode graphs.

    `progress` is called for each of these steps.

    Raises:
        ModelConfigError: the model or the settings cannot be served; the message names path and
            fix.
    """
    torch.set_num_threads(settings.num_threads or min(torch.get_num_threads(), num_cpus()))
    loaded = load_model(
        settings.model_dir,
        settings.stages,
        dtype=settings.dtype,
        device=settings.device,
        packed_weights=settings.packed_weights,
        weights=settings.weights,
        activation_scales=settings.activation_scales,
        activation_scales_hash=settings.activation_scales_hash,
        progress=progress,
    )
    if not loaded.family.spec.is_listed:
        progress("comparing the model with transformers", 0, 0)
        loaded = verified(loaded)
    if loaded.has_encoder and settings.window_cache_bytes:
        check_window_cache(loaded)
    is_listed = loaded.family.spec.is_listed
    is_compiled = settings.compile and is_listed and gpu.serves(loaded.device)
    compiled = compile_layers(loaded.model) if is_compiled else []
    revision = settings.model_revision or loaded.checkpoint.revision()
    progress("allocating the KV cache" if loaded.has_lm else "preparing the encoder", 0, 0)
    if loaded.has_lm:
        runner = _with_kv_cache(loaded, revision, settings)
    else:
        runner = ModelRunner(
            loaded,
            revision,
            kv_layout=None,
            num_blocks=0,
            window_cache_bytes=settings.window_cache_bytes,
        )
    runner.streams = streams_for(
        loaded.device, has_encoder=loaded.has_encoder, has_lm=loaded.has_lm
    )
    progress("compiling and warming up" if compiled else "warming up", 0, 0)
    if loaded.has_encoder and is_listed:  # the verification has tried the others
        try_encoder(runner.encode, loaded.family, num_images=2 if compiled else 1)
    if runner.kv_layout is not None:
        try_language_model(runner.execute, loaded.family, runner.kv_layout)
    sizes = _graph_sizes(loaded, settings)
    if sizes:
        progress("capturing decode graphs", 0, 0)
        runner.graphs = captured(runner.make_graphs(sizes, settings.max_model_len), loaded.device)
    freeze(compiled)
    return runner


def _with_kv_cache(loaded: LoadedModel, revision: str, settings: RunnerSettings) -> ModelRunner:
    """The runner of a language model, with as many KV blocks as fit."""
    check_kv_device(settings.kv_dtype, loaded.device)
    layout = make_kv_layout(
        loaded.model.config.get_text_config(),
        revision,
        dtype=loaded.dtype,
        kv_dtype=settings.kv_dtype,
        block_size=settings.block_size,
    )
    if loaded.verification is not None:
        layout = dataclasses.replace(layout, attends=loaded.verification.attends)
    sizes = _graph_sizes(loaded, settings)
    reserved_bytes = 0
    if sizes and settings.kv_memory_bytes is None:
        trial = ModelRunner(loaded, revision, kv_layout=layout, num_blocks=2)
        reserved_bytes = trial_bytes(
            trial.make_graphs(sizes, settings.max_model_len), loaded.device
        )
        del trial
    num_blocks = choose_num_blocks(loaded, layout, settings, reserved_bytes=reserved_bytes)
    return ModelRunner(
        loaded,
        revision,
        kv_layout=layout,
        num_blocks=num_blocks,
        window_cache_bytes=settings.window_cache_bytes,
    )


def check_window_cache(loaded: LoadedModel) -> None:
    """Raise ModelConfigError if no state of this model's tower depends on a window alone."""
    tower = tower_of(loaded.model)
    first = min(getattr(tower, "fullatt_block_indexes", ()), default=0)
    if loaded.family.window_cells != WINDOW or not first:
        raise ModelConfigError(
            f"--window-cache-bytes: {loaded.family.model_type} has no layers over windows of "
            f"{WINDOW}x{WINDOW} visual tokens before its first layer over whole images; leave the "
            "flag out"
        )


def choose_num_blocks(
    loaded: LoadedModel, layout: KVLayout, settings: RunnerSettings, *, reserved_bytes: int = 0
) -> int:
    """The number of KV blocks of a loaded model, beside `reserved_bytes` of decode graphs.

    On a GPU, steps and encoder calls keep the memory that they need. On a CPU, it is part of the
    memory that the process declares (`core.process_memory`).

    Raises:
        ModelConfigError: fewer than two blocks fit.
    """
    work_bytes = 0
    if loaded.device.type != "cpu":
        cached = settings.window_cache_bytes if loaded.has_encoder else 0
        work_bytes = cached + device_work_bytes(
            loaded.model.config,
            loaded.family,
            loaded.stages,
            settings.sizes,
            element_bytes=loaded.dtype.itemsize,
        )
    return num_kv_blocks(
        layout,
        loaded.device,
        memory_bytes=settings.kv_memory_bytes,
        memory_percent=settings.kv_memory_percent,
        reserved_bytes=reserved_bytes,
        work_bytes=work_bytes,
    )


def _graph_sizes(loaded: LoadedModel, settings: RunnerSettings) -> tuple[int, ...]:
    """Numbers of sequences of the decode graphs; empty if decode is not captured."""
    is_captured = loaded.family.spec.is_listed and gpu.serves(loaded.device)
    if Stage.DECODE in loaded.stages and is_captured:
        return graph_sizes(settings.max_graph_seqs)
    return ()


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
    """Encode blank images of growing sizes, and 2 to `num_images` of the smallest in one call.

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
    execute: Callable[[StepInputs], StepOutput], family: Family, layout: KVLayout
) -> None:
    """Compute one token, then a block of tokens, in KV block 1, which no sequence uses yet.

    If blocks have two kinds, it is a wide one.

    Raises:
        ModelConfigError: the logits are not finite.
    """
    entry = BlockKinds.of_layout(layout).entries_per_block  # of block 1

    def compute(num_tokens: int) -> None:
        inputs = _prompt(
            num_tokens, family.num_position_rows, entry=entry, block_size=layout.block_size
        )
        if execute(inputs).token_ids[0] == NOT_FINITE:
            raise ModelConfigError(
                "the language model's logits are not finite: its weights are damaged, or --dtype "
                "has too small a range for them"
            )

    warm_up_sizes(compute, [1, layout.block_size])


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


def _prompt(num_tokens: int, num_position_rows: int, *, entry: int, block_size: int) -> StepInputs:
    """Inputs of one sequence of `num_tokens` tokens 0; the last one is sampled greedily."""
    numbers = np.arange(num_tokens, dtype=np.int64)
    return StepInputs(
        token_ids=np.zeros(num_tokens, np.int64),
        positions=np.tile(numbers, (num_position_rows, 1)),
        slot_mapping=entry * block_size + numbers,
        query_start=np.array([0, num_tokens], np.int32),
        context_lens=np.zeros(1, np.int32),
        block_table=np.full((1, 1), entry, np.int32),
        spans=((),),
        image_rows=(),
        sample_rows=np.array([num_tokens - 1], np.int64),
        sampling=SampleParams.all_greedy(1),
    )
