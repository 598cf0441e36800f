"""Who runs in the next step, and with how many tokens. Pure: no torch, no clock, no I/O.

    step k:  schedule(now) -> Schedule -> [runner] -> update(plan, tokens) -> Outcome

Prefill and decode are no phases: every step gives each sequence `count <= remaining` tokens under
one budget. In this order:

    1  sequences that hold KV already (received, adopted) enter: only by finishing they free it
    2  decoding sequences get their one token; one that finds no block preempts the least important
    3  running prompts get chunks, oldest first, which may cut through an image that is on hand
    4  waiting sequences enter if the whole prompt fits; if not, others may pass, so often

Who is more important, and who of the waiting comes next, is in `waves`; where they wait, `queues`.
"""

from __future__ import annotations

import itertools
from typing import Final

import numpy as np

from vlm_worker.core.blocks import BlockPool
from vlm_worker.core.chunks import PromptShares
from vlm_worker.core.plan import Outcome, Plan, Schedule
from vlm_worker.core.publish import publish_written
from vlm_worker.core.queues import Waiting
from vlm_worker.core.sequence import Lane, Sequence, Status
from vlm_worker.core.table import SequenceTable
from vlm_worker.core.waves import AdmissionRules
from vlm_worker.types import FinishReason

MAX_OVERTAKEN: Final = 64
"""So many others may enter before one that lacks blocks or budget; then it is waited for."""

MAX_TRIES: Final = 4
"""So many waiting sequences that lack blocks or budget are looked at in one step."""


