"""Builds the model's inputs of one step from a plan: decodes first, then chunks of prompts.

plan   rows  [4, 0, 2 | 1]      counts [1, 1, 1 | 5]
ids           x  x  x   x x x x x
"""

from __future__ import annotations

import dataclasses

import numpy as np

from vlm_worker.core.persistent_batch import DecodeColumns, PersistentBatch
from vlm_worker.core.prompt_scores import scored_chunks, scored_rows
from vlm_worker.core.sequence import Sequence
from vlm_worker.core.step_values import (
    ConstrainedRow,
    EditedRow,
    ImageRows,
    SampleParams,
    StepInputs,
    StepPlan,
)


class BatchBuilder:
    """Builds StepInputs into buffers that the next build reuses."""

    def __init__(
        self, batch: PersistentBatch, *, max_num_batched_tokens: int, whole_images: bool
    ) -> None:
        self._batch = batch
        self._whole_images = whole_images
        self._size = max_num_batched_tokens
        self._ids = np.zeros(self._size, np.int64)
        self._slots = np.zeros(self._size, np.int64)
        self._positions: np.ndarray | None = None  # [P, size]; P is known with the first sequence
        self._arange64 = np.arange(self._size + 1, dtype=np.int64)
        self._arange32 = np.arange(self._size + 1, dtype=np.int32)
        self._last: tuple[DecodeColumns, StepInputs] | None = None

    def build(self, plan: StepPlan) -> StepInputs:
        """The input arrays of one step; valid until the next call."""
        if plan.num_decodes == len(plan):
            return self._build_decodes(self._batch.decode_columns_of(plan.decodes))
        batch, num_decodes, num_rows = self._batch, plan.num_decodes, len(plan)
        if self._positions is None:
            first = batch.members(plan.rows[:1])[0]
            self._positions = np.zeros((first.positions.shape[0], self._size), np.int64)
        positions = self._positions
        computed = batch.num_computed.take(plan.rows)
        if num_decodes:
            columns = batch.decode_columns_of(plan.decodes)
            self._ids[:num_decodes] = columns.token_ids
            positions[:, :num_decodes] = columns.positions
            self._slots[:num_decodes] = columns.slots
        image_rows: list[ImageRows] = []
        spans: list[tuple[tuple[int, int], ...]] = [()] * num_rows
        query_start = np.zeros(num_rows + 1, np.int32)
        np.cumsum(plan.counts, out=query_start[1:])
        num_tokens = int(query_start[-1])
        for s in range(num_decodes, num_rows):
            sequence = batch.sequences[plan.rows[s]]
            assert sequence is not None
            start, at = int(computed[s]), int(query_start[s])
            self._fill_chunk(sequence, start, int(plan.counts[s]), at, positions)
            rows = _image_rows_of(sequence, start, int(plan.counts[s]), at)
            _add_places(positions, rows)
            image_rows += rows
            spans[s] = sequence.spans(whole_images=self._whole_images)
        width = int(batch.num_entries.take(plan.rows).max())
        return StepInputs(
            token_ids=self._ids[:num_tokens],
            positions=positions[:, :num_tokens],
            slot_mapping=self._slots[:num_tokens],
            query_start=query_start,
            context_lens=(computed - batch.num_dropped.take(plan.rows)).astype(np.int32),
            block_table=batch.block_table[:, :width][plan.rows],
            spans=tuple(spans),
            image_rows=tuple(image_rows),
            sample_rows=query_start[1:][plan.samples].astype(np.int64) - 1,
            sampling=self._sampling(plan.sampled_rows),
            scored=scored_rows(scored_chunks(batch, plan)),
        )

    def _build_decodes(self, columns: DecodeColumns) -> StepInputs:
        """The inputs of a step of decodes only: views of the columns, cached while they stay."""
        inputs = self._last[1] if self._last and self._last[0] is columns else None
        if inputs is None:
            count = len(columns.rows)
            inputs = StepInputs(
                token_ids=columns.token_ids,
                positions=columns.positions,
                slot_mapping=columns.slots,
                query_start=self._arange32[: count + 1],
                context_lens=columns.context_lens,
                block_table=columns.block_table,
                spans=((),) * count,
                image_rows=(),
                sample_rows=self._arange64[:count],
                sampling=self._sampling(columns.rows, indices=columns.indices),
            )
        if inputs.block_table is not columns.block_table:
            inputs = dataclasses.replace(inputs, block_table=columns.block_table)
        self._last = columns, inputs
        if self._batch.has_edits or self._batch.matchers:
            sampling = dataclasses.replace(
                inputs.sampling,
                edited=self._edited(columns.rows),
                constrained=self._constrained(columns.rows),
            )
            return dataclasses.replace(inputs, sampling=sampling)
        return inputs

    def _fill_chunk(
        self, sequence: Sequence, start: int, count: int, at: int, positions: np.ndarray
    ) -> None:
        batch, block_size, row = self._batch, self._batch.block_size, sequence.row
        index = np.arange(start, start + count)
        self._ids[at : at + count] = batch.token_ids[row, start : start + count]
        prompt = sequence.positions[:, start : start + count]
        positions[:, at : at + prompt.shape[1]] = prompt
        # after the prompt: answer tokens that a preempted sequence recomputes
        positions[:, at + prompt.shape[1] : at + count] = (
            index[prompt.shape[1] :] + sequence.position_delta
        )
        index -= batch.num_dropped[row]
        blocks = batch.block_table[row, index // block_size].astype(np.int64)
        self._slots[at : at + count] = blocks * block_size + index % block_size

    def _sampling(self, rows: np.ndarray, *, indices: np.ndarray | None = None) -> SampleParams:
        """The sampling parameters of rows; `indices` are the tokens' indices in their answers."""
        batch = self._batch
        if indices is None:
            indices = batch.num_tokens.take(rows) - batch.num_prompt.take(rows)
        columns = {name: column.take(rows) for name, column in batch.sampling.items()}
        num_logprobs = batch.num_logprobs.take(rows)
        return SampleParams(
            greedy=not columns["temperature"].any(),
            columns=columns,
            index=indices,
            num_logprobs=num_logprobs if (num_logprobs >= 0).any() else None,
            edited=self._edited(rows),
            constrained=self._constrained(rows),
        )

    def _edited(self, rows: np.ndarray) -> tuple[EditedRow, ...]:
        """The sampled rows whose logits are edited, each with its known tokens."""
        batch, edited = self._batch, []
        if not batch.has_edits:
            return ()
        for at, row in enumerate(rows.tolist()):
            edits = batch.edits_of(row)
            if edits is not None:
                token_ids = batch.token_ids[row, : batch.num_tokens[row]]
                edited.append(EditedRow(at, edits, token_ids, int(batch.num_prompt[row])))
        return tuple(edited)

    def _constrained(self, rows: np.ndarray) -> tuple[ConstrainedRow, ...]:
        """The sampled rows with a grammar, each with its answer so far."""
        batch, constrained = self._batch, []
        if not batch.matchers:
            return ()
        for at, row in enumerate(rows.tolist()):
            matcher = batch.matchers.get(row)
            if matcher is not None:
                answer = batch.token_ids[row, batch.num_prompt[row] : batch.num_tokens[row]]
                constrained.append(ConstrainedRow(at, matcher, answer))
        return tuple(constrained)


def _image_rows_of(sequence: Sequence, start: int, count: int, at: int) -> list[ImageRows]:
    """The embedding rows that the chunk `[start, start + count)` of a sequence reads.

    `at` is the packed position of its first token. The embeddings of all its images are here.
    """
    rows = []
    for number, item in enumerate(sequence.items):
        first, last = max(start, item.offset), min(start + count, item.end)
        if first < last:
            embedding = sequence.embeddings[number]
            assert embedding is not None, "a chunk was planned over an image without an embedding"
            places = None if item.reduction is None else embedding.places
            rows.append(
                ImageRows(embedding, first - item.offset, at + first - start, last - first, places)
            )
    return rows


def _add_places(positions: np.ndarray, image_rows: list[ImageRows]) -> None:
    """Move the tokens of reduced images to the row and column of their cells (M-RoPE alone)."""
    for rows in image_rows:
        if rows.places is not None and len(positions) == 3:
            places = rows.places[rows.src_start : rows.src_start + rows.num_rows]
            positions[1:3, rows.dst_start : rows.dst_start + rows.num_rows] += places.T
