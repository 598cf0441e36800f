"""Decides which sequences the next step runs, and their tokens. Pure: no torch, no clock, no I/O.

    step k:  schedule(now) -> SchedulerOutput -> [runner] -> update(plan, tokens) -> StepOutcome

One step mixes prefill and decode: each sequence gets `count <= remaining` tokens of one token
budget. The order:

    1  sequences with complete KV (received or adopted) enter: only finishing frees the KV
    2  decoding sequences get one token each; if blocks lack, the lowest priority is preempted
    3  running prompts get chunks, by priority and age; a chunk may end inside an available image
    4  waiting sequences enter if the whole prompt fits; if not, a few others may bypass them

`admission` implements 1 and 4, and decides which sequences may request embeddings.
`admission_policy` orders the waiting sequences.

Written KV blocks are published to the prefix cache (K3):

    prompt    after each chunk: waiting sequences may share it
    answer    when a new sequence may extend it, and when its sequence leaves its row. No sequence
              looks it up before, so steps hash no answers. The answer of a pruned sequence is not
              published: its KV depends on the tokens that were dropped.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from vlm_worker.core.admission import AdmissionController
from vlm_worker.core.admission_policy import preemption_order
from vlm_worker.core.chunks import TokenBudget
from vlm_worker.core.kv_cache import BlockPool, extend_hash_chain, is_visual_block
from vlm_worker.core.persistent_batch import PersistentBatch
from vlm_worker.core.pruner import Pruner
from vlm_worker.core.pruning import SlotMoves
from vlm_worker.core.sequence import Sequence, Status
from vlm_worker.core.step_values import SchedulerOutput, StepOutcome, StepPlan
from vlm_worker.settings import AdmissionSettings
from vlm_worker.types import FinishReason


class Scheduler:
    """Continuous batching over one block pool. The only writer of sequences, batch and pool."""

    def __init__(
        self,
        pool: BlockPool,
        batch: PersistentBatch,
        *,
        max_num_batched_tokens: int,
        watermark_blocks: int = 0,
        max_pending_blocks: int | None = None,
        whole_images: bool = False,
        long_prefill_tokens: int | None = None,
        settings: AdmissionSettings | None = None,
    ) -> None:
        self.pool = pool
        self.batch = batch
        self.admission = AdmissionController(
            pool,
            batch,
            watermark_blocks=watermark_blocks,
            max_pending_blocks=pool.capacity if max_pending_blocks is None else max_pending_blocks,
            settings=settings or AdmissionSettings(),
        )
        self.pending_transfers = self.admission.pending_transfers
        self.waiting = self.admission.waiting
        self.num_preemptions = 0
        self.pruner = Pruner(pool, batch, self._make_room)
        self._pruning_preempted: list[Sequence] = []
        self._max_num_batched_tokens = max_num_batched_tokens
        self._whole_images = whole_images
        self._long_prefill_tokens = long_prefill_tokens
        self._last_plan: StepPlan | None = None

    # ---- entering and leaving --------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it runs when budget, rows, blocks and embeddings allow."""
        self.look_up(sequence)
        self.waiting.add(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Let a HELD or RECEIVING sequence with complete KV decode when a row is free."""
        assert sequence.num_tokens == sequence.num_computed_tokens + 1
        self.admission.ready[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """End a sequence of any status, and free its row, blocks and reservations."""
        if sequence.status is Status.RUNNING:
            self._leave(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        else:
            self.admission.ready.pop(sequence, None)
        self.admission.discard(sequence)
        self.pending_transfers.discard(sequence)
        self.pool.unreserve(sequence.reserved_blocks)
        self.pool.release(sequence.blocks)
        sequence.reserved_blocks, sequence.blocks = 0, []
        sequence.move(Status.FINISHED)

    def look_up(self, sequence: Sequence) -> int:
        """Hash a new sequence, publish the running answers that it may extend, match it."""
        self._extend_hashes(sequence, sequence.token_ids, num_tokens=sequence.num_tokens)
        self._publish_answers_for(sequence)
        return self.num_cached_tokens(sequence)

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Tokens that a prefix hit would cover now; never the last one (K4). Changes nothing."""
        num_blocks = len(self.admission.match(sequence))
        return self.pool.kinds.of(sequence).num_tokens(num_blocks)

    # ---- pruning, between steps ------------------------------------------------------------------

    def sequences_to_prune(self) -> list[Sequence]:
        """The sequences to prune before the next step; those with complete KV enter first."""
        self.admission.admit_ready(to_prune=True)
        return self.pruner.ready

    def prune(
        self, sequence: Sequence, mass: np.ndarray | None
    ) -> tuple[SlotMoves | None, list[Sequence]]:
        """Prune one of `sequences_to_prune` that still runs; see `Pruner.prune`.

        Returns:
            The rows to copy before the next step, or None; and the sequences that it preempted.
        """
        moves = self.pruner.prune(sequence, mass)
        preempted, self._pruning_preempted = self._pruning_preempted, []
        return moves, preempted

    # ---- a step ----------------------------------------------------------------------------------

    def schedule(self, *, now: float) -> SchedulerOutput:
        """Choose the work of the next step, and take its blocks.

        `now` is on the clock of `Sequence.arrived_at`, and never less than in the last call.
        """
        self.admission.admit_ready(to_prune=False)
        preempted: list[Sequence] = []
        decodes = self._grow(preempted)
        token_budget = TokenBudget(
            self._max_num_batched_tokens - len(decodes),
            cap=self._long_prefill_tokens,
            whole_images=self._whole_images,
            kinds=self.pool.kinds,
        )
        for prompt in sorted(self.batch.prompts, key=preemption_order):
            start = int(self.batch.num_computed[prompt.row])
            count = token_budget.next_chunk(prompt, start)
            if count:
                token_budget.take(prompt, start, count)
        admitted: list[Sequence] = []
        blocked_on_kv: list[Sequence] = []
        if not preempted:
            admitted, blocked_on_kv = self.admission.admit(token_budget, now=now)
        blocked_on_kv += self.admission.revoke_soft_reservations()
        token_budget.distribute_rest()
        stalled = [
            (sequence, start)
            for sequence, start in token_budget.blocked_on_embedding
            if sequence.can_pin_embeddings
        ]
        assert token_budget.remaining >= 0, "more is planned than the budget has"
        plan = self._plan(decodes, token_budget.chunks)
        return SchedulerOutput(plan, admitted, preempted, stalled, blocked_on_kv)

    def update(
        self, plan: StepPlan, sampled: np.ndarray, *, failed: Collection[int] = ()
    ) -> StepOutcome:
        """Record a step. `sampled` is int64 [R], one token per sampled row, or `NOT_FINITE`.

        The rows `failed` of prompts fail too; if they are sampled, their token is `NOT_FINITE`.
        """
        outcome = StepOutcome(token_ids=sampled.tolist())
        if failed or min(outcome.token_ids, default=0) < 0:
            failed_rows = np.union1d(plan.sampled_rows[sampled < 0], np.array([*failed], np.int64))
            outcome.failed = self._fail(failed_rows)
            plan = plan.without(set(failed_rows.tolist()))
            sampled = sampled[sampled >= 0]
            outcome.token_ids = sampled.tolist()
        if plan.num_decodes:
            self._decoded(plan, sampled[: plan.num_decodes], outcome)
        if plan.num_decodes < len(plan):
            self._prefilled(plan, sampled[plan.num_decodes :], outcome)
        for sequence, _ in outcome.finished:
            self.remove(sequence)
        for sequence, _, _ in outcome.prefilled:
            if sequence.for_peer and sequence.row is not None and not self.is_prefilling(sequence):
                self.batch.remove(sequence)
                sequence.move(Status.HELD)
                self.pending_transfers.hold(sequence)
                outcome.held.append(sequence)
        return outcome

    def is_prefilling(self, sequence: Sequence) -> bool:
        """Whether it is in the batch and has prompt tokens to compute."""
        return sequence.row is not None and bool(self.batch.prefilling[sequence.row])

    # ---- parts of schedule -----------------------------------------------------------------------

    def _grow(self, preempted: list[Sequence]) -> np.ndarray:
        """Give each decoding sequence the block that its next token needs; returns their rows."""
        batch, pool = self.batch, self.pool
        if not len(batch.decode_rows):
            return batch.decode_rows
        columns = batch.decode_columns
        full = (columns.num_computed == columns.capacity).nonzero()[0]
        if not len(full):
            return columns.rows
        blocks = pool.take(len(full))
        if blocks is not None:
            batch.append_blocks(full, blocks)
            return columns.rows
        members = [columns.members[at] for at in full.tolist()]
        for sequence in sorted(members, key=preemption_order):
            if sequence.row is None:  # preempted by a more important one in this pass
                continue
            block = self._take_one(sequence, preempted)
            if block is not None:
                batch.append_blocks((batch.decode_rows == sequence.row).nonzero()[0], block)
        return batch.decode_rows

    def _plan(self, decodes: np.ndarray, chunks: list[tuple[Sequence, int]]) -> StepPlan | None:
        """One token for each of the rows `decodes`, and the chunks; None if there are neither.

        The last plan is reused if only the same rows decode.
        """
        if not chunks and self._last_plan is not None and self._last_plan.rows is decodes:
            return self._last_plan
        ones = np.ones(len(decodes), np.int64)
        if chunks:
            rows = np.array([sequence.row for sequence, _ in chunks], np.int64)
            rows = np.concatenate([decodes, rows])
            counts = np.concatenate([ones, [count for _, count in chunks]])
            samples = self.batch.num_computed[rows] + counts == self.batch.num_tokens[rows]
            self._last_plan = StepPlan(rows, counts, samples, decodes)
        elif len(decodes):
            samples = np.ones(len(decodes), np.bool_)
            self._last_plan = StepPlan(decodes, ones, samples, decodes)
        else:
            self._last_plan = None
        return self._last_plan

    def _take_one(self, sequence: Sequence, preempted: list[Sequence]) -> list[int] | None:
        """Take a block, with preemptions if needed; None if `sequence` is preempted itself."""
        while (blocks := self.pool.take(1)) is None:
            victim = self._victim(sequence)
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return None
        return blocks

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempt a sequence for the pruning of another; False if it is that one itself.

        That one is admitted again when its prompt fits in blocks of its own.
        """
        victim = self._victim(sequence)
        self._preempt(victim)
        self._pruning_preempted.append(victim)
        sequence.needs_own_blocks |= victim is sequence
        return victim is not sequence

    def _victim(self, sequence: Sequence) -> Sequence:
        """The sequence to preempt so that `sequence` gets a block.

        It is the youngest of the lowest priority. No sequence before `sequence` in this order, and
        none whose KV a peer reads, is preempted; if no other is left, it is `sequence` itself. A
        peer reads no KV that is to be pruned.
        """
        ready = self.pruner.is_ready
        others = [other for other in self.batch.running if not other.for_peer or ready(other)]
        return max([sequence, *others], key=preemption_order)

    def _preempt(self, sequence: Sequence) -> None:
        """Free the blocks of a running sequence; it is recomputed from its first token."""
        self._leave(sequence)
        self.pending_transfers.discard(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.num_computed_tokens, sequence.num_dropped = [], 0, 0
        sequence.unblock()
        sequence.move(Status.WAITING)
        self.waiting.add(sequence)
        self.num_preemptions += 1

    def _leave(self, sequence: Sequence) -> None:
        """Free the row of a sequence, and publish its answer before its blocks are freed."""
        self.batch.remove(sequence)
        self._publish_answer(sequence, sequence.token_ids, end=sequence.num_computed_tokens)

    # ---- parts of update -------------------------------------------------------------------------

    def _fail(self, rows: np.ndarray) -> list[Sequence]:
        """End the sequences whose logits were not finite, and remove their KV from the cache."""
        failed = self.batch.members(rows)
        for sequence in failed:
            blocks = sequence.blocks
            self.remove(sequence)
            self.pool.invalidate(blocks)
        return failed

    def _decoded(self, plan: StepPlan, token_ids: np.ndarray, outcome: StepOutcome) -> None:
        """Record the tokens of the decoding rows."""
        columns = self.batch.decode_columns_of(plan.decodes)
        outcome.sequences, outcome.indices = columns.members, columns.indices.tolist()
        outcome.finished = _finished(columns.members, *self.batch.advance(columns, token_ids))

    def _prefilled(self, plan: StepPlan, token_ids: np.ndarray, outcome: StepOutcome) -> None:
        """Record and publish the chunks of prompts, and the first tokens of complete prompts."""
        batch, pool = self.batch, self.pool
        rows, counts = plan.rows[plan.num_decodes :], plan.counts[plan.num_decodes :]
        batch.num_computed[rows] += counts
        for sequence, count in zip(batch.members(rows), counts.tolist(), strict=True):
            end = int(batch.num_computed[sequence.row])
            self._publish(sequence, batch.token_ids[sequence.row], start=end - count, end=end)
            shape = pool.kinds.of(sequence)
            num_blocks = shape.num_full(end)
            if end == batch.num_tokens[sequence.row]:
                num_blocks = shape.num_blocks(end)
                batch.end_prefill(sequence)
            if sequence.row in batch.scoring:
                batch.record_scored(sequence, end)
            outcome.prefilled.append((sequence, end, num_blocks))
        rows = rows[plan.samples[plan.num_decodes :]]
        sequences = batch.members(rows)
        outcome.sequences = outcome.sequences + sequences  # the columns own the first list
        outcome.indices += (batch.num_tokens[rows] - batch.num_prompt[rows]).tolist()
        outcome.finished += _finished(sequences, *batch.append_tokens(rows, token_ids))

    # ---- publishing to the prefix cache ----------------------------------------------------------

    def _publish_answers_for(self, sequence: Sequence) -> None:
        """Publish the written blocks of running answers that a new sequence may extend.

        An answer qualifies if it has the same tokens in the first block that `sequence`, whose full
        blocks are hashed, does not find.
        """
        batch, pool = self.batch, self.pool
        shape, num_blocks = pool.kinds.of(sequence), len(pool.match(sequence.hashes))
        start, end = shape.num_tokens(num_blocks), shape.num_tokens(num_blocks + 1)
        if end > sequence.num_tokens:
            return
        tokens, rows = sequence.token_ids[start:end], batch.decode_rows
        rows = rows[batch.token_ids[rows, start] == tokens[0]]  # cheap filter: few rows remain
        if not len(rows):
            return
        rows = rows[batch.num_computed[rows] >= end]
        rows = rows[(batch.token_ids[rows, start:end] == tokens).all(axis=1)]
        for running in batch.members(rows):
            num_computed = int(batch.num_computed[running.row])
            self._publish_answer(running, batch.token_ids[running.row], end=num_computed)

    def _publish_answer(self, sequence: Sequence, token_ids: np.ndarray, *, end: int) -> None:
        self._publish(sequence, token_ids, start=sequence.request.num_prompt_tokens, end=end)

    def _publish(self, sequence: Sequence, token_ids: np.ndarray, *, start: int, end: int) -> None:
        """Publish the blocks that the tokens `[start, end)` completed."""
        if sequence.num_dropped:
            return
        shape = self.pool.kinds.of(sequence)
        self._extend_hashes(sequence, token_ids, num_tokens=end)
        for index in range(shape.num_full(start), shape.num_full(end)):
            is_visual = is_visual_block(sequence.items, end=shape.num_tokens(index + 1))
            self.pool.publish(sequence.blocks[index], sequence.hashes[index], is_visual=is_visual)

    def _extend_hashes(self, sequence: Sequence, token_ids: np.ndarray, *, num_tokens: int) -> None:
        extend_hash_chain(
            sequence.hashes, token_ids, sequence.request, num_tokens=num_tokens,
            shape=self.pool.kinds.of(sequence), whole_prompt=sequence.whole_prompt,
        )  # fmt: skip


def _finished(
    sequences: list[Sequence], stopped: np.ndarray, full: np.ndarray
) -> list[tuple[Sequence, FinishReason]]:
    """The sequences whose answer is ended, by a stop token (`stopped`) or its length (`full`)."""
    return [
        (sequences[i], FinishReason.STOP if stopped[i] else FinishReason.LENGTH)
        for i in (stopped | full).nonzero()[0].tolist()
    ]
