"""From settings to a model that can run: files, runner, and the facts that others need. Blocking.

Imports are where they are needed: a checksum runner brings no torch, a gateway none of this.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

from vlm_worker.core.families import Family, load_family
from vlm_worker.core.model_files import Fields, read_json
from vlm_worker.engine.runner import Runner
from vlm_worker.engine.sequences import Positions
from vlm_worker.serve.sources import fetch_model
from vlm_worker.server.state import ModelFacts
from vlm_worker.settings import WorkerSettings
from vlm_worker.types import Stage

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]
"""Told what is being waited for."""

CHECKSUM_BLOCKS = 4097


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A model that can run. `revision` is the one in its layouts; `max_positions` its own limit.

    `device` is `cpu` or of another kind, whose memory is not the host's. `native_library` is the
    file of the kernels in C++, where there is one, and `native_kernels` its variant.
    `available_bytes` is the host memory that is left, where somebody knows.
    """

    runner: Runner
    family: Family
    positions: Positions
    eos_token_ids: tuple[int, ...]
    revision: str
    max_positions: int
    facts: ModelFacts
    device: str = "cpu"
    native_library: str | None = None
    native_kernels: str = "none"
    available_bytes: int | None = None


def load(settings: WorkerSettings, progress: Progress) -> Loaded:
    """Fetch, read and set up the model.

    Raises:
        WorkerError: the model cannot be had or served, with path and fix.
    """
    model_dir = fetch_model(settings.model, progress)
    family = load_family(model_dir)
    progress("loading weights")
    if settings.runner == "checksum":
        runner, positions = _checksum(settings)
        eos: tuple[int, ...] = ()
        weights_bytes, max_positions = 0, settings.max_model_len
        device, native_library, native_kernels, available = "cpu", None, "none", None
    else:
        device = _device(settings.device)
        runner, weights_bytes = _model(settings, model_dir, device)
        native_library, native_kernels = _native_library()
        available = _available_bytes()
        positions, max_positions = family.positions, family.max_position_embeddings
        eos = eos_token_ids(model_dir)
    embed, kv = runner.embed_layout, runner.kv_layout
    facts = ModelFacts(
        kv_bytes_per_token=kv.token_bytes if kv else 0,
        embedding_bytes_per_token=embed.row_bytes,
        image_tokens_per_megapixel=family.processor.tokens_per_megapixel,
        weights_bytes=weights_bytes,
        weights=embed.dtype if settings.weights == "auto" else settings.weights,
    )
    return Loaded(
        runner,
        family,
        positions,
        eos,
        embed.model_revision,
        max_positions,
        facts,
        device,
        native_library,
        native_kernels,
        available,
    )


def eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """What ends an answer: of generation_config.json, else of config.json.

    Raises ModelConfigError where it is no id.
    """
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        if not path.exists():
            continue
        fields = Fields(str(path), read_json(path))
        part = fields if "eos_token_id" in fields else fields.child("text_config")
        if "eos_token_id" in part:
            return part.counts("eos_token_id", least=0)
    return ()


def _checksum(settings: WorkerSettings) -> tuple[Runner, Positions]:
    from vlm_worker.testing import ChecksumRunner, plain_positions

    logger.warning("the runner is arithmetic, for tests: there is no model")
    has_kv = settings.stages != {Stage.ENCODER}
    runner = ChecksumRunner(CHECKSUM_BLOCKS, block_size=settings.block_size, has_kv=has_kv)
    return runner, plain_positions


def _model(settings: WorkerSettings, model_dir: Path, device: str) -> tuple[Runner, int]:
    from vlm_worker.model.build import RunnerSettings, build_runner

    runner = build_runner(
        RunnerSettings(
            model_dir=model_dir,
            stages=settings.stages,
            model_revision=settings.model.revision,
            dtype=settings.dtype,
            kv_dtype=settings.kv_dtype,
            block_size=settings.block_size,
            kv_memory_bytes=settings.kv_memory_bytes,
            kv_memory_percent=settings.kv_memory_percent,
            device=device,
            num_threads=settings.num_threads,
            packed_weights=settings.packed_weights,
            weights=settings.weights,
            compile=settings.compile,
            max_graph_seqs=settings.max_requests,
            max_model_len=settings.max_model_len,
        )
    )
    return runner, runner.weights_bytes


def _native_library() -> tuple[str | None, str]:
    from vlm_kernels.cpu import native

    return native.path(), native.variant_name()


def _available_bytes() -> int:
    from vlm_worker.model.container import available_memory_bytes

    return available_memory_bytes()


def _device(wanted: str) -> str:
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted
