"""Prunes sequences: new blocks for the rows that remain, old ones released. No torch, no I/O.

prompt computed ─▶ observed_inputs ─▶ [runner: mass] ─▶ prune ─▶ SlotMoves ─▶ [runner: copy]

    blocks of the sequence   0 1 2 3 4      token 9 of block 2 is the first that is dropped
    after                    0 1 a b        0 and 1 stay shared; the copies a and b have no hash

The copies are new blocks while some are available, so that the originals stay in the prefix cache.
If none is, rows move to the front of the blocks that only this sequence uses, which leave the
cache. A block that another sequence uses is never written.

Choices of one request have the same prompt. The first is pruned, and the others share its blocks:

    first choice             0 1 a b      prompt up to the middle of b, then its answer
    another one              0 1 a c      c has a copy of the prompt's rows in b
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
    slots_of,
)
from vlm_worker.core.sequence import Sequence
from vlm_worker.core.step_values import SampleParams, StepInputs
from vlm_worker.types import Request


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

    def twin_of(self, sequence: Sequence) -> Sequence | None:
        """A running sequence with the same prompt that was pruned, or None.

        The mass is a function of the prompt, so both keep the same tokens.
        """
        batch, row, request = self._batch, sequence.row, sequence.request
        token_ids = batch.token_ids[row, : request.num_prompt_tokens]
        for other in batch.running:
            if not other.num_dropped or other.kept_permille != sequence.kept_permille:
                continue
            if _prompt_without_tokens(other.request) != _prompt_without_tokens(request):
                continue
            if np.array_equal(batch.token_ids[other.row, : len(token_ids)], token_ids):
                return other
        return None

    def prune(self, sequence: Sequence, mass: np.ndarray | None) -> SlotMoves | None:
        """Drop the history's text that received least of `mass`, and take the blocks of the rest.

        `mass` is float32 `[num_prompt_tokens]`; None if the sequence has a twin.

        Returns:
            The rows to copy before the next step, or None if the blocks were missing, so that the
            sequence was preempted.
        """
        twin = self.twin_of(sequence) if mass is None else None
        if twin is not None:
            return self._share(sequence, twin)
        assert mass is not None, "a sequence without a twin needs its mass"
        kept = kept_tokens(sequence.request, mass, sequence.kept_permille)
        num_dropped = _num_prompt(sequence) - len(kept)
        kept = np.append(kept, self._answer_with_kv(sequence))
        first = first_changed_block(kept, block_size=self._pool.block_size)
        old = sequence.blocks
        targets = self._take(sequence, old[:first], num_dropped)
        if targets is None:
            return None
        self._replace(sequence, old[:first], targets, num_dropped)
        return plan_moves(kept, old, targets, first=first, block_size=self._pool.block_size)

    def _share(self, sequence: Sequence, twin: Sequence) -> SlotMoves | None:
        """Share the full blocks of a twin's pruned prompt; copy its last rows. See `prune`."""
        pool, block_size = self._pool, self._pool.block_size
        old, num_dropped = sequence.blocks, twin.num_dropped
        num_kept = _num_prompt(sequence) - num_dropped
        rows, first = twin.blocks[: pool.most_blocks_for(num_kept)], num_kept // block_size
        pool.take(0, shared=rows)  # the twin may be preempted below
        targets = self._take(sequence, rows[:first], num_dropped)
        if targets is not None:
            self._replace(sequence, rows[:first], targets, num_dropped)
        pool.release(rows)
        if targets is None:
            return None
        answer = self._answer_with_kv(sequence)
        last = np.arange(first * block_size, num_kept)
        sources = slots_of(rows, last, block_size=block_size)
        sources = np.append(sources, slots_of(old, answer, block_size=block_size))
        placed = np.arange(len(sources))
        return SlotMoves(sources, slots_of(targets, placed, block_size=block_size))

    def _answer_with_kv(self, sequence: Sequence) -> np.ndarray:
        """The tokens of the answer that have KV: int64, increasing."""
        return np.arange(_num_prompt(sequence), int(self._batch.num_computed[sequence.row]))

    def _take(self, sequence: Sequence, head: list[int], num_dropped: int) -> list[int] | None:
        """The blocks behind `head`: new, or those of the sequence if it alone uses them.

        It takes a reference to each block of `head`, too.
        """
        batch, pool, row, first = self._batch, self._pool, sequence.row, len(head)
        num_rows = batch.num_tokens if batch.prefilling[row] else batch.num_computed
        count = pool.most_blocks_for(int(num_rows[row]) - num_dropped) - first
        while (blocks := pool.take(count, shared=head)) is None:
            own = sequence.blocks[first : first + count]
            shared = [block for block in own if pool.is_shared(block)]
            fresh = pool.take(len(shared), shared=head)
            if fresh is not None:
                pool.invalidate([b for b in sequence.blocks[first:] if not pool.is_shared(b)])
                copies = dict(zip(shared, fresh, strict=True))
                return [copies.get(block, block) for block in own]
            if not self._make_room(sequence):
                return None
        return blocks

    def _replace(
        self, sequence: Sequence, head: list[int], targets: list[int], num_dropped: int
    ) -> None:
        """Replace the blocks of a sequence; `targets` are those behind `head` (`_take`)."""
        reused = set(targets)
        self._pool.release([block for block in sequence.blocks if block not in reused])
        sequence.blocks, sequence.num_dropped = head + targets, num_dropped
        self._batch.prune(sequence)
        self.counts.sequences += 1
        self.counts.tokens += num_dropped


def _prompt_without_tokens(request: Request) -> tuple[object, ...]:
    """What decides about the KV and the pruning of a prompt, beside its tokens."""
    origin = request.cache_salt, request.adapter
    return request.num_prompt_tokens, request.num_history_tokens, request.items, *origin


def _num_prompt(sequence: Sequence) -> int:
    return sequence.request.num_prompt_tokens
