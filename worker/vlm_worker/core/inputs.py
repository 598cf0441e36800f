"""What one step computes, as the arrays that the model reads, and what it brings. Plain numpy.

A packed batch: the new tokens of all sequences lie behind each other on one axis of length T.

      sequence 0 (decode)   sequence 1 (a chunk of prefill)     sequence 2 (decode)
      |t0|                  |t1 t2 t3 t4 t5|                     |t6|
      query_start = [0, 1, 6, 7]

The arrays may be views of buffers that the next step reuses: a runner copies what it keeps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from vlm_worker.types import SamplingParams, TokenLogprobs


@dataclasses.dataclass(frozen=True, slots=True)
class ImageRows:
    """Rows of one encoder output that replace token embeddings in this step.

    `embedding[src_start : src_start + num_rows]` goes to packed positions
    `[dst_start, dst_start + num_rows)`.
    """

    embedding: Any
    src_start: int
    dst_start: int
    num_rows: int


@dataclasses.dataclass(frozen=True, slots=True)
class LogitEdits:
    """What a request wants done to its logits before a token is chosen, as `SamplingParams` says.

    `bias_ids` int64 and `bias_values` float32, both [B].
    """

    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    bias_ids: np.ndarray
    bias_values: np.ndarray

    @classmethod
    def of(cls, sampling: SamplingParams) -> LogitEdits | None:
        """Those of a request; None where it leaves logits as they are."""
        penalties = (
            sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty
        )  # fmt: skip
        if penalties == (0.0, 0.0, 1.0) and not sampling.logit_bias:
            return None
        ids = [token_id for token_id, _ in sampling.logit_bias]
        values = [bias for _, bias in sampling.logit_bias]
        return cls(*penalties, np.array(ids, np.int64), np.array(values, np.float32))


@dataclasses.dataclass(frozen=True, slots=True)
class EditedRow:
    """One of the R rows whose logits are edited.

    `token_ids` is a view, int32: the prompt, `num_prompt` tokens, and the answer so far, what
    earlier attempts delivered included.
    """

    row: int
    edits: LogitEdits
    token_ids: np.ndarray
    num_prompt: int


@dataclasses.dataclass(frozen=True, slots=True)
class SampleParams:
    """Sampling of the rows in `StepInputs.sample_rows`; arrays of the same length R.

    `greedy` is True where every row is greedy, the fast path. `index` is the index of the token in
    its answer: the generator of a row is a function of (seed, index). `num_logprobs` is None where
    no row wants any, else -1 for those that do not. `edited` are the rows whose logits are edited.
    """

    greedy: bool
    temperature: np.ndarray  # [R] float32
    top_p: np.ndarray  # [R] float32
    top_k: np.ndarray  # [R] int32
    min_p: np.ndarray  # [R] float32
    seed: np.ndarray  # [R] uint64
    index: np.ndarray  # [R] int64
    num_logprobs: np.ndarray | None = None  # [R] int64
    edited: tuple[EditedRow, ...] = ()

    @classmethod
    def all_greedy(cls, num_rows: int) -> SampleParams:
        """Rows that take the likeliest token, each the first of its answer."""
        return cls(
            greedy=True,
            temperature=np.zeros(num_rows, np.float32),
            top_p=np.ones(num_rows, np.float32),
            top_k=np.zeros(num_rows, np.int32),
            min_p=np.zeros(num_rows, np.float32),
            seed=np.zeros(num_rows, np.uint64),
            index=np.zeros(num_rows, np.int64),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class StepInputs:
    """One step. T new tokens of S sequences; R of them are sampled.

    Attributes:
        token_ids: [T] int64; placeholders included (a runner masks ids beyond its vocabulary).
        positions: [P, T] int64; P is 1, or 3 for M-RoPE.
        slot_mapping: [T] int64; `block * block_size + offset` where each new token's KV goes.
        query_start: [S + 1] int32; s owns packed tokens query_start[s] : query_start[s + 1].
        context_lens: [S] int32; tokens of s whose KV was written by earlier steps.
        block_table: [S, B] int32; the blocks of s, padded with the null block 0.
        spans: per sequence, the [start, end) token ranges of its images, absolute in the sequence,
            for families that attend in both directions inside an image; empty tuples elsewhere.
        image_rows: encoder rows that this step needs.
        sample_rows: [R] int64; packed positions whose logits are sampled.
        sampling: how.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    query_start: np.ndarray
    context_lens: np.ndarray
    block_table: np.ndarray
    spans: tuple[tuple[tuple[int, int], ...], ...]
    image_rows: tuple[ImageRows, ...]
    sample_rows: np.ndarray
    sampling: SampleParams


NOT_FINITE = -1
"""Stands for the token of a row whose logits hold NaN or infinity."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step brought, for each of its R sampled rows.

    Attributes:
        token_ids: [R] int64; `NOT_FINITE` fails that sequence, the others of the step go on.
        logprobs: [R] float32, of these tokens; None where no row wants any.
        top_ids, top_logprobs: [R, K] int64 and float32, the best first; K is what the row that
            wants most wants.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    def has_shape(self, num_rows: int) -> bool:
        """Whether every array is about so many rows."""
        arrays = (self.token_ids, self.logprobs, self.top_ids, self.top_logprobs)
        given = [array for array in arrays if array is not None]
        return self.token_ids.ndim == 1 and all(len(array) == num_rows for array in given)

    @property
    def finite(self) -> StepOutput:
        """Of the rows that could be sampled alone."""
        kept = self.token_ids != NOT_FINITE
        if kept.all():
            return self
        return StepOutput(
            self.token_ids[kept],
            None if self.logprobs is None else self.logprobs[kept],
            None if self.top_ids is None else self.top_ids[kept],
            None if self.top_logprobs is None else self.top_logprobs[kept],
        )

    def logprobs_of(self, row: int, num_top: int) -> TokenLogprobs:
        """One row's, with its `num_top` best; only where the step was asked for them."""
        assert self.logprobs is not None
        assert self.top_ids is not None
        assert self.top_logprobs is not None
        ids, values = self.top_ids[row, :num_top], self.top_logprobs[row, :num_top]
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return TokenLogprobs(float(self.logprobs[row]), top)
