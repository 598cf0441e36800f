"""Blocks that are written become known to the prefix cache (K3).

prompt    after each chunk: others may wait to share it
answer    when somebody comes who may go on from it, and when the sequence leaves its row: nobody
          looks for it before, so that steps hash no answers
"""

from __future__ import annotations

import numpy as np

from vlm_worker.core.blocks import BlockPool
from vlm_worker.core.plan import Plan
from vlm_worker.core.sequence import Sequence
from vlm_worker.core.table import SequenceTable


def publish_written(
    plan: Plan, table: SequenceTable, pool: BlockPool
) -> list[tuple[Sequence, int, int]]:
    """Publish what a computed plan wrote of prompts, and let those that are complete decode.

    Args:
        plan: computed, its counts added to `table.num_computed`.
        table: where its sequences run.
        pool: where their blocks are.

    Returns:
        The prompts that advanced: sequence, tokens computed, and blocks written by now.
    """
    block_size = pool.block_size
    prefilled = []
    for row, count in zip(
        plan.rows[plan.num_decodes :].tolist(),
        plan.counts[plan.num_decodes :].tolist(),
        strict=True,
    ):
        end, sequence = int(table.num_computed[row]), table.sequences[row]
        assert sequence is not None
        _publish(sequence, table.token_ids[row], pool, start=end - count, end=end)
        complete = end == table.num_tokens[row]
        prefilled.append((sequence, end, pool.blocks_for(end) if complete else end // block_size))
        if complete:
            table.end_prefill(row)
    return prefilled


def publish_answer(sequence: Sequence, pool: BlockPool) -> None:
    """Publish what was written of the answer of a sequence that has left its row."""
    _publish_answer(sequence, sequence.token_ids, pool, end=sequence.num_computed_tokens)


def publish_answers_for(sequence: Sequence, table: SequenceTable, pool: BlockPool) -> None:
    """Publish what was written of running answers that a new sequence may go on from.

    Those are the ones with the same tokens where the first block that it does not find would be.

    Args:
        sequence: with the hashes of its full blocks.
        table: where the answers run.
        pool: where their blocks are.
    """
    start = len(pool.match(sequence.hashes)) * pool.block_size
    end = start + pool.block_size
    if end > sequence.num_tokens:
        return
    wanted, rows = sequence.token_ids[start:end], table.decode_rows
    rows = rows[table.token_ids[rows, start] == wanted[0]]  # the rest is compared for few
    if not len(rows):
        return
    rows = rows[table.num_computed[rows] >= end]
    rows = rows[(table.token_ids[rows, start:end] == wanted).all(axis=1)]
    for running, row in zip(table.members(rows), rows.tolist(), strict=True):
        _publish_answer(running, table.token_ids[row], pool, end=int(table.num_computed[row]))


def _publish_answer(
    sequence: Sequence, token_ids: np.ndarray, pool: BlockPool, *, end: int
) -> None:
    start = sequence.request.num_prompt_tokens
    _publish(sequence, token_ids, pool, start=start, end=end)


def _publish(
    sequence: Sequence, token_ids: np.ndarray, pool: BlockPool, *, start: int, end: int
) -> None:
    """Publish the blocks that the tokens from `start` to `end` completed."""
    block_size = pool.block_size
    sequence.extend_hashes(token_ids, num_tokens=end, block_size=block_size)
    for index in range(start // block_size, end // block_size):
        pool.publish(sequence.blocks[index], sequence.hashes[index])
