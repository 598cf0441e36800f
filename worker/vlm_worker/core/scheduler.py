"""Who runs in the next step, and with how many tokens. Pure: no torch, no clock, no I/O.

    step k:  schedule(now) -> Schedule -> [runner] -> update(plan, tokens) -> Outcome

Prefill and decode are no phases: every step gives each sequence `count <= remaining` tokens under
one budget. In this order:

    1  sequences that hold KV already (received, adopted) enter: only by finishing they free it
    2  decoding sequences get their one token; one that finds no block preempts the least important
    3  running prompts get chunks, the most important first, the oldest of equals; a chunk may cut
       through an image that is on hand
    4  waiting sequences enter if the whole prompt fits; if not, others may pass, so often

1 and 4 are in `entrance`; who of the waiting comes next in `waves`, where they wait in `queues`,
which of them may ask for pictures in `claims`.
"""

from __future__ import annotations

import numpy as np

from vlm_worker.core.blocks import BlockPool
from vlm_worker.core.chunks import PromptShares
from vlm_worker.core.entrance import Entrance
from vlm_worker.core.plan import Outcome, Plan, Said, Schedule
from vlm_worker.core.publish import publish_answer, publish_answers_for, publish_written
from vlm_worker.core.sequence import Sequence, Status
from vlm_worker.core.table import SequenceTable
from vlm_worker.core.unread import Unread
from vlm_worker.core.waves import AdmissionRules, precedence


