"""From a plan to the arrays that the model reads.

plan   rows  [4, 0, 2 | 1]      counts [1, 1, 1 | 5]      decodes first, then chunks
ids           x  x  x   x x x x x
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vlm_worker.core.decoding import Decoding
from vlm_worker.core.inputs import EditedRow, ImageRows, SampleParams, StepInputs
from vlm_worker.core.plan import Plan
from vlm_worker.core.sequence import Sequence
from vlm_worker.core.table import SequenceTable


class BatchBuilder:
    """Builds StepInputs into buffers that the next build reuses."""

    def __init__(
        self, table: SequenceTable, *, max_num_batched_tokens: int, whole_images: bool
    ) -> None:
        self._table = table
        self._whole_images = whole_images
        self._size = max_num_batched_tokens
        self._ids = np.zeros(self._size, np.int64)
        self._slots = np.zeros(self._size, np.int64)
        self._positions: np.ndarray | None = None  # [P, size]; P is known with the first sequence
        self._arange64 = np.arange(self._size + 1, dtype=np.int64)
        self._arange32 = np.arange(self._size + 1, dtype=np.int32)
        self._known: tuple[Decoding, StepInputs] | None = None

    def build(self, plan: Plan) -> StepInputs:
        """The arrays of one step."""
        if plan.num_decodes == len(plan):
            return self._build_decodes(self._table.decoding_of(plan.decodes))
        table, num_decodes, num_rows = self._table, plan.num_decodes, len(plan)
        positions = self._position_buffer(plan)
        context = table.num_computed.take(plan.rows)
        if num_decodes:
            self._fill_decodes(table.decoding_of(plan.decodes), positions)
        image_rows: list[ImageRows] = []
        spans: list[tuple[tuple[int, int], ...]] = [()] * num_rows
        query_start = np.zeros(num_rows + 1, np.int32)
        np.cumsum(plan.counts, out=query_start[1:])
        num_tokens = int(query_start[-1])
        for s in range(num_decodes, num_rows):
            sequence = table.sequences[plan.rows[s]]
            assert sequence is not None
            start, at = int(context[s]), int(query_start[s])
            self._fill_chunk(sequence, start, int(plan.counts[s]), at, positions)
            image_rows += rows_of_images(sequence, start, int(plan.counts[s]), at)
            if self._whole_images:
                spans[s] = tuple((item.offset, item.end) for item in sequence.items)
        width = int(table.num_blocks.take(plan.rows).max())
        return StepInputs(
            token_ids=self._ids[:num_tokens],
            positions=positions[:, :num_tokens],
            slot_mapping=self._slots[:num_tokens],
            query_start=query_start,
            context_lens=context.astype(np.int32),
            block_table=table.block_table[:, :width][plan.rows],
            spans=tuple(spans),
            image_rows=tuple(image_rows),
            sample_rows=query_start[1:][plan.samples].astype(np.int64) - 1,
            sampling=self._sampling(plan.sampled_rows),
        )

    def _build_decodes(self, decoding: Decoding) -> StepInputs:
        """A step in which all decode: of the columns themselves, and the same while these are."""
        inputs = self._known[1] if self._known and self._known[0] is decoding else None
        if inputs is None:
            count = len(decoding.rows)
            inputs = StepInputs(
                token_ids=decoding.token_ids,
                positions=decoding.positions,
                slot_mapping=decoding.slots,
                query_start=self._arange32[: count + 1],
                context_lens=decoding.context_lens,
                block_table=decoding.block_table,
                spans=((),) * count,
                image_rows=(),
                sample_rows=self._arange64[:count],
                sampling=self._sampling(decoding.rows, indices=decoding.indices),
            )
        if inputs.block_table is not decoding.block_table:
            inputs = dataclasses.replace(inputs, block_table=decoding.block_table)
        self._known = decoding, inputs
        if self._table.logit_edits:
            edited = self._edited(decoding.rows)
            sampling = dataclasses.replace(inputs.sampling, edited=edited)
            return dataclasses.replace(inputs, sampling=sampling)
        return inputs

    def _fill_decodes(self, decoding: Decoding, positions: np.ndarray) -> None:
        count = len(decoding.rows)
        self._ids[:count] = decoding.token_ids
        positions[:, :count] = decoding.positions
        self._slots[:count] = decoding.slots

    def _fill_chunk(
        self, sequence: Sequence, start: int, count: int, at: int, positions: np.ndarray
    ) -> None:
        table, block_size, row = self._table, self._table.block_size, sequence.row
        index = np.arange(start, start + count)
        self._ids[at : at + count] = table.token_ids[row, start : start + count]
        known = sequence.positions[:, start : start + count]
        positions[:, at : at + known.shape[1]] = known
        # past the prompt: answer tokens that a preempted sequence computes again
        positions[:, at + known.shape[1] : at + count] = (
            index[known.shape[1] :] + sequence.position_delta
        )
        blocks = table.block_table[row, index // block_size].astype(np.int64)
        self._slots[at : at + count] = blocks * block_size + index % block_size

    def _position_buffer(self, plan: Plan) -> np.ndarray:
        if self._positions is None:
            sequence = self._table.sequences[plan.rows[0]]
            assert sequence is not None
            self._positions = np.zeros((sequence.positions.shape[0], self._size), np.int64)
        return self._positions

    def _sampling(self, rows: np.ndarray, *, indices: np.ndarray | None = None) -> SampleParams:
        """How rows are sampled; `indices` are the tokens' own in their answers, where known."""
        table = self._table
        if indices is None:
            indices = table.num_tokens.take(rows) - table.num_prompt.take(rows)
        temperature = table.temperature.take(rows)
        num_logprobs = table.num_logprobs.take(rows)
        return SampleParams(
            greedy=not temperature.any(),
            temperature=temperature,
            top_p=table.top_p.take(rows),
            top_k=table.top_k.take(rows),
            min_p=table.min_p.take(rows),
            seed=table.seed.take(rows),
            index=indices,
            num_logprobs=num_logprobs if (num_logprobs >= 0).any() else None,
            edited=self._edited(rows),
        )

    def _edited(self, rows: np.ndarray) -> tuple[EditedRow, ...]:
        """The sampled rows whose logits are edited, each with its tokens so far."""
        table, found = self._table, []
        if not table.logit_edits:
            return ()
        for at, row in enumerate(rows.tolist()):
            edits = table.logit_edits.get(row)
            if edits is not None:
                known = table.token_ids[row, : table.num_tokens[row]]
                found.append(EditedRow(at, edits, known, int(table.num_prompt[row])))
        return tuple(found)


def rows_of_images(sequence: Sequence, start: int, count: int, at: int) -> list[ImageRows]:
    """Which rows of which encoder output the chunk `[start, start + count)` reads.

    Args:
        sequence: whose embeddings are on hand for all images that the chunk touches.
        start: first token of the chunk in the sequence.
        count: tokens of the chunk.
        at: packed position of the chunk's first token.
    """
    rows = []
    for number, item in enumerate(sequence.items):
        first, last = max(start, item.offset), min(start + count, item.end)
        if first < last:
            embedding = sequence.embeddings[number]
            assert embedding is not None, "a chunk was planned over an image that is not on hand"
            rows.append(ImageRows(embedding, first - item.offset, at + first - start, last - first))
    return rows
