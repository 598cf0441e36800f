"""Who runs in the next step, and with how many tokens. Pure: no torch, no clock, no I/O.

    step k:  schedule() -> Schedule -> [runner] -> update(plan, tokens) -> Outcome

Prefill and decode are no phases: every step gives each sequence `count <= remaining` tokens under
one budget. In this order:

    1  sequences that hold KV already (received, adopted) enter: only by finishing they free it
    2  decoding sequences get their one token; one that finds no block preempts the youngest
    3  running prompts get chunks, oldest first, which may cut through an image that is on hand
    4  waiting sequences enter if the whole prompt fits; if not, younger ones may pass, so often
"""

from __future__ import annotations

import collections
from typing import Final

import numpy as np

from vlm_worker.core.blocks import BlockPool
from vlm_worker.core.chunks import next_chunk
from vlm_worker.core.plan import Outcome, Plan, Schedule
from vlm_worker.core.publish import publish_written
from vlm_worker.core.sequence import Sequence, Status
from vlm_worker.core.table import SequenceTable
from vlm_worker.types import FinishReason

MAX_OVERTAKEN: Final = 64
"""So many younger sequences may enter before one that lacks blocks; then it is waited for."""

MAX_TRIES: Final = 8
"""So many waiting sequences that lack blocks are looked at in one step."""


