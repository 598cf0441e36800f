"""Prunes sequences: new blocks for the rows that remain, old ones released. No torch, no I/O.

prompt computed ─▶ observed_inputs ─▶ [runner: mass] ─▶ prune ─▶ SlotMoves ─▶ [runner: copy]

    blocks of the sequence   0 1 2 3 4      token 9 of block 2 is the first that is dropped
    after                    0 1 a b        0 and 1 stay shared; the copies a and b have no hash

The copies are new blocks while some are available, so that the originals stay in the prefix cache.
If none is, rows move to the front of the blocks that only this sequence uses, which leave the
cache. A block that another sequence uses is never written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from vlm_worker.core.admission_policy import preemption_order
from vlm_worker.core.kv_cache import BlockPool
from vlm_worker.core.persistent_batch import PersistentBatch
from vlm_worker.core.pruning import (
    SlotMoves,
    first_changed_block,
    kept_tokens,
    observed_rows,
    plan_moves,
)
from vlm_worker.core.sequence import Sequence
from vlm_worker.core.step_values import SampleParams, StepInputs


@dataclasses.dataclass(slots=True)
class PruneCounts:
    """Sequences that were pruned, and tokens whose KV they dropped; a pruner writes it."""

    sequences: int = 0
    tokens: int = 0


class Pruner:
    """Prunes the sequences of one batch. Only the scheduler uses it.

    `make_room` preempts a sequence so that the given one gets a block; False if it preempts the
    given one.
    """

    def __init__(
        self, pool: BlockPool, batch: PersistentBatch, make_room: Callable[[Sequence], bool]
    ) -> None:
        self.counts = PruneCounts()
        self._pool, self._batch = pool, batch
        self._make_room = make_room

    @property
    def ready(self) -> list[Sequence]:
        """The sequences that are ready, the one that is preempted last first."""
        return sorted(filter(self.is_ready, self._batch.awaiting_pruning), key=preemption_order)

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether a running sequence awaits pruning, and its prompt is computed."""
        batch = self._batch
        if sequence not in batch.awaiting_pruning:
            return False
        return int(batch.num_computed[sequence.row]) >= _num_prompt(sequence)

    def observed_inputs(self, sequence: Sequence) -> StepInputs:
        """The observed rows of a computed prompt, as a step that samples none.

        Their KV is written: `slot_mapping` is where.
        """
        batch, block_size, row = self._batch, self._batch.block_size, sequence.row
        assert row is not None
        rows = observed_rows(sequence.request)
        index = np.array(rows)
        blocks = batch.block_table[row, index // block_size].astype(np.int64)
        num_blocks = self._pool.most_blocks_for(rows.stop)
        return StepInputs(
            token_ids=batch.token_ids[row, index].astype(np.int64),
            positions=sequence.positions[:, rows.start : rows.stop].astype(np.int64),
            slot_mapping=blocks * block_size + index % block_size,
            query_start=np.array([0, len(rows)], np.int32),
            context_lens=np.array([rows.start], np.int32),
            block_table=batch.block_table[row : row + 1, :num_blocks],
            spans=((),),
            image_rows=(),
            sample_rows=np.zeros(0, np.int64),
            sampling=SampleParams.all_greedy(0),
        )

    def prune(self, sequence: Sequence, mass: np.ndarray) -> SlotMoves | None:
        """Drop the history's text that received least of `mass`, and take the blocks of the rest.

        `mass` is float32 `[num_prompt_tokens]`.

        Returns:
            The rows to copy before the next step, or None if the blocks were missing, so that the
            sequence was preempted.
        """
        batch, pool = self._batch, self._pool
        row = sequence.row
        assert row is not None
        kept = kept_tokens(sequence.request, mass, sequence.kept_permille)
        num_dropped = _num_prompt(sequence) - len(kept)
        kept = np.append(kept, np.arange(_num_prompt(sequence), batch.num_computed[row]))
        first = first_changed_block(kept, block_size=pool.block_size)
        num_rows = batch.num_tokens if batch.prefilling[row] else batch.num_computed
        count = pool.most_blocks_for(int(num_rows[row]) - num_dropped) - first
        targets = self._take(sequence, first, count)
        if targets is None:
            return None
        old = sequence.blocks
        moves = plan_moves(kept, old, targets, first=first, block_size=pool.block_size)
        reused = set(targets)
        pool.release([block for block in old[first:] if block not in reused])
        sequence.blocks = old[:first] + targets
        sequence.num_dropped = num_dropped
        batch.prune(sequence)
        self.counts.sequences += 1
        self.counts.tokens += num_dropped
        return moves

    def _take(self, sequence: Sequence, first: int, count: int) -> list[int] | None:
        """The blocks of the remaining rows: new, or those of the sequence if it alone uses them."""
        pool = self._pool
        while (blocks := pool.take(count)) is None:
            own = sequence.blocks[first : first + count]
            shared = [block for block in own if pool.is_shared(block)]
            fresh = pool.take(len(shared))
            if fresh is not None:
                pool.invalidate([b for b in sequence.blocks[first:] if not pool.is_shared(b)])
                copies = dict(zip(shared, fresh, strict=True))
                return [copies.get(block, block) for block in own]
            if not self._make_room(sequence):
                return None
        return blocks


def _num_prompt(sequence: Sequence) -> int:
    return sequence.request.num_prompt_tokens