class Scheduler:
    """Continuous batching over one block pool. The only writer of sequences, table and pool.

    Attributes:
        waiting: the queue.
        ready: who enters before it, in order: their KV is complete.
        max_running: sequences that may run; whoever runs already goes on.
    """

    def __init__(
        self,
        pool: BlockPool,
        table: SequenceTable,
        *,
        max_num_batched_tokens: int,
        watermark_blocks: int = 0,
        whole_images: bool = False,
        long_prefill_tokens: int | None = None,
        rules: AdmissionRules | None = None,
    ) -> None:
        self.pool = pool
        self.table = table
        self.waiting = Waiting(rules or AdmissionRules())
        self.ready: dict[Sequence, None] = {}
        self.max_running = len(table.sequences)
        self.num_preemptions = 0
        self._awaited_blocks = 0
        self._max_num_batched_tokens = max_num_batched_tokens
        self._watermark_blocks = watermark_blocks
        self._whole_images = whole_images
        self._long_prefill_tokens = long_prefill_tokens

    # ---- entering and leaving --------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it runs when budget, rows, blocks and embeddings allow."""
        start = self.look_up(sequence)
        if any(
            embedding is None and item.end > start
            for item, embedding in zip(sequence.items, sequence.embeddings, strict=True)
        ):
            sequence.lane = Lane.VISION
        self.waiting.add(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Let a HELD or RECEIVING sequence, its KV complete, decode when a row is free."""
        assert sequence.num_tokens == sequence.num_computed_tokens + 1
        self.ready[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """End a sequence, wherever it stands, and take everything back."""
        if sequence.status is Status.RUNNING:
            self.table.leave(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        else:
            self.ready.pop(sequence, None)
        self.pool.unpromise(sequence.promised)
        self.pool.release(sequence.blocks)
        sequence.promised, sequence.blocks = 0, []
        sequence.move(Status.FINISHED)

    @property
    def watermark(self) -> int:
        """Blocks that whoever comes new leaves to those who run, for their growth."""
        return self._watermark_blocks if len(self.table) else 0

    @property
    def kept_blocks(self) -> int:
        """Blocks that a reservation leaves: the watermark, and what somebody was passed by for."""
        return self.watermark + self._awaited_blocks

    def look_up(self, sequence: Sequence) -> int:
        """Hash the tokens of a new sequence; returns `num_cached_tokens`."""
        sequence.extend_hashes(
            sequence.token_ids, num_tokens=sequence.num_tokens, block_size=self.pool.block_size
        )
        return self.num_cached_tokens(sequence)

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Tokens that a prefix hit would cover now; never the last one (K4). Changes nothing."""
        return len(self._match(sequence)) * self.pool.block_size

    # ---- a step ----------------------------------------------------------------------------------

    def schedule(self, *, now: float) -> Schedule:
        """Choose the next step's work, and take the blocks for it.

        Args:
            now: on the clock of `Sequence.arrived_at`; never smaller than the last time.
        """
        for sequence in list(itertools.islice(self.ready, self._num_places)):
            del self.ready[sequence]
            self.table.enter(sequence)
        preempted: list[Sequence] = []
        decodes = self._grow(preempted, now=now)
        shares = PromptShares(
            self._max_num_batched_tokens - len(decodes),
            cap=self._long_prefill_tokens,
            whole_images=self._whole_images,
        )
        for row in self.table.prefill_rows:
            running = self.table.sequences[row]
            assert running is not None
            start = int(self.table.num_computed[row])
            count = shares.offer(running, start)
            if count:
                shares.take(running, start, count)
        admitted: list[Sequence] = []
        roomless: list[Sequence] = []
        if not preempted:
            admitted = self._admit(shares, roomless, now=now)
        shares.give_rest()
        plan = Plan.of(self.table, decodes, shares.chunks)
        assert plan is None or plan.num_tokens <= self._max_num_batched_tokens
        return Schedule(plan, admitted, preempted, shares.stalled, roomless)

    def update(self, plan: Plan, sampled: np.ndarray) -> Outcome:
        """Record a step: int64 `sampled` holds a token for each of the plan's sampled rows."""
        table = self.table
        failed = self._fail(plan.sampled_rows[sampled < 0])
        if failed:
            plan = plan.without({row for _, row in failed})
            sampled = sampled[sampled >= 0]
        table.num_computed[plan.rows] += plan.counts
        prefilled = publish_written(plan, table, self.pool)
        rows = plan.sampled_rows
        num_tokens = table.num_tokens[rows]
        table.token_ids[rows, num_tokens] = sampled
        table.num_tokens[rows] = num_tokens + 1
        stopped = (table.stop_ids[rows] == sampled[:, None]).any(axis=1)
        full = num_tokens + 1 >= table.limit[rows]
        outcome = Outcome(
            sequences=table.members(rows),
            token_ids=sampled.tolist(),
            indices=(num_tokens - table.num_prompt[rows]).tolist(),
            finished=[],
            held=[],
            prefilled=prefilled,
            failed=[sequence for sequence, _ in failed],
        )
        self._settle(outcome, np.flatnonzero(stopped | full), stopped)
        return outcome

    # ---- parts of schedule -----------------------------------------------------------------------

    def _grow(self, preempted: list[Sequence], *, now: float) -> np.ndarray:
        """Give every decoding sequence the block that its token needs; returns their rows."""
        table, pool = self.table, self.pool
        rows = table.decode_rows
        full = rows[table.num_computed[rows] == table.num_blocks[rows] * pool.block_size]
        blocks = pool.take(len(full))
        if blocks is not None:
            table.append_blocks(full.tolist(), blocks)
            return rows
        rules = self.waiting.rules
        for sequence in sorted(table.members(full), key=lambda s: rules.precedence(s, now=now)):
            if sequence.row is None:  # preempted by a more important one in this pass
                continue
            block = self._take_one(sequence, preempted, now=now)
            if block is not None:
                table.append_blocks([sequence.row], block)
        return table.decode_rows

    def _take_one(
        self, sequence: Sequence, preempted: list[Sequence], *, now: float
    ) -> list[int] | None:
        """A block for `sequence`, at others' cost; None if it is itself preempted."""
        while (blocks := self.pool.take(1)) is None:
            victim = self._victim(sequence, now=now)
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return None
        return blocks

    def _victim(self, sequence: Sequence, *, now: float) -> Sequence:
        """Whom to preempt so that `sequence` can go on: nobody before it, nobody whom a peer reads.

        That is the youngest of the lowest priority; itself, where nobody comes after it.
        """
        rules = self.waiting.rules
        others = [s for s in self.table.running if not s.hold and s is not sequence]
        return max([sequence, *others], key=lambda s: rules.precedence(s, now=now))

    def _preempt(self, sequence: Sequence) -> None:
        """Free the blocks; the sequence is computed again from its first token."""
        self.table.leave(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.num_computed_tokens = [], 0
        sequence.wake()
        sequence.move(Status.WAITING)
        self.waiting.add(sequence)
        self.num_preemptions += 1

    @property
    def _num_places(self) -> int:
        """Sequences that may enter now, as far as their number goes."""
        return min(self.table.num_free_rows, max(self.max_running - len(self.table), 0))

    def _admit(
        self, shares: PromptShares, roomless: list[Sequence], *, now: float
    ) -> list[Sequence]:
        """Let waiting sequences enter and give them their first chunk.

        Blocks come before embeddings: who finds no blocks asks for nothing, and is `roomless`.
        """
        admitted: list[Sequence] = []
        lacking: list[Sequence] = []
        self._awaited_blocks = 0
        places = self._num_places
        if not (self.waiting and shares.left and places):
            return admitted
        with self.waiting.wave(now=now) as wave:
            while shares.left and len(admitted) < places and len(lacking) < MAX_TRIES:
                sequence = wave.next()
                if sequence is None:
                    break
                shared = self._match(sequence)
                start = len(shared) * self.pool.block_size
                needed = self.pool.blocks_for(sequence.num_tokens) - len(shared)
                count = 0
                if self._has_blocks(sequence, needed, shared):
                    count = shares.offer(sequence, start)
                else:
                    roomless.append(sequence)
                if sequence.stalled:
                    continue
                if count:
                    wave.admit(sequence)
                    blocks = self.pool.take(needed, shared=shared, promised=sequence.promised)
                    assert blocks is not None, "there was room a moment ago"
                    self._enter(sequence, shared + blocks, num_cached_tokens=start)
                    shares.take(sequence, start, count)
                    admitted.append(sequence)
                    for other in lacking:
                        other.overtaken += 1
                elif sequence.overtaken < MAX_OVERTAKEN:
                    lacking.append(sequence)
                else:
                    self._awaited_blocks = self.pool.blocks_for(sequence.num_tokens)
                    break
        return admitted

    def _has_blocks(self, sequence: Sequence, needed: int, shared: list[int]) -> bool:
        """Whether there is room for the whole prompt, pictures that are not here included."""
        return self.pool.can_take(
            needed, shared=shared, promised=sequence.promised, keep=self.watermark
        )

    def _enter(self, sequence: Sequence, blocks: list[int], *, num_cached_tokens: int) -> None:
        sequence.promised, sequence.overtaken = 0, 0
        sequence.blocks = blocks
        sequence.num_computed_tokens = sequence.num_cached_tokens = num_cached_tokens
        self.table.enter(sequence)

    def _match(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest prefix hit that leaves a token to compute."""
        return self.pool.match(sequence.hashes[: (sequence.num_tokens - 1) // self.pool.block_size])

    # ---- parts of update -------------------------------------------------------------------------

    def _fail(self, rows: np.ndarray) -> list[tuple[Sequence, int]]:
        """End the sequences of poisoned rows, and forget KV that may poison others."""
        failed = []
        for row in rows.tolist():
            sequence = self.table.sequences[row]
            assert sequence is not None
            self.pool.forget(sequence.blocks)
            self.remove(sequence)
            failed.append((sequence, row))
        return failed

    def _settle(self, outcome: Outcome, done: np.ndarray, stopped: np.ndarray) -> None:
        """Let finished sequences go, and hold those whose prefill is over."""
        for i in done.tolist():
            reason = FinishReason.STOP if stopped[i] else FinishReason.LENGTH
            outcome.finished.append((outcome.sequences[i], reason))
            self.remove(outcome.sequences[i])
        for sequence, _, _ in outcome.prefilled:
            if (
                sequence.hold
                and sequence.row is not None
                and not self.table.prefilling[sequence.row]
            ):
                self.table.leave(sequence)
                sequence.move(Status.HELD)
                outcome.held.append(sequence)
