"""Publishes written KV blocks to the prefix cache (K3).

prompt    after each chunk: waiting sequences may share it
answer    when a new sequence may extend it, and when its sequence leaves its row. No sequence
          looks it up before, so steps hash no answers.
"""

from __future__ import annotations

import numpy as np

from vlm_worker.core.kv_cache import BlockPool
from vlm_worker.core.persistent_batch import PersistentBatch
from vlm_worker.core.sequence import Sequence
from vlm_worker.core.step_values import StepPlan


def publish_written(
    plan: StepPlan, batch: PersistentBatch, pool: BlockPool
) -> list[tuple[Sequence, int, int]]:
    """Publish the prompt blocks that a computed plan filled, and let complete prompts decode.

    Args:
        plan: computed; its counts are added to `batch.num_computed`.
        batch: the batch of its sequences.
        pool: the pool of their blocks.

    Returns:
        The prompts that advanced: sequence, tokens computed, and blocks written so far.
    """
    block_size = pool.block_size
    prefilled = []
    for row, count in zip(
        plan.rows[plan.num_decodes :].tolist(),
        plan.counts[plan.num_decodes :].tolist(),
        strict=True,
    ):
        end, sequence = int(batch.num_computed[row]), batch.sequences[row]
        assert sequence is not None
        _publish(sequence, batch.token_ids[row], pool, start=end - count, end=end)
        complete = end == batch.num_tokens[row]
        prefilled.append((sequence, end, pool.blocks_for(end) if complete else end // block_size))
        if complete:
            batch.end_prefill(row)
    return prefilled


def publish_answer(sequence: Sequence, pool: BlockPool) -> None:
    """Publish the written blocks of the answer of a sequence that left its row."""
    _publish_answer(sequence, sequence.token_ids, pool, end=sequence.num_computed_tokens)


def publish_answers_for(sequence: Sequence, batch: PersistentBatch, pool: BlockPool) -> None:
    """Publish the written blocks of running answers that a new sequence may extend.

    An answer qualifies if it has the same tokens in the first block that `sequence` does not find.

    Args:
        sequence: has the hashes of its full blocks.
        batch: the batch of the answers.
        pool: the pool of their blocks.
    """
    start = len(pool.match(sequence.hashes)) * pool.block_size
    end = start + pool.block_size
    if end > sequence.num_tokens:
        return
    wanted, rows = sequence.token_ids[start:end], batch.decode_rows
    rows = rows[batch.token_ids[rows, start] == wanted[0]]  # cheap filter: few rows remain
    if not len(rows):
        return
    rows = rows[batch.num_computed[rows] >= end]
    rows = rows[(batch.token_ids[rows, start:end] == wanted).all(axis=1)]
    for running, row in zip(batch.members(rows), rows.tolist(), strict=True):
        _publish_answer(running, batch.token_ids[row], pool, end=int(batch.num_computed[row]))


def _publish_answer(
    sequence: Sequence, token_ids: np.ndarray, pool: BlockPool, *, end: int
) -> None:
    start = sequence.request.num_prompt_tokens
    _publish(sequence, token_ids, pool, start=start, end=end)


def _publish(
    sequence: Sequence, token_ids: np.ndarray, pool: BlockPool, *, start: int, end: int
) -> None:
    """Publish the blocks that the tokens `[start, end)` completed."""
    block_size = pool.block_size
    sequence.extend_hashes(token_ids, num_tokens=end, block_size=block_size)
    for index in range(start // block_size, end // block_size):
        pool.publish(sequence.blocks[index], sequence.hashes[index])
