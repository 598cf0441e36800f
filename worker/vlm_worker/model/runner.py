"""Implements `engine.runner.Runner` with torch; its interface has only numpy and bytes.

StepInputs ─▶ embed ─▶ image rows ─▶ decoder, paged attention ─▶ head ─▶ sampled tokens
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, TypeVar

import numpy as np
import torch

from vlm_kernels import (
    AttentionPlan,
    block_memory,
    gather_blocks,
    move_rows,
    plan_attention,
    sample_tokens,
    scatter_blocks,
)
from vlm_worker.attends import Attends
from vlm_worker.core.block_kinds import BlockKinds
from vlm_worker.core.step_values import (
    ImageRows,
    SampleParams,
    ScoredRows,
    StepInputs,
    StepOutput,
)
from vlm_worker.core.window_cache import WindowCache
from vlm_worker.errors import CorruptTransferError, EngineError
from vlm_worker.model.attention import Observation, StepContext
from vlm_worker.model.generic import GenericEncoder
from vlm_worker.model.gpu.graphs import DecodeGraphs
from vlm_worker.model.gpu.streams import SingleStream
from vlm_worker.model.layers import Decoder
from vlm_worker.model.loader import LoadedModel
from vlm_worker.model.memory import (
    KVPrefault,
    WorkSizes,
    dtype_name,
    make_kv_cache,
    work_bytes,
)
from vlm_worker.model.prompt_scores import score_rows
from vlm_worker.model.reduce import Rankings, merge, rank
from vlm_worker.model.vision import Embedding, ImageEncoder, is_finite
from vlm_worker.reduction import Method
from vlm_worker.types import PLACE_BYTES, EmbedLayout, KVLayout, PreparedImage, Stage
from vlm_worker.wire.buffers import HostRegions


def sample(logits_RV: torch.Tensor, params: SampleParams) -> StepOutput:
    """Sample a token per row, with logprobs for the rows that request them.

    `logits_RV` is in the dtype of the head, R rows over V tokens; not modified.
    """
    return StepOutput(*sample_tokens(logits_RV, params))


def _needs_scores(image: PreparedImage) -> bool:
    return image.reduction is not None and image.reduction.method is Method.ZIP


T = TypeVar("T")

WINDOW_TTL_SECONDS: Final = 600.0
"""As the default of `--embedding-ttl-seconds`: then a window's uses count half."""


class ModelRunner:
    """Owns the weights, the KV buffer and the device.

    One thread calls it. Exceptions: `export_blocks`, `block_memory` without `to_write`, and
    `encode` within a call that was passed to `encode_async`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        revision: str,
        *,
        kv_layout: KVLayout | None,
        num_blocks: int,
        window_cache_bytes: int = 0,
    ) -> None:
        self._loaded, self._model = loaded, loaded.model
        self.device, self.family = loaded.device, loaded.family
        self.weights_bytes = loaded.weights_bytes
        self.activation_scales = loaded.activation_scales
        self.kv_layout, self.num_blocks = kv_layout, num_blocks
        family = self.family
        self.embed_layout = EmbedLayout(
            revision, family.hidden_size, family.num_levels, dtype_name(loaded.dtype)
        )
        self.vocab_size: int = self._model.config.get_text_config().vocab_size
        self._kv_cache = torch.empty(0)
        if kv_layout is not None:
            self._kv_cache = make_kv_cache(kv_layout, num_blocks, self.device)
        has_pages = kv_layout is not None and self.device.type == "cpu"
        self._kv_pages = KVPrefault(self._kv_cache) if has_pages else None
        self._decoder: Decoder | None = None
        self._generic = loaded.generic
        self.verification = loaded.verification
        if loaded.has_lm and self._generic is None:
            head = getattr(self._model, self.family.spec.head)
            self._decoder = Decoder(self._model.get_decoder(), head)
        self.graphs: DecodeGraphs | None = None
        self.streams = SingleStream()
        self.windows: WindowCache | None = None
        if window_cache_bytes and loaded.has_encoder:
            self.windows = WindowCache(max_bytes=window_cache_bytes, ttl_seconds=WINDOW_TTL_SECONDS)
        self._images: ImageEncoder | GenericEncoder = ImageEncoder(
            self._model,
            family.processor,
            device=self.device,
            windows=self.windows,
            fingerprint=self.embed_layout.fingerprint,
        )
        if not family.spec.is_listed:
            self._images = GenericEncoder(self._model, family, device=self.device)

    def work_bytes(self, sizes: WorkSizes) -> int:
        """Estimate the temporary host memory of one step and one encoder call, in bytes.

        The cache of windows is in it. With a GPU, only the patches use host memory.
        """
        loaded, on_host = self._loaded, self.device.type == "cpu"
        cached = self.windows.max_bytes if self.windows is not None and on_host else 0
        return cached + work_bytes(
            self._model.config,
            self.family,
            loaded.stages if on_host else loaded.stages & {Stage.ENCODER},
            sizes,
            element_bytes=loaded.dtype.itemsize if on_host else 0,
        )

    @torch.inference_mode()
    def execute(self, inputs: StepInputs) -> StepOutput:
        """Run one packed step, sample its R rows, and score those of prompts."""
        with self.streams.steps():
            if inputs.scored is not None:
                return self._scored(inputs, inputs.scored)
            return sample(self._logits(inputs), inputs.sampling)

    @torch.inference_mode()
    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """Run one packed step; returns float32 `[R, vocabulary]` of the rows in `sample_rows`.

        The result is a copy: a replayed graph overwrites the logits of the step before it.
        """
        with self.streams.steps():
            return self._logits(inputs).to(torch.float32, copy=True)

    @torch.inference_mode()
    def encode(self, images: Sequence[PreparedImage]) -> list[Embedding | Exception]:
        """Encode images in one call; the result of a failed image is an exception.

        Raises:
            EngineError: the stage encoder is not loaded.
        """
        if not self._loaded.has_encoder:
            raise EngineError("the stage encoder is not loaded here")
        with self.streams.images():
            results = self._encode(images)
            made = self.streams.made()
        return [
            result if isinstance(result, Exception) else dataclasses.replace(result, made=made)
            for result in results
        ]

    def encode_async(self, call: Callable[[], T]) -> Future[T] | None:
        """Start `call` overlapped with steps; None if the caller must run it between steps."""
        return self.streams.encode_async(call)

    def reduce_embedding(self, embedding: Embedding, image: PreparedImage) -> Embedding | None:
        """The kept rows of a whole image; None if the image must be encoded again.

        That is so for ZIP if the embedding has no scores, and for ARRCOC if neither the embedding
        nor `image` has the relevance of the pixels.
        """
        assert image.is_reduced_after
        assert image.reduction is not None
        embedding.rankings.learn(image)
        if not embedding.rankings.can(image.reduction):
            return None
        with self.streams.steps():
            rows = self._wait_for(embedding)
            groups = rank(rows, image.cells, image.reduction, embedding.rankings)
            return Embedding(merge(rows, groups), places=groups.places)

    def export_embedding(self, embedding: Embedding) -> memoryview:
        """The rows as flat bytes, `[num_tokens, row_bytes]`; with places, each before its own."""
        with self.streams.steps():
            rows = self._wait_for(embedding).contiguous().view(torch.uint8).cpu().numpy()
        if embedding.places is not None:
            places = np.ascontiguousarray(embedding.places, "<i2").view(np.uint8)
            rows = np.concatenate([rows.reshape(len(places), -1), places], axis=1)
        return rows.reshape(-1).data

    def import_embedding(self, rows: memoryview, num_tokens: int) -> Embedding:
        """Copy rows received from an encoder, with or without places, to the device.

        Raises:
            CorruptTransferError: the size is wrong, or a value is not finite. Such a value would
                reach KV that other requests share before the first logits show it.
        """
        row_bytes = self.embed_layout.row_bytes
        has_places = rows.nbytes == num_tokens * (row_bytes + PLACE_BYTES)
        if rows.nbytes != num_tokens * row_bytes and not has_places:
            raise CorruptTransferError(
                f"an embedding of {num_tokens} tokens has {num_tokens * row_bytes} bytes, "
                f"not {rows.nbytes}"
            )
        data = np.frombuffer(rows, np.uint8).reshape(num_tokens, -1)
        places = data[:, row_bytes:].copy().view("<i2") if has_places else None
        values = torch.from_numpy(data[:, :row_bytes].copy()).view(self._loaded.dtype)
        if not is_finite(values):
            raise CorruptTransferError(f"an embedding of {num_tokens} tokens is not finite")
        with self.streams.steps():
            return Embedding(values.to(self.device), places=places)

    def export_scores(self, embedding: Embedding) -> memoryview:
        """The scores of a whole image as bytes, float32 [T]; empty if it has none."""
        scores = embedding.rankings.scores
        if scores is None:
            return memoryview(b"")
        with self.streams.steps():
            self._wait_for(embedding)
            return scores.to("cpu", torch.float32).contiguous().view(torch.uint8).numpy().data

    def with_scores(self, embedding: Embedding, scores: memoryview) -> Embedding:
        """The embedding with the scores of its export; without any, itself.

        Raises:
            CorruptTransferError: there is not one score per row, or one is not finite.
        """
        if not scores.nbytes:
            return embedding
        values = torch.from_numpy(np.frombuffer(scores, np.float32).copy())
        if len(values) != len(embedding.rows) or not is_finite(values):
            raise CorruptTransferError(
                f"{len(embedding.rows)} rows need as many finite scores, not {len(values)}"
            )
        with self.streams.steps():
            return dataclasses.replace(embedding, rankings=Rankings(scores=values.to(self.device)))

    def export_blocks(self, block_ids: Sequence[int], out: memoryview | None = None) -> memoryview:
        """Copy whole blocks to `out`, or to new memory: flat bytes `[num_ids, block_bytes]`."""
        ids = np.asarray(block_ids, np.int64)
        target = None if out is None else np.frombuffer(out, np.uint8).reshape(len(ids), -1)
        with self.streams.steps():
            return gather_blocks(self._kv_cache, ids, target).reshape(-1).data

    def block_memory(
        self, block_ids: Sequence[int], *, to_write: bool = False
    ) -> HostRegions | None:
        """Views of whole blocks, `[block_bytes]` each; None if the cache is on a GPU.

        Only the runner's thread may call it with `to_write`: the caller writes the blocks.
        """
        if self._kv_cache.device.type != "cpu":
            return None
        # readers are on another thread, and only one thread may use `_kv_pages`
        ids = self._to_write(block_ids) if to_write else np.asarray(block_ids, np.int64)
        return HostRegions(block_memory(self._kv_cache, ids))

    def import_blocks(self, block_ids: Sequence[int], data: memoryview) -> None:
        """Write whole blocks received from a peer; raises CorruptTransferError on a wrong size."""
        assert self.kv_layout is not None
        assert 0 not in block_ids, "the null block holds zeros"
        block_bytes = self.kv_layout.block_bytes
        if data.nbytes != len(block_ids) * block_bytes:
            raise CorruptTransferError(
                f"{len(block_ids)} KV blocks have {len(block_ids) * block_bytes} bytes, "
                f"not {data.nbytes}"
            )
        blocks = np.frombuffer(data, np.uint8).reshape(len(block_ids), block_bytes)
        with self.streams.steps():
            scatter_blocks(self._kv_cache, self._to_write(block_ids), blocks)

    @property
    def pruning_problem(self) -> str | None:
        """Why the KV of this model cannot be pruned; None if it can.

        A window counts slots, which pruning changes.
        """
        if not self.family.spec.is_listed:
            return f"{self.family.model_type} is of an unlisted family, whose KV is not pruned"
        config = self._model.config.get_text_config()
        types = getattr(config, "layer_types", None) or ()
        if any(kind != "full_attention" for kind in types):
            return "this model has layers with a sliding window, whose KV is not pruned"
        if getattr(config, "attn_logit_softcapping", None) is not None:
            return "this model bounds its scores, and attention is not summed for it"
        return None

    @torch.inference_mode()
    def attention_mass(self, inputs: StepInputs) -> np.ndarray:
        """The attention that the tokens of one sequence receive from the rows of `inputs`.

        Float32 `[context_lens[0] + rows]`, summed over rows, layers and heads. The rows' KV is in
        the cache, and they are text.
        """
        assert self._decoder is not None, "no language model is loaded"
        num_tokens = int(inputs.context_lens[0]) + len(inputs.token_ids)
        with self.streams.steps():
            step = self._step_context(inputs)
            mass = torch.zeros(num_tokens, device=self.device)
            step.observation = Observation(mass, np.ascontiguousarray(inputs.block_table[0]))
            positions = torch.tensor(inputs.positions, device=self.device)
            self._decoder.observe(self._embed(inputs), positions, step)
            return mass.cpu().numpy()

    def move_rows(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy rows of all layers within the KV cache, in order: int64 slots `[R]` each."""
        assert self.kv_layout is not None
        self._to_write(np.unique(targets // self.kv_layout.block_size).tolist())
        with self.streams.steps():
            move_rows(self._kv_cache, sources, targets, head_dim=self.kv_layout.head_dim)

    def embedding_bytes(self, embedding: Embedding) -> int:
        return embedding.num_bytes

    def make_graphs(self, sizes: Sequence[int], max_model_len: int) -> DecodeGraphs:
        """Make decode graphs of these sizes for this model and KV cache; none is captured yet."""
        assert self.kv_layout is not None
        return DecodeGraphs(
            self._forward,
            self._kv_cache,
            self.kv_layout,
            num_heads=self._num_heads,
            sizes=sizes,
            num_position_rows=self.family.num_position_rows,
            max_model_len=max_model_len,
        )

    def prefault(self) -> bool:
        """Prefault the next pages of the KV cache; False if there is nothing to do."""
        return self._kv_pages is not None and self._kv_pages.prefault_next()

    def _encode(self, images: Sequence[PreparedImage]) -> list[Embedding | Exception]:
        """Encode images in one call; if windows are cached, those with scores in one of their own.

        A call with scores does not use the cache, so its rows differ by rounding. An image's rows
        must not depend on what the others of its batch need.
        """
        scored = list(map(_needs_scores, images))
        if self.windows is None or len(set(scored)) < 2:
            return self._images.encode(images, scored=any(scored))
        calls = {
            asked: iter(
                self._images.encode(
                    [one for one, needs in zip(images, scored, strict=True) if needs is asked],
                    scored=asked,
                )
            )
            for asked in (False, True)
        }
        return [next(calls[asked]) for asked in scored]

    @property
    def _num_heads(self) -> int:
        heads: int = self._model.config.get_text_config().num_attention_heads
        return heads

    def _logits(self, inputs: StepInputs) -> torch.Tensor:
        """Logits `[R, vocabulary]` in the dtype of the head; valid until the next step."""
        replayed = None if self.graphs is None else self.graphs.logits(inputs)
        if replayed is not None:
            return replayed
        positions = torch.tensor(inputs.positions, device=self.device)
        rows = torch.tensor(inputs.sample_rows, device=self.device)
        if self._generic is not None:
            return self._generic.logits(*self._generic_inputs(inputs, positions), rows)
        return self._decode(self._embed(inputs), positions, self._step_context(inputs), rows)

    def _generic_inputs(
        self, inputs: StepInputs, positions: torch.Tensor
    ) -> tuple[torch.Tensor, list[tuple[int, torch.Tensor]], torch.Tensor, StepContext]:
        """The arguments of `GenericModel.logits`, without the sampled tokens."""
        ids = torch.tensor(inputs.token_ids, device=self.device)
        images = [(part.dst_start, self._part_rows(part)) for part in inputs.image_rows]
        return ids, images, positions, self._step_context(inputs)

    def _scored(self, inputs: StepInputs, scored: ScoredRows) -> StepOutput:
        """Run a step that scores prompts: it needs the hidden states of more rows than R."""
        positions = torch.tensor(inputs.positions, device=self.device)
        rows = torch.tensor(inputs.sample_rows, device=self.device)
        if self._generic is not None:
            logits, of_tokens = self._generic.logits_and_head(
                *self._generic_inputs(inputs, positions), rows
            )
            output = sample(logits, inputs.sampling)
            every = torch.arange(len(inputs.token_ids), device=self.device)
            scores = score_rows(every, of_tokens, scored, vocab_size=self.vocab_size)
            return dataclasses.replace(output, scores=scores)
        assert self._decoder is not None, "no language model is loaded"
        step = self._step_context(inputs)
        hidden = self._decoder.hidden(self._embed(inputs), positions, step)
        output = sample(self._decoder.head(hidden[rows]), inputs.sampling)
        scores = score_rows(hidden, self._decoder.head, scored, vocab_size=self.vocab_size)
        return dataclasses.replace(output, scores=scores)

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        """Logits `[T, vocabulary]` of text tokens `[T]` at positions `[P, T]`."""
        return self._decode(self._rows(ids), positions, step)

    def _decode(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        step: StepContext,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert self._decoder is not None, "no language model is loaded"
        return self._decoder.logits(embeds, positions, step, rows)

    def _embed(self, inputs: StepInputs) -> torch.Tensor:
        """Token embeddings `[T, D]` with image rows in place of placeholders."""
        embeds = self._rows(torch.tensor(inputs.token_ids, device=self.device))
        for part in inputs.image_rows:
            embeds[part.dst_start : part.dst_start + part.num_rows] = self._part_rows(part)
        return embeds

    def _part_rows(self, part: ImageRows) -> torch.Tensor:
        return self._wait_for(part.embedding)[part.src_start : part.src_start + part.num_rows]

    def _wait_for(self, embedding: Embedding) -> torch.Tensor:
        """Make the stream of steps wait for an embedding; returns its rows."""
        self.streams.take(embedding.rows, embedding.made)
        return embedding.rows

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `[T, D]` of the embedding table.

        In some families, the id of the placeholder is beyond the table; its row is replaced later.
        `Family.positions` refuses other ids beyond the table, and placeholders without an image.
        """
        table, placeholder = self._model.get_input_embeddings(), self.family.image_token_id
        if placeholder >= table.num_embeddings:
            ids = ids.masked_fill(ids == placeholder, 0)
        rows: torch.Tensor = table(ids)
        return rows

    def _to_write(self, block_ids: Sequence[int]) -> np.ndarray:
        """Block ids as an int64 array; marks the blocks as about to be written."""
        ids = np.asarray(block_ids, np.int64)
        if self._kv_pages is not None:
            self._kv_pages.use(ids)
        return ids

    def _step_context(self, inputs: StepInputs) -> StepContext:
        layout = self.kv_layout
        assert layout is not None

        attends = self.family.spec.attends

        def make_plan(window: int | None) -> AttentionPlan:
            in_all_layers = attends is not Attends.IMAGES_SLIDING
            return plan_attention(
                inputs.query_start,
                inputs.context_lens,
                inputs.block_table,
                self._kv_cache,
                head_dim=layout.head_dim,
                dtype=self._loaded.dtype,
                spans=inputs.spans if in_all_layers or window is not None else (),
                window=window,
                spans_exceed_window=attends is Attends.PREFIX,
                num_heads=self._num_heads,
            )

        if self._kv_pages is not None:
            slots_per_block = layout.block_size * BlockKinds.of_layout(layout).entries_per_block
            self._kv_pages.use(inputs.slot_mapping // slots_per_block)
        slots = torch.tensor(inputs.slot_mapping, device=self.device)
        return StepContext(self._kv_cache, slots, make_plan)
