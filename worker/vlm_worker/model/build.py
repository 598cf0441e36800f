"""Builds a model runner that is ready to serve: loaded, memory allocated, shapes warmed up.

load ─▶ measure memory of CUDA graphs ─▶ allocate KV blocks ─▶ warm up, compile ─▶ capture graphs
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

import torch

from vlm_worker.model.cgroup import num_cpus
from vlm_worker.model.gpu.compiled import can_compile, compile_layers, freeze
from vlm_worker.model.gpu.decode_steps import graph_sizes
from vlm_worker.model.gpu.graphs import can_capture, captured, trial_bytes
from vlm_worker.model.gpu.streams import streams_for
from vlm_worker.model.loader import LoadedModel, load_model
from vlm_worker.model.memory import make_kv_layout, num_kv_blocks
from vlm_worker.model.runner import ModelRunner
from vlm_worker.model.warmup import try_encoder, try_language_model
from vlm_worker.settings import ComputeSettings
from vlm_worker.types import Stage


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
    """

    model_dir: Path
    stages: Collection[Stage]
    model_revision: str = ""
    block_size: int = 64
    max_graph_seqs: int = 0
    max_model_len: int = 4096


def build_runner(settings: RunnerSettings) -> ModelRunner:
    """Load a model, allocate its KV cache, warm up, and capture decode graphs.

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
    )
    is_compiled = settings.compile and can_compile(loaded.device)
    compiled = compile_layers(loaded.model) if is_compiled else []
    revision = settings.model_revision or loaded.checkpoint.revision()
    if loaded.has_lm:
        runner = _with_kv_cache(loaded, revision, settings)
    else:
        runner = ModelRunner(loaded, revision, kv_layout=None, num_blocks=0)
    runner.use_streams(
        streams_for(loaded.device, has_encoder=loaded.has_encoder, has_lm=loaded.has_lm)
    )
    if loaded.has_encoder:
        try_encoder(runner.encode, loaded.family, num_images=2 if compiled else 1)
    if runner.kv_layout is not None:
        try_language_model(runner.execute, loaded.family, block_size=runner.kv_layout.block_size)
    sizes = _graph_sizes(loaded, settings)
    if sizes:
        runner.use_graphs(captured(runner.graphs(sizes, settings.max_model_len), loaded.device))
    freeze(compiled)
    return runner


def _with_kv_cache(loaded: LoadedModel, revision: str, settings: RunnerSettings) -> ModelRunner:
    """Build the runner of a language model, with the number of KV blocks that fit."""
    layout = make_kv_layout(
        loaded.model.config.get_text_config(),
        revision,
        dtype=loaded.dtype,
        kv_dtype=settings.kv_dtype,
        block_size=settings.block_size,
    )
    sizes = _graph_sizes(loaded, settings)
    reserved_bytes = 0
    if sizes and settings.kv_memory_bytes is None:
        trial = ModelRunner(loaded, revision, kv_layout=layout, num_blocks=2)
        reserved_bytes = trial_bytes(trial.graphs(sizes, settings.max_model_len), loaded.device)
        del trial
    num_blocks = num_kv_blocks(
        layout,
        loaded.device,
        memory_bytes=settings.kv_memory_bytes,
        memory_percent=settings.kv_memory_percent,
        reserved_bytes=reserved_bytes,
    )
    return ModelRunner(loaded, revision, kv_layout=layout, num_blocks=num_blocks)


def _graph_sizes(loaded: LoadedModel, settings: RunnerSettings) -> tuple[int, ...]:
    """Numbers of sequences of the decode graphs; empty if decode is not captured."""
    if Stage.DECODE in loaded.stages and can_capture(loaded.device):
        return graph_sizes(settings.max_graph_seqs)
    return ()
