"""What one step computes, as the arrays that the model reads. Plain numpy, filled by the scheduler.

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
class SampleParams:
    """Sampling of the rows in `StepInputs.sample_rows`; arrays of the same length R.

    `greedy` is True where every row is greedy, the fast path. `index` is the index of the token in
    its answer: the generator of a row is a function of (seed, index).
    """

    greedy: bool
    temperature: np.ndarray  # [R] float32
    top_p: np.ndarray  # [R] float32
    top_k: np.ndarray  # [R] int32
    seed: np.ndarray  # [R] uint64
    index: np.ndarray  # [R] int64


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
