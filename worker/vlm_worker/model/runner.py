"""A model behind `engine.runner.Runner`: numpy and bytes in and out, torch inside.

StepInputs ─▶ embed ─▶ picture rows ─▶ decoder, paged attention ─▶ head ─▶ sampled tokens
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import torch

from vlm_kernels import AttentionPlan, gather_blocks, plan_attention, scatter_blocks
from vlm_worker.core.families import Family
from vlm_worker.core.inputs import StepInputs, StepOutput
from vlm_worker.core.model_files import ModelConfigError
from vlm_worker.errors import CorruptTransferError, EngineError
from vlm_worker.model.attention import StepContext
from vlm_worker.model.container import num_cpus
from vlm_worker.model.decoder import Decoder
from vlm_worker.model.loader import LoadedModel, load_model
from vlm_worker.model.memory import DTYPES, make_kv_cache, num_kv_blocks
from vlm_worker.model.sampler import sample
from vlm_worker.model.vision import Embedding, PictureEncoder
from vlm_worker.model.warmup import try_encoder, try_language_model
from vlm_worker.types import EmbedLayout, KVLayout, PreparedImage, Stage


@dataclasses.dataclass(frozen=True, slots=True)
class RunnerSettings:
    """What to load and how much to hold.

    Attributes:
        model_dir: a directory in transformers' layout.
        stages: what to load.
        model_revision: enters the layout fingerprints; empty = derived from the content.
        dtype: of weights and activations; `auto` is the checkpoint's.
        kv_dtype: of the KV cache; `auto` is `dtype`, `int8` has a scale per token and head.
        block_size: tokens of one KV block.
        kv_memory_bytes: for the KV cache; goes before `kv_memory_percent`.
        kv_memory_percent: likewise, a share of what is left after loading.
        device: `auto` (a GPU where there is one), `cpu` or `cuda[:N]`.
        num_threads: of the CPU; 0 is torch's choice (`OMP_NUM_THREADS`, else all cores), at most
            the container's CPUs.
        packed_weights: pack linear layers where this device and type gain by it.
        weights: `auto` (as `dtype` says), or `int8` for the linear layers that the family names.
    """

    model_dir: Path
    stages: Collection[Stage]
    model_revision: str = ""
    dtype: str = "auto"
    kv_dtype: str = "auto"
    block_size: int = 64
    kv_memory_bytes: int | None = None
    kv_memory_percent: int | None = None
    device: str = "auto"
    num_threads: int = 0
    packed_weights: bool = True
    weights: str = "auto"


def build_runner(settings: RunnerSettings) -> ModelRunner:
    """Load a model, allocate its KV cache, and run both once.

    Raises:
        ModelConfigError: the model or the settings cannot be served, with path and fix.
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
    revision = settings.model_revision or loaded.checkpoint.revision()
    layout = _kv_layout(loaded, revision, settings) if loaded.has_lm else None
    num_blocks = 0
    if layout is not None:
        num_blocks = num_kv_blocks(
            layout,
            loaded.device,
            memory_bytes=settings.kv_memory_bytes,
            memory_percent=settings.kv_memory_percent,
        )
    runner = ModelRunner(loaded, revision, kv_layout=layout, num_blocks=num_blocks)
    if loaded.has_encoder:
        try_encoder(runner.encode, loaded.family)
    if layout is not None:
        try_language_model(runner.execute, loaded.family, block_size=layout.block_size)
    return runner


