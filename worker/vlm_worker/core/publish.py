"""After a step: blocks that it filled become known to the prefix cache (K3)."""

from __future__ import annotations

from vlm_worker.core.blocks import BlockPool
from vlm_worker.core.plan import Plan
from vlm_worker.core.sequence import Sequence
from vlm_worker.core.table import SequenceTable


def publish_written(
    plan: Plan, table: SequenceTable, pool: BlockPool
) -> list[tuple[Sequence, int, int]]:
    """Publish what a computed plan wrote, and let prompts that are complete decode.

    Args:
        plan: computed, its counts added to `table.num_computed`.
        table: where its sequences run.
        pool: where their blocks are.

    Returns:
        The prompts that advanced: sequence, tokens computed, and blocks written by now.
    """
    block_size = pool.block_size
    decodes = plan.rows[: plan.num_decodes]
    computed = table.num_computed[decodes]
    filled = computed % block_size == 0
    for row, end in zip(decodes[filled].tolist(), computed[filled].tolist(), strict=True):
        _publish_row(row, table, pool, start=end - 1, end=end)
    prefilled = []
    for row, count in zip(
        plan.rows[plan.num_decodes :].tolist(),
        plan.counts[plan.num_decodes :].tolist(),
        strict=True,
    ):
        end = int(table.num_computed[row])
        sequence = _publish_row(row, table, pool, start=end - count, end=end)
        complete = end == table.num_tokens[row]
        prefilled.append((sequence, end, pool.blocks_for(end) if complete else end // block_size))
        if complete:
            table.end_prefill(row)
    return prefilled


def _publish_row(
    row: int, table: SequenceTable, pool: BlockPool, *, start: int, end: int
) -> Sequence:
    """Publish the blocks that the tokens from `start` to `end` completed."""
    sequence, block_size = table.sequences[row], pool.block_size
    assert sequence is not None
    sequence.extend_hashes(table.token_ids[row], num_tokens=end, block_size=block_size)
    for index in range(start // block_size, end // block_size):
        pool.publish(sequence.blocks[index], sequence.hashes[index])
    return sequence