class Scheduler:
    """Continuous batching over one block pool. The only writer of sequences, table and pool."""

    def __init__(
        self,
        pool: BlockPool,
        table: SequenceTable,
        *,
        max_num_batched_tokens: int,
        watermark_blocks: int = 0,
        whole_images: bool = False,
    ) -> None:
        self.pool = pool
        self.table = table
        self.waiting: collections.deque[Sequence] = collections.deque()
        self.ready: collections.deque[Sequence] = collections.deque()
        self.num_preemptions = 0
        self._max_num_batched_tokens = max_num_batched_tokens
        self._watermark_blocks = watermark_blocks
        self._whole_images = whole_images

    # ---- entering and leaving --------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it runs when budget, rows, blocks and embeddings allow."""
        sequence.extend_hashes(
            sequence.token_ids, num_tokens=sequence.num_tokens, block_size=self.pool.block_size
        )
        self.waiting.append(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Let a HELD or RECEIVING sequence, its KV complete, decode when a row is free."""
        assert sequence.num_tokens == sequence.num_computed_tokens + 1
        self.ready.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """End a sequence, wherever it stands, and take everything back."""
        if sequence.status is Status.RUNNING:
            self.table.leave(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        elif sequence in self.ready:
            self.ready.remove(sequence)
        self.pool.unpromise(sequence.promised)
        self.pool.release(sequence.blocks)
        sequence.promised, sequence.blocks = 0, []
        sequence.move(Status.FINISHED)

    @property
    def watermark(self) -> int:
        """Blocks that whoever comes new leaves to those who run, for their growth."""
        return self._watermark_blocks if len(self.table) else 0

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Tokens that a prefix hit would cover now; never the last one (K4). Changes nothing."""
        return len(self._match(sequence)) * self.pool.block_size

    # ---- a step ----------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        """Choose the next step's work, and take the blocks for it."""
        preempted: list[Sequence] = []
        stalled: list[tuple[Sequence, int]] = []
        while self.ready and self.table.num_free_rows:
            self.table.enter(self.ready.popleft())
        decodes = self._grow(preempted)
        budget = self._max_num_batched_tokens - len(decodes)
        chunks: list[tuple[Sequence, int]] = []
        for row in self.table.prefill_rows:
            sequence = self.table.sequences[row]
            assert sequence is not None
            count = self._chunk(sequence, int(self.table.num_computed[row]), budget, stalled)
            if count:
                chunks.append((sequence, count))
                budget -= count
        admitted: list[Sequence] = []
        if not preempted:
            admitted = self._admit(budget, chunks, stalled)
        return Schedule(self._plan(decodes, chunks), admitted, preempted, stalled)

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

    def _grow(self, preempted: list[Sequence]) -> np.ndarray:
        """Give every decoding sequence the block that its token needs; returns their rows."""
        table, pool = self.table, self.pool
        rows = table.decode_rows
        full = rows[table.num_computed[rows] == table.num_blocks[rows] * pool.block_size].tolist()
        blocks = pool.take(len(full))
        if blocks is not None:
            table.append_blocks(full, blocks)
            return rows
        for row in full:
            sequence = table.sequences[row]
            if sequence is None:  # preempted by an older one in this pass
                continue
            block = self._take_one(sequence, preempted)
            if block is not None:
                table.append_blocks([row], block)
        return table.decode_rows

    def _take_one(self, sequence: Sequence, preempted: list[Sequence]) -> list[int] | None:
        """A block for `sequence`, at the cost of younger ones; None if it is itself preempted."""
        while (blocks := self.pool.take(1)) is None:
            victim = self._youngest(sequence)
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return None
        return blocks

    def _youngest(self, sequence: Sequence) -> Sequence:
        """Whom to preempt so that `sequence` can go on: nobody older, nobody whom a peer reads."""
        younger = [s for s in self.table.running if s.arrival > sequence.arrival and not s.hold]
        return younger[-1] if younger else sequence

    def _preempt(self, sequence: Sequence) -> None:
        """Free the blocks; the sequence is computed again from its first token."""
        self.table.leave(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.num_computed_tokens = [], 0
        sequence.wake()
        sequence.move(Status.WAITING)
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _chunk(
        self, sequence: Sequence, start: int, budget: int, stalled: list[tuple[Sequence, int]]
    ) -> int:
        """Tokens that the sequence computes next, from `start` on."""
        if sequence.stalled or not budget:
            return 0
        num_tokens = sequence.num_tokens
        chunk = next_chunk(
            start,
            num_tokens - start,
            budget=budget,
            items=sequence.items,
            embeddings=sequence.embeddings,
            whole_images=self._whole_images,
        )
        if not chunk.size and chunk.missing is not None:
            sequence.stall()
            stalled.append((sequence, start))
        return chunk.size

    def _admit(
        self, budget: int, chunks: list[tuple[Sequence, int]], stalled: list[tuple[Sequence, int]]
    ) -> list[Sequence]:
        """Let waiting sequences enter and give them their first chunk."""
        admitted: list[Sequence] = []
        lacking: list[Sequence] = []
        for sequence in list(self.waiting):
            if not budget or not self.table.num_free_rows or len(lacking) == MAX_TRIES:
                break
            if sequence.stalled:
                continue
            shared = self._match(sequence)
            start = len(shared) * self.pool.block_size
            count = self._chunk(sequence, start, budget, stalled)
            if not count:
                continue
            needed = self.pool.blocks_for(sequence.num_tokens) - len(shared)
            blocks = self.pool.take(
                needed, shared=shared, promised=sequence.promised, keep=self.watermark
            )
            if blocks is None:
                if sequence.overtaken >= MAX_OVERTAKEN:
                    break
                lacking.append(sequence)
                continue
            for other in lacking:
                other.overtaken += 1
            self._enter(sequence, shared + blocks, num_cached_tokens=start)
            admitted.append(sequence)
            chunks.append((sequence, count))
            budget -= count
        return admitted

    def _enter(self, sequence: Sequence, blocks: list[int], *, num_cached_tokens: int) -> None:
        self.waiting.remove(sequence)
        sequence.promised, sequence.overtaken = 0, 0
        sequence.blocks = blocks
        sequence.num_computed_tokens = sequence.num_cached_tokens = num_cached_tokens
        self.table.enter(sequence)

    def _match(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest prefix hit that leaves a token to compute."""
        return self.pool.match(sequence.hashes[: (sequence.num_tokens - 1) // self.pool.block_size])

    def _plan(self, decodes: np.ndarray, chunks: list[tuple[Sequence, int]]) -> Plan | None:
        if not chunks:
            ones = np.ones(len(decodes), np.int64)
            return Plan(decodes, ones, ones > 0, len(decodes)) if len(decodes) else None
        chunk_rows = np.array([sequence.row for sequence, _ in chunks], np.int64)
        chunk_counts = np.array([count for _, count in chunks], np.int64)
        rows = np.concatenate([decodes, chunk_rows])
        counts = np.concatenate([np.ones(len(decodes), np.int64), chunk_counts])
        samples = self.table.num_computed[rows] + counts == self.table.num_tokens[rows]
        assert counts.sum() <= self._max_num_batched_tokens
        return Plan(rows, counts, samples, len(decodes))

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