class ModelRunner:
    """Owns weights, the KV buffer and the device. Called by one thread, but for `export_blocks`."""

    def __init__(
        self, loaded: LoadedModel, revision: str, *, kv_layout: KVLayout | None, num_blocks: int
    ) -> None:
        assert loaded.family.spec.embed_levels == 0, "embedding levels have no rows here"
        self._loaded, self._model = loaded, loaded.model
        self._device = loaded.device
        self._kv_layout, self._num_blocks = kv_layout, num_blocks
        self._embed_layout = EmbedLayout(
            revision, loaded.family.hidden_size, 0, _dtype_name(loaded.dtype)
        )
        self._kv_cache = torch.empty(0)
        if kv_layout is not None:
            self._kv_cache = make_kv_cache(kv_layout, num_blocks, self._device)
        self._decoder: Decoder | None = None
        if loaded.has_lm:
            head = getattr(self._model, loaded.family.spec.head)
            self._decoder = Decoder(self._model.get_decoder(), head)
        self._pictures = PictureEncoder(self._model, loaded.family.processor, device=self._device)

    @property
    def family(self) -> Family:
        """The model's facts that need no weights."""
        return self._loaded.family

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights that these stages hold."""
        return self._loaded.weights_bytes

    @property
    def kv_layout(self) -> KVLayout | None:
        """None where neither prefill nor decode is loaded."""
        return self._kv_layout

    @property
    def embed_layout(self) -> EmbedLayout:
        """How rows that leave or enter an encoder lie in memory."""
        return self._embed_layout

    @property
    def vocab_size(self) -> int:
        """Logits of a token."""
        size: int = self._model.config.get_text_config().vocab_size
        return size

    @property
    def num_blocks(self) -> int:
        """KV blocks that there are, the null block 0 included."""
        return self._num_blocks

    @torch.inference_mode()
    def execute(self, inputs: StepInputs) -> StepOutput:
        """Run one packed step and sample."""
        return sample(self._logits(inputs), inputs.sampling)

    @torch.inference_mode()
    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """Run one packed step: float32 `[R, vocabulary]` of the rows in `sample_rows`."""
        return self._logits(inputs).float()

    @torch.inference_mode()
    def encode(self, images: Sequence[PreparedImage]) -> list[Embedding | Exception]:
        """Encode pictures in one call; a failed item is an exception in its place."""
        if not self._loaded.has_encoder:
            raise EngineError("the stage encoder is not loaded here")
        return self._pictures.encode(images)

    def export_embedding(self, embedding: Embedding) -> memoryview:
        """The rows as bytes, flat, `[num_tokens, row_bytes]`."""
        rows = embedding.rows.contiguous().view(torch.uint8).cpu()
        return rows.numpy().reshape(-1).data

    def import_embedding(self, rows: memoryview, num_tokens: int) -> Embedding:
        """Rows received from an encoder.

        Raises CorruptTransferError on a wrong size, and on values that are not finite: they would
        spread through KV that other requests share before the first logits show them.
        """
        row_bytes = self._embed_layout.row_bytes
        if rows.nbytes != num_tokens * row_bytes:
            raise CorruptTransferError(
                f"an embedding of {num_tokens} tokens has {num_tokens * row_bytes} bytes, "
                f"not {rows.nbytes}"
            )
        data = np.frombuffer(rows, np.uint8).copy().reshape(num_tokens, row_bytes)
        values = torch.from_numpy(data).view(self._loaded.dtype)
        if not bool(torch.isfinite(values).all()):
            raise CorruptTransferError(f"an embedding of {num_tokens} tokens is not finite")
        return Embedding(values.to(self._device))

    def export_blocks(self, block_ids: Sequence[int], out: memoryview | None = None) -> memoryview:
        """A gather copy of whole blocks, flat, `[len(block_ids), block_bytes]`, in `out`."""
        ids = np.asarray(block_ids, np.int64)
        room = None if out is None else np.frombuffer(out, np.uint8).reshape(len(ids), -1)
        return gather_blocks(self._kv_cache, ids, room).reshape(-1).data

    def import_blocks(self, block_ids: Sequence[int], data: memoryview) -> None:
        """Write whole blocks received from a peer. Raises CorruptTransferError on a wrong size."""
        assert self._kv_layout is not None
        assert 0 not in block_ids, "the null block holds zeros"
        block_bytes = self._kv_layout.block_bytes
        if data.nbytes != len(block_ids) * block_bytes:
            raise CorruptTransferError(
                f"{len(block_ids)} KV blocks have {len(block_ids) * block_bytes} bytes, "
                f"not {data.nbytes}"
            )
        blocks = np.frombuffer(data, np.uint8).reshape(len(block_ids), block_bytes)
        scatter_blocks(self._kv_cache, np.asarray(block_ids, np.int64), blocks)

    def embedding_bytes(self, embedding: Embedding) -> int:
        """Memory that it holds, for the encoder cache's budget."""
        return embedding.num_bytes

    def _logits(self, inputs: StepInputs) -> torch.Tensor:
        """As the head makes them, in its own type."""
        assert self._decoder is not None, "no language model is loaded"
        positions = torch.tensor(inputs.positions, device=self._device)
        rows = torch.tensor(inputs.sample_rows, device=self._device)
        step = self._step_context(inputs)
        return self._decoder.logits(self._embed(inputs), positions, step, rows)

    def _embed(self, inputs: StepInputs) -> torch.Tensor:
        """Token embeddings `[T, D]` with picture rows in place of placeholders."""
        table = self._model.get_input_embeddings()
        ids = torch.tensor(inputs.token_ids, device=self._device)
        # some families number placeholders beyond the vocabulary
        embeds = table(ids.masked_fill(ids >= table.num_embeddings, 0))
        for part in inputs.image_rows:
            rows = part.embedding.rows[part.src_start : part.src_start + part.num_rows]
            embeds[part.dst_start : part.dst_start + part.num_rows] = rows
        return embeds

    def _step_context(self, inputs: StepInputs) -> StepContext:
        layout = self._kv_layout
        assert layout is not None

        def make_plan(window: int | None) -> AttentionPlan:
            return plan_attention(
                inputs.query_start,
                inputs.context_lens,
                inputs.block_table,
                self._kv_cache,
                head_dim=layout.head_dim,
                dtype=self._loaded.dtype,
                spans=inputs.spans,
                window=window,
                num_heads=self._model.config.get_text_config().num_attention_heads,
            )

        slots = torch.tensor(inputs.slot_mapping, device=self._device)
        return StepContext(self._kv_cache, slots, make_plan)


def _kv_layout(loaded: LoadedModel, revision: str, settings: RunnerSettings) -> KVLayout:
    text = loaded.model.config.get_text_config()
    dtype = _dtype_name(loaded.dtype) if settings.kv_dtype == "auto" else settings.kv_dtype
    if dtype not in DTYPES:
        raise ModelConfigError(
            f"--kv-dtype={settings.kv_dtype}: not built yet; choose auto, {', '.join(DTYPES)}"
        )
    if settings.block_size < 1:
        raise ModelConfigError(f"--block-size={settings.block_size}: must be at least 1")
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return KVLayout(
        model_revision=revision,
        num_layers=text.num_hidden_layers,
        num_kv_heads=text.num_key_value_heads,
        head_dim=head_dim,
        block_size=settings.block_size,
        dtype=dtype,
    )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
