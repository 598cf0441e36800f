"""Loads a model from settings: files, runner, and the facts that other components need. Blocking.

Imports are local: a checksum runner needs no torch, and a gateway needs nothing of this module.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vlm_worker.core.families import Family, load_family
from vlm_worker.core.model_files import ConfigFields, read_json
from vlm_worker.engine.runner import Runner
from vlm_worker.engine.sequences import Positions
from vlm_worker.engine.settings import MAX_ENCODE_TOKENS
from vlm_worker.serve.sources import fetch_model
from vlm_worker.server.state import ModelFacts
from vlm_worker.settings import WorkerSettings
from vlm_worker.settings.options import values_of
from vlm_worker.types import Stage

if TYPE_CHECKING:
    from vlm_worker.model.runner import ModelRunner

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]
"""Called with the step that is in progress."""

CHECKSUM_BLOCKS = 4097


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model. `revision` is the one in its layouts; `max_positions` is the model's limit.

    If `device` is not `cpu`, its memory is not host memory. `native_library` is the file of the
    C++ kernels, if it exists, and `native_kernels` its variant. `available_bytes` is the remaining
    host memory, and `limit_bytes` the container's limit, if known. `work_bytes` is the part that
    computing needs.
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
    limit_bytes: int | None = None
    work_bytes: int = 0


def load(settings: WorkerSettings, progress: Progress) -> Loaded:
    """Fetch, read and set up the model.

    Raises:
        WorkerError: the model cannot be fetched or served, with path and fix.
    """
    model_dir = fetch_model(settings.model, progress)
    family = load_family(model_dir)
    progress("loading weights")
    if settings.runner == "checksum":
        runner, positions = _checksum(settings)
        eos: tuple[int, ...] = ()
        weights_bytes, max_positions = 0, settings.max_model_len
        device, native_library, native_kernels = "cpu", None, "none"
        available, limit, work_bytes = None, None, 0
    else:
        device = _device(settings.compute.device)
        runner = model = _model(settings, model_dir, device)
        weights_bytes = model.weights_bytes
        work_bytes = model.work_bytes(
            num_tokens=max(settings.max_batched_tokens, settings.max_requests),
            num_rows=settings.max_requests,
            num_visual_tokens=MAX_ENCODE_TOKENS,
        )
        native_library, native_kernels = _native_library()
        available, limit = _container_bytes()
        positions, max_positions = family.positions, family.max_position_embeddings
        eos = eos_token_ids(model_dir)
    embed, kv = runner.embed_layout, runner.kv_layout
    facts = ModelFacts(
        kv_bytes_per_token=kv.token_bytes if kv else 0,
        embedding_bytes_per_token=embed.row_bytes,
        image_tokens_per_megapixel=family.processor.tokens_per_megapixel,
        weights_bytes=weights_bytes,
        weights=embed.dtype if settings.compute.weights == "auto" else settings.compute.weights,
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
        limit,
        work_bytes,
    )


def eos_token_ids(model_dir: Path) -> tuple[int, ...]:
    """Token ids that end an answer, from generation_config.json, else from config.json.

    Raises ModelConfigError if a value is not a token id.
    """
    for name in ("generation_config.json", "config.json"):
        path = model_dir / name
        if not path.exists():
            continue
        fields = ConfigFields(str(path), read_json(path))
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


def _model(settings: WorkerSettings, model_dir: Path, device: str) -> ModelRunner:
    from vlm_worker.model.build import RunnerSettings, build_runner

    return build_runner(
        RunnerSettings(
            model_dir=model_dir,
            stages=settings.stages,
            model_revision=settings.model.revision,
            block_size=settings.block_size,
            max_graph_seqs=settings.max_requests,
            max_model_len=settings.max_model_len,
            **values_of(settings.compute) | {"device": device},
        )
    )


def _native_library() -> tuple[str | None, str]:
    from vlm_kernels.cpu import native

    return native.path(), native.variant_name()


def _container_bytes() -> tuple[int, int | None]:
    """Remaining host memory in bytes, and the container's limit."""
    from vlm_worker.model.cgroup import available_memory_bytes, memory_limit_bytes

    return available_memory_bytes(), memory_limit_bytes()


def _device(wanted: str) -> str:
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted
