"""A model behind `engine.runner.Runner`: numpy and bytes in and out, torch inside.

StepInputs ─▶ embed ─▶ picture rows ─▶ decoder, paged attention ─▶ head ─▶ sampled tokens
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import numpy as np
import torch

from vlm_kernels import AttentionPlan, block_memory, gather_blocks, plan_attention, scatter_blocks
from vlm_worker.core.families import Family
from vlm_worker.core.inputs import StepInputs, StepOutput
from vlm_worker.errors import CorruptTransferError, EngineError
from vlm_worker.model.attention import StepContext
from vlm_worker.model.decoder import Decoder
from vlm_worker.model.gpu.graphs import DecodeGraphs
from vlm_worker.model.gpu.streams import OneStream
from vlm_worker.model.kv_pages import KVPages
from vlm_worker.model.loader import LoadedModel
from vlm_worker.model.memory import dtype_name, make_kv_cache
from vlm_worker.model.sampler import sample
from vlm_worker.model.vision import Embedding, PictureEncoder, is_finite
from vlm_worker.types import EmbedLayout, KVLayout, PreparedImage

T = TypeVar("T")


class ModelRunner:
    """Owns weights, the KV buffer and the device.

    Called by one thread, but for `export_blocks`, `block_memory` of what is only read, and `encode`
    in what `beside` was given.
    """

    def __init__(
        self, loaded: LoadedModel, revision: str, *, kv_layout: KVLayout | None, num_blocks: int
    ) -> None:
        assert loaded.family.spec.embed_levels == 0, "embedding levels have no rows here"
        self._loaded, self._model = loaded, loaded.model
        self._device = loaded.device
        self._kv_layout, self._num_blocks = kv_layout, num_blocks
        self._embed_layout = EmbedLayout(
            revision, loaded.family.hidden_size, 0, dtype_name(loaded.dtype)
        )
        self._kv_cache = torch.empty(0)
        if kv_layout is not None:
            self._kv_cache = make_kv_cache(kv_layout, num_blocks, self._device)
        has_pages = kv_layout is not None and self._device.type == "cpu"
        self._kv_pages = KVPages(self._kv_cache) if has_pages else None
        self._decoder: Decoder | None = None
        if loaded.has_lm:
            head = getattr(self._model, loaded.family.spec.head)
            self._decoder = Decoder(self._model.get_decoder(), head)
        self._graphs: DecodeGraphs | None = None
        self._streams = OneStream()
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
        with self._streams.steps():
            return sample(self._logits(inputs), inputs.sampling)

    @torch.inference_mode()
    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """Run one packed step: float32 `[R, vocabulary]` of the rows in `sample_rows`.

        The caller's own: a replayed step writes over what the one before made.
        """
        with self._streams.steps():
            return self._logits(inputs).to(torch.float32, copy=True)

    @torch.inference_mode()
    def encode(self, images: Sequence[PreparedImage]) -> list[Embedding | Exception]:
        """Encode pictures in one call; a failed item is an exception in its place."""
        if not self._loaded.has_encoder:
            raise EngineError("the stage encoder is not loaded here")
        with self._streams.pictures():
            found = self._pictures.encode(images)
            made = self._streams.made()
        return [
            one if isinstance(one, Exception) else dataclasses.replace(one, made=made)
            for one in found
        ]

    def beside(self, call: Callable[[], T]) -> Future[T] | None:
        """Begin a call that encodes while steps go on; None where it has to be made in turn."""
        return self._streams.beside(call)

    def export_embedding(self, embedding: Embedding) -> memoryview:
        """The rows as bytes, flat, `[num_tokens, row_bytes]`."""
        with self._streams.steps():
            rows = self._taken(embedding).contiguous().view(torch.uint8).cpu()
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
        if not is_finite(values):
            raise CorruptTransferError(f"an embedding of {num_tokens} tokens is not finite")
        with self._streams.steps():
            return Embedding(values.to(self._device))

    def export_blocks(self, block_ids: Sequence[int], out: memoryview | None = None) -> memoryview:
        """A gather copy of whole blocks, flat, `[len(block_ids), block_bytes]`, in `out`."""
        ids = np.asarray(block_ids, np.int64)
        room = None if out is None else np.frombuffer(out, np.uint8).reshape(len(ids), -1)
        with self._streams.steps():
            return gather_blocks(self._kv_cache, ids, room).reshape(-1).data

    def block_memory(
        self, block_ids: Sequence[int], *, to_write: bool = False
    ) -> list[memoryview] | None:
        """The memory of whole blocks, `[block_bytes]` each; None where it is a GPU's."""
        if self._kv_cache.device.type != "cpu":
            return None
        # pages are one thread's, and whoever reads is on another
        ids = self._to_write(block_ids) if to_write else np.asarray(block_ids, np.int64)
        return block_memory(self._kv_cache, ids)

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
        with self._streams.steps():
            scatter_blocks(self._kv_cache, self._to_write(block_ids), blocks)

    def embedding_bytes(self, embedding: Embedding) -> int:
        """Memory that it holds, for the encoder cache's budget."""
        return embedding.num_bytes

    def graphs(self, sizes: Sequence[int], max_model_len: int) -> DecodeGraphs:
        """Of these sizes, for this model and its KV cache; none is captured yet."""
        assert self._kv_layout is not None
        return DecodeGraphs(
            self._forward,
            self._kv_cache,
            self._kv_layout,
            num_heads=self._num_heads,
            sizes=sizes,
            num_position_rows=self.family.num_position_rows,
            max_model_len=max_model_len,
        )

    def use_idle_time(self) -> bool:
        """Have memory of the KV cache at hand that steps would wait for."""
        return self._kv_pages is not None and self._kv_pages.have_more()

    def use_graphs(self, graphs: DecodeGraphs | None) -> None:
        """Replay these from now on, where one serves a step."""
        self._graphs = graphs

    def use_streams(self, streams: OneStream) -> None:
        """Compute on these from now on."""
        self._streams = streams

    @property
    def _num_heads(self) -> int:
        heads: int = self._model.config.get_text_config().num_attention_heads
        return heads

    def _logits(self, inputs: StepInputs) -> torch.Tensor:
        """As the head makes them, in its own type; until the next step."""
        replayed = None if self._graphs is None else self._graphs.logits(inputs)
        if replayed is not None:
            return replayed
        positions = torch.tensor(inputs.positions, device=self._device)
        rows = torch.tensor(inputs.sample_rows, device=self._device)
        return self._decode(self._embed(inputs), positions, self._step_context(inputs), rows)

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, step: StepContext
    ) -> torch.Tensor:
        """Logits `[T, vocabulary]` of tokens `[T]` at `[P, T]`; none of them is of a picture."""
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
        """Token embeddings `[T, D]` with picture rows in place of placeholders."""
        embeds = self._rows(torch.tensor(inputs.token_ids, device=self._device))
        for part in inputs.image_rows:
            rows = self._taken(part.embedding)[part.src_start : part.src_start + part.num_rows]
            embeds[part.dst_start : part.dst_start + part.num_rows] = rows
        return embeds

    def _taken(self, embedding: Embedding) -> torch.Tensor:
        """Its rows, for a step to read."""
        self._streams.take(embedding.rows, embedding.made)
        return embedding.rows

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Of the table. Some families number the placeholder beyond it; no other id may be there.

        `Family.positions` refuses a request with such an id, and a placeholder without a picture.
        """
        table, placeholder = self._model.get_input_embeddings(), self.family.image_token_id
        if placeholder >= table.num_embeddings:
            ids = ids.masked_fill(ids == placeholder, 0)
        rows: torch.Tensor = table(ids)
        return rows

    def _to_write(self, block_ids: Sequence[int]) -> np.ndarray:
        """As an array, of blocks that are about to be written."""
        ids = np.asarray(block_ids, np.int64)
        if self._kv_pages is not None:
            self._kv_pages.use(ids)
        return ids

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
                num_heads=self._num_heads,
            )

        if self._kv_pages is not None:
            self._kv_pages.use(inputs.slot_mapping // layout.block_size)
        slots = torch.tensor(inputs.slot_mapping, device=self._device)
        return StepContext(self._kv_cache, slots, make_plan)
