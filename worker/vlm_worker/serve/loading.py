"""Loads a model from settings: files, runner, and the facts that other components need. Blocking.

Imports are local: a checksum runner needs no torch, and a gateway needs nothing of this module.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from vlm_worker.core.families import Family, load_family
from vlm_worker.core.grammars import Vocabulary
from vlm_worker.core.model_files import ConfigFields, read_json
from vlm_worker.core.probe import Verification
from vlm_worker.engine.runner import Runner
from vlm_worker.engine.sequences import Positions
from vlm_worker.engine.settings import MAX_ENCODE_TOKENS
from vlm_worker.serve.sources import fetch_model
from vlm_worker.server.state import ModelFacts
from vlm_worker.settings import WorkerSettings
from vlm_worker.settings.options import values_of
from vlm_worker.types import Stage
from vlm_worker.weights import label

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]
"""Called with the step that is in progress."""

CHECKSUM_BLOCKS = 4097
REPORT_SECONDS = 1.0


class StepReports:
    """Describes the steps of a start. A step of a known size has its share once a second.

    Args:
        progress: receives the text.
        clock: seconds.
    """

    def __init__(self, progress: Progress, clock: Callable[[], float] = time.monotonic) -> None:
        self._progress = progress
        self._clock = clock
        self._step = ""
        self._began = self._next = 0.0

    def report(self, step: str, done: int, total: int) -> None:
        """Report that `done` of `total` is done of a step; a `total` of 0 is unknown."""
        now = self._clock()
        if step != self._step:
            self._step, self._began, self._next = step, now, now + REPORT_SECONDS
            if total <= 0:
                self._progress(step)
        if total <= 0 or now < self._next:
            return
        self._next = now + REPORT_SECONDS
        text = f"{step}: {100 * done // total} %"
        seconds = now - self._began
        if done and seconds:
            text += f", {seconds * (total - done) / done:.0f} s left"
        self._progress(text)


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model. `max_positions` is the model's limit.

    If `device` is not `cpu`, its memory is not host memory. `native_library` is the file of the
    C++ kernels, if it exists, and `native_kernels` its variant. `available_bytes` is the remaining
    host memory, and `limit_bytes` the container's limit, if known. `work_bytes` is the temporary
    memory of a step and an encoder call. `content_revision` hashes the files of the model,
    and `activation_scales` the scales of int8 layers' inputs, if they are from a file.
    `verification` is what the start has shown of an unlisted family.
    `vocabulary` is what grammars read; None if answers cannot be constrained.
    """

    runner: Runner
    family: Family
    positions: Positions
    eos_token_ids: tuple[int, ...]
    max_positions: int
    facts: ModelFacts
    device: str = "cpu"
    native_library: str | None = None
    native_kernels: str = "none"
    available_bytes: int | None = None
    limit_bytes: int | None = None
    work_bytes: int = 0
    content_revision: Callable[[], str] = lambda: ""
    activation_scales: str = ""
    vocabulary: Vocabulary | None = None
    verification: Verification | None = None


def load(settings: WorkerSettings, progress: Progress) -> Loaded:
    """Fetch, read and set up the model.

    Raises:
        WorkerError: the model cannot be fetched or served, with path and fix.
    """
    model_dir = fetch_model(settings.model, progress)
    family = load_family(model_dir)
    progress("loading weights")
    if settings.runner == "checksum":
        return _load_checksum(settings, family, model_dir)
    return _load_model(settings, family, model_dir, progress)


def _load_checksum(settings: WorkerSettings, family: Family, model_dir: Path) -> Loaded:
    from vlm_worker.testing import ChecksumRunner, plain_positions

    logger.warning("the runner is arithmetic, for tests: there is no model")
    has_kv = settings.stages != {Stage.ENCODER}
    runner = ChecksumRunner(CHECKSUM_BLOCKS, block_size=settings.block_size, has_kv=has_kv)
    facts = _facts(settings, runner, family, weights_bytes=0)
    vocabulary = load_vocabulary(model_dir, runner, eos_token_ids(model_dir))
    length = settings.max_model_len
    return Loaded(runner, family, plain_positions, (), length, facts, vocabulary=vocabulary)


def _load_model(
    settings: WorkerSettings, family: Family, model_dir: Path, progress: Progress
) -> Loaded:
    from vlm_kernels.cpu import native
    from vlm_worker.model.build import RunnerSettings, build_runner
    from vlm_worker.model.cgroup import available_memory_bytes, memory_limit_bytes
    from vlm_worker.model.checkpoint import open_checkpoint
    from vlm_worker.model.memory import WorkSizes

    sizes = WorkSizes(
        num_tokens=max(settings.max_batched_tokens, settings.max_requests),
        num_rows=settings.max_requests,
        num_visual_tokens=MAX_ENCODE_TOKENS,
        embedding_cache_bytes=settings.encoder_cache.embedding_cache_bytes,
    )
    runner = build_runner(
        RunnerSettings(
            model_dir=model_dir,
            stages=settings.stages,
            model_revision=settings.model.revision,
            block_size=settings.block_size,
            max_graph_seqs=settings.max_requests,
            max_model_len=settings.max_model_len,
            sizes=sizes,
            **values_of(settings.compute),
        ),
        StepReports(progress).report,
    )
    family = runner.family  # an unlisted one has the mask that the start found
    return Loaded(
        runner,
        family,
        family.positions,
        eos_token_ids(model_dir),
        family.max_position_embeddings,
        _facts(
            settings,
            runner,
            family,
            weights_bytes=runner.weights_bytes,
            activation_scales=runner.activation_scales,
        ),
        activation_scales=runner.activation_scales,
        verification=runner.verification,
        device=runner.device.type,
        native_library=native.path(),
        native_kernels=native.variant_name(),
        available_bytes=available_memory_bytes(),
        limit_bytes=memory_limit_bytes(),
        work_bytes=runner.work_bytes(sizes),
        content_revision=open_checkpoint(model_dir).revision,
        vocabulary=load_vocabulary(model_dir, runner, eos_token_ids(model_dir)),
    )


def _facts(
    settings: WorkerSettings,
    runner: Runner,
    family: Family,
    *,
    weights_bytes: int,
    activation_scales: str = "",
) -> ModelFacts:
    embed, kv = runner.embed_layout, runner.kv_layout
    return ModelFacts(
        kv_bytes_per_token=kv.token_bytes if kv else 0,
        embedding_bytes_per_token=embed.row_bytes,
        image_tokens_per_megapixel=family.processor.tokens_per_megapixel,
        weights_bytes=weights_bytes,
        weights=label(
            settings.compute.weights,
            family.spec.int8,
            dtype=embed.dtype,
            scales_sha256=activation_scales,
        ),
    )


def load_vocabulary(
    model_dir: Path, runner: Runner, eos_token_ids: tuple[int, ...]
) -> Vocabulary | None:
    """What grammars read of a model; None, and a log line, if it lacks what they need.

    None without a language model, too. A worker without it serves all other requests.
    """
    if runner.kv_layout is None:
        return None
    path = model_dir / "tokenizer.json"
    if not path.exists() or not eos_token_ids:
        logger.warning("answers cannot be constrained: no tokenizer.json, or no token ends them")
        return None
    try:
        tokenizer = Tokenizer.from_file(str(path))
        return Vocabulary(tokenizer, vocab_size=runner.vocab_size, eos_token_ids=eos_token_ids)
    except Exception:  # the libraries raise plain Exception for a file that they cannot read
        logger.warning(
            "answers cannot be constrained: tokenizer.json, or a token that ends them, is unusable",
            exc_info=True,
            extra={"path": str(path)},
        )
        return None


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