class Scheduler:
    """Continuous batching over one block pool. The only writer of sequences, table and pool.

    Attributes:
        entrance: who enters the batch, from the queue `waiting` and before it.
        unread: what is computed for peers.
    """

    def __init__(
        self,
        pool: BlockPool,
        table: SequenceTable,
        *,
        max_num_batched_tokens: int,
        watermark_blocks: int = 0,
        max_unread_blocks: int | None = None,
        whole_images: bool = False,
        long_prefill_tokens: int | None = None,
        rules: AdmissionRules | None = None,
    ) -> None:
        self.pool = pool
        self.table = table
        most_blocks = pool.capacity if max_unread_blocks is None else max_unread_blocks
        self.unread = Unread(most_blocks=most_blocks)
        self.entrance = Entrance(
            pool,
            table,
            watermark_blocks=watermark_blocks,
            unread=self.unread,
            rules=rules or AdmissionRules(),
        )
        self.waiting = self.entrance.waiting
        self.num_preemptions = 0
        self._max_num_batched_tokens = max_num_batched_tokens
        self._whole_images = whole_images
        self._long_prefill_tokens = long_prefill_tokens
        self._last_plan: Plan | None = None

    # ---- entering and leaving --------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it runs when budget, rows, blocks and embeddings allow."""
        self.look_up(sequence)
        self.waiting.add(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Let a HELD or RECEIVING sequence, its KV complete, decode when a row is free."""
        assert sequence.num_tokens == sequence.num_computed_tokens + 1
        self.entrance.ready[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """End a sequence, wherever it stands, and take everything back."""
        if sequence.status is Status.RUNNING:
            self._leave(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        else:
            self.entrance.ready.pop(sequence, None)
        self.entrance.let_go(sequence)
        self.unread.discard(sequence)
        self.pool.unpromise(sequence.promised)
        self.pool.release(sequence.blocks)
        sequence.promised, sequence.blocks = 0, []
        sequence.move(Status.FINISHED)

    @property
    def kept_blocks(self) -> int:
        """Blocks that a reservation leaves to those who run, and who were passed by too often."""
        return self.entrance.kept_blocks

    def look_up(self, sequence: Sequence) -> int:
        """Hash the tokens of a new sequence, and make running answers known to it.

        Returns:
            `num_cached_tokens`.
        """
        sequence.extend_hashes(
            sequence.token_ids, num_tokens=sequence.num_tokens, block_size=self.pool.block_size
        )
        publish_answers_for(sequence, self.table, self.pool)
        return self.num_cached_tokens(sequence)

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Tokens that a prefix hit would cover now; never the last one (K4). Changes nothing."""
        return len(self.entrance.match(sequence)) * self.pool.block_size

    # ---- a step ----------------------------------------------------------------------------------

    def schedule(self, *, now: float) -> Schedule:
        """Choose the next step's work, and take the blocks for it.

        Args:
            now: on the clock of `Sequence.arrived_at`; never smaller than the last time.
        """
        self.entrance.enter_ready()
        preempted: list[Sequence] = []
        decodes = self._grow(preempted)
        shares = PromptShares(
            self._max_num_batched_tokens - len(decodes),
            cap=self._long_prefill_tokens,
            whole_images=self._whole_images,
        )
        for prompt in sorted(self.table.prompts, key=precedence):
            start = int(self.table.num_computed[prompt.row])
            count = shares.offer(prompt, start)
            if count:
                shares.take(prompt, start, count)
        admitted: list[Sequence] = []
        roomless: list[Sequence] = []
        if not preempted:
            admitted, roomless = self.entrance.admit(shares, now=now)
        roomless += self.entrance.revoke_claims()
        shares.give_rest()
        stalled = [(sequence, start) for sequence, start in shares.stalled if sequence.may_pin]
        assert shares.left >= 0, "more is planned than the budget has"
        plan = self._plan(decodes, shares.chunks)
        return Schedule(plan, admitted, preempted, stalled, roomless)

    def update(self, plan: Plan, sampled: np.ndarray) -> Outcome:
        """Record a step: int64 `sampled` holds a token for each of the plan's sampled rows."""
        token_ids, failed = sampled.tolist(), []
        if min(token_ids, default=0) < 0:
            failed = self._fail(plan.sampled_rows[sampled < 0])
            plan = plan.without({row for _, row in failed})
            sampled = sampled[sampled >= 0]
            token_ids = sampled.tolist()
        said = self._decoded(plan, sampled[: plan.num_decodes])
        prefilled: list[tuple[Sequence, int, int]] = []
        if plan.num_decodes < len(plan):
            firsts, prefilled = self._prefilled(plan, sampled[plan.num_decodes :])
            said = said.before(firsts)
        outcome = Outcome(
            sequences=said.sequences,
            token_ids=token_ids,
            indices=said.indices,
            finished=said.finished,
            held=[],
            prefilled=prefilled,
            failed=[sequence for sequence, _ in failed],
        )
        self._settle(outcome)
        return outcome

    # ---- parts of schedule -----------------------------------------------------------------------

    def _grow(self, preempted: list[Sequence]) -> np.ndarray:
        """Give every decoding sequence the block that its token needs; returns their rows."""
        table, pool = self.table, self.pool
        if not len(table.decode_rows):
            return table.decode_rows
        decoding = table.decoding
        full = (decoding.num_computed == decoding.room).nonzero()[0]
        if not len(full):
            return decoding.rows
        blocks = pool.take(len(full))
        if blocks is not None:
            table.append_blocks(full, blocks)
            return decoding.rows
        members = [decoding.members[at] for at in full.tolist()]
        for sequence in sorted(members, key=precedence):
            if sequence.row is None:  # preempted by a more important one in this pass
                continue
            block = self._take_one(sequence, preempted)
            if block is not None:
                table.append_blocks((table.decode_rows == sequence.row).nonzero()[0], block)
        return table.decode_rows

    def _plan(self, decodes: np.ndarray, chunks: list[tuple[Sequence, int]]) -> Plan | None:
        """The step's plan; the last one where just the same decode."""
        if chunks or self._last_plan is None or self._last_plan.rows is not decodes:
            self._last_plan = Plan.of(self.table, decodes, chunks)
        return self._last_plan

    def _take_one(self, sequence: Sequence, preempted: list[Sequence]) -> list[int] | None:
        """A block for `sequence`, at others' cost; None if it is itself preempted."""
        while (blocks := self.pool.take(1)) is None:
            victim = self._victim(sequence)
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return None
        return blocks

    def _victim(self, sequence: Sequence) -> Sequence:
        """Whom to preempt so that `sequence` can go on: nobody before it, nobody whom a peer reads.

        That is the youngest of the lowest priority; itself, where nobody comes after it.
        """
        others = [s for s in self.table.running if not s.hold]
        return max([sequence, *others], key=precedence)

    def _preempt(self, sequence: Sequence) -> None:
        """Free the blocks; the sequence is computed again from its first token."""
        self._leave(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.num_computed_tokens = [], 0
        sequence.wake()
        sequence.move(Status.WAITING)
        self.waiting.add(sequence)
        self.num_preemptions += 1

    def _leave(self, sequence: Sequence) -> None:
        """Take the row back, of one whose blocks are about to be freed."""
        self.table.leave(sequence)
        publish_answer(sequence, self.pool)

    # ---- parts of update -------------------------------------------------------------------------

    def _fail(self, rows: np.ndarray) -> list[tuple[Sequence, int]]:
        """End the sequences of poisoned rows, and forget KV that may poison others."""
        failed = []
        for row in rows.tolist():
            sequence = self.table.sequences[row]
            assert sequence is not None
            blocks = sequence.blocks
            self.remove(sequence)
            self.pool.forget(blocks)
            failed.append((sequence, row))
        return failed

    def _decoded(self, plan: Plan, token_ids: np.ndarray) -> Said:
        """Record the tokens of those who decode."""
        if not plan.num_decodes:
            return Said([], [], [])
        decoding = self.table.decoding_of(plan.decodes)
        indices = decoding.indices.tolist()
        ends = self.table.advance(decoding, token_ids)
        return Said.of(decoding.members, indices, *ends)

    def _prefilled(
        self, plan: Plan, token_ids: np.ndarray
    ) -> tuple[Said, list[tuple[Sequence, int, int]]]:
        """Record the chunks of prompts, and the tokens of those that are complete.

        Returns:
            What was said; and `Outcome.prefilled`.
        """
        table, start = self.table, plan.num_decodes
        table.num_computed[plan.rows[start:]] += plan.counts[start:]
        prefilled = publish_written(plan, table, self.pool)
        rows = plan.rows[start:][plan.samples[start:]]
        indices = (table.num_tokens[rows] - table.num_prompt[rows]).tolist()
        ends = table.append_tokens(rows, token_ids)
        return Said.of(table.members(rows), indices, *ends), prefilled

    def _settle(self, outcome: Outcome) -> None:
        """Let finished sequences go, and hold those whose prefill is over."""
        for sequence, _ in outcome.finished:
            self.remove(sequence)
        for sequence, _, _ in outcome.prefilled:
            if (
                sequence.hold
                and sequence.row is not None
                and not self.table.prefilling[sequence.row]
            ):
                self.table.leave(sequence)
                sequence.move(Status.HELD)
                self.unread.hold(sequence)
                outcome.held.append(sequence)
