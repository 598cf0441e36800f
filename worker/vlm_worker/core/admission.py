"""Admission of sequences to the running batch. Pure.

ready      KV is complete (received or adopted): admitted first, because only finishing frees the KV
waiting    admitted if the KV blocks of the whole prompt fit, images included; if they do not fit,
           at most MAX_BYPASSED others are admitted before it
reserved   a waiting sequence with reserved blocks may bypass any number of others: no other
           sequence can use its blocks
blocked    a sequence that lacks an embedding requests it if its blocks fit beside all soft
           reservations; if not, it is blocked until more blocks are free
for peers  a prompt whose KV a peer reads is admitted if its blocks and those that peers have not
           read fit under a limit; so other prompts find free blocks, even if peers read slowly

    free blocks  |- A reserves -|- B reserves -|-- unreserved --|     C needs more: it is blocked

A soft reservation takes no block: a sequence without images bypasses it. Reservations that no
longer fit together are revoked, so that no sequence pins an image without blocks for it (E4).

Two workers never wait for each other: decode reserves its KV blocks before prefill computes the
prompt. If decode fails, the lease on the KV expires.

Laws (tests/worker/core/test_soft_reservations.py):

    reserved blocks are free                    after every step
    a blocked sequence is unblocked             if unreserved blocks grew, or no reservation is left
    a sequence bypassed too often is next       no other reservation is granted; its own is withheld
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final

from vlm_worker.core.admission_policy import AdmissionQueue, AdmissionReason, AdmissionRound
from vlm_worker.core.chunks import TokenBudget
from vlm_worker.core.kv_cache import BlockPool
from vlm_worker.core.limits import fits
from vlm_worker.core.persistent_batch import PersistentBatch
from vlm_worker.core.sequence import MIN_PRIORITY, Sequence, Status
from vlm_worker.settings import AdmissionSettings

MAX_BYPASSED: Final = 64
"""Sequences that may be admitted before one that lacks blocks or budget; then all wait for it."""

MAX_CANDIDATES: Final = 4
"""Waiting sequences that lack blocks or budget and are examined in one step."""

MAX_IDLE_SECONDS: Final = 0.1
"""If nothing changed, no sequence is tried again for this time; ageing can change the order."""


class AdmissionController:
    """Admits sequences from the queue to the batch. Only the scheduler uses it.

    Attributes:
        ready: sequences that are admitted before the queue, in order.
        max_running: limit on running sequences; a lower limit stops no running sequence.
    """

    def __init__(
        self,
        pool: BlockPool,
        batch: PersistentBatch,
        *,
        watermark_blocks: int,
        max_pending_blocks: int,
        settings: AdmissionSettings,
    ) -> None:
        self.waiting = AdmissionQueue(settings)
        self.ready: dict[Sequence, None] = {}
        self.max_running = len(batch.sequences)
        self.pending_transfers = PendingKVTransfers(max_blocks=max_pending_blocks)
        self._pool = pool
        self._batch = batch
        self._watermark_blocks = watermark_blocks
        self._awaited_blocks = 0
        self.soft_reservations = SoftReservations(pool, max_bypassed=MAX_BYPASSED)
        self._unblocked: Sequence | None = None
        self._tried_with: tuple[int, ...] = ()
        self._tried_at = 0.0

    @property
    def withheld_blocks(self) -> int:
        """Free blocks that a reservation must leave: watermark and blocks of bypassed sequences."""
        withheld = max(self._awaited_blocks, self.soft_reservations.num_withheld_blocks)
        return self._watermark + withheld

    def match(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest prefix hit within `Sequence.max_cached_tokens`.

        Answer tokens of a pruned sequence have other KV than those that are published. A sequence
        that needs its own blocks shares none, so that its pruning needs no further block.
        """
        pool = self._pool
        most = pool.kinds.of(sequence).num_full(sequence.max_cached_tokens)
        blocks = pool.match(sequence.hashes[:most])
        if sequence.needs_own_blocks:
            return list(itertools.takewhile(lambda block: not pool.is_used(block), blocks))
        return blocks

    def admit_ready(self, *, to_prune: bool) -> None:
        """Give rows to the sequences with complete KV; those that await pruning if `to_prune`.

        They enter before the prunings of a turn: behind them, they would decode over unpruned KV.
        """
        able = (sequence for sequence in self.ready if to_prune or not sequence.awaits_pruning)
        for sequence in list(itertools.islice(able, self._num_places)):
            del self.ready[sequence]
            if sequence.virtual_start < 0:
                sequence.virtual_start = self.waiting.fair_order.virtual_time
            self._batch.add(sequence)

    def can_request_embeddings(self, sequence: Sequence) -> bool:
        """Make a soft reservation for a new sequence; True lets it request its embeddings at once.

        False while other sequences are blocked on the encoder.
        """
        shared = self.match(sequence)
        if self.waiting.num_blocked or not self._has_blocks(sequence, shared):
            return False
        return self._soft_reserve(sequence, shared)

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence that leaves the queue or the batch."""
        self.soft_reservations.discard(sequence)
        if sequence is self._unblocked:
            self._unblocked = None

    def admit(
        self, token_budget: TokenBudget, *, now: float
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Admit waiting sequences and give each its first chunk.

        If nothing changed since the last call, no sequence is tried. Taken blocks are not a change:
        they admit no sequence.

        Returns:
            The admitted sequences, and those that found no blocks.
        """
        if not (self.waiting and token_budget.remaining and self._num_places):
            self._awaited_blocks, self._tried_with = 0, ()
            return [], []
        conditions = (
            self.waiting.num_changes,
            self._pool.num_gains,
            self.pending_transfers.num_blocks,
            self.soft_reservations.num_withheld_blocks,
            self._num_places,
            token_budget.remaining,
        )
        recent = now - self._tried_at < MAX_IDLE_SECONDS
        if recent and conditions == self._tried_with and not self._can_unblock:
            return [], []
        self._tried_with, self._tried_at = conditions, now
        return self._try(token_budget, now=now)

    def _try(
        self, token_budget: TokenBudget, *, now: float
    ) -> tuple[list[Sequence], list[Sequence]]:
        """Run one admission round; see `admit`."""
        admitted: list[Sequence] = []
        lacking: list[Sequence] = []
        blocked_on_kv: list[Sequence] = []
        self._awaited_blocks = 0
        num_unblocks = MAX_CANDIDATES if self._can_unblock else 0
        with AdmissionRound(self.waiting, now=now) as admission_round:
            while token_budget.remaining and self._num_places:
                if num_unblocks:
                    self._unblock_one(now=now)
                sequence = self._next(admission_round, num_lacking=len(lacking))
                if sequence is None:
                    break
                shared = self.match(sequence)
                start = self._pool.kinds.of(sequence).num_tokens(len(shared))
                count = 0
                if self._has_blocks(sequence, shared):
                    count = token_budget.next_chunk(sequence, start)
                else:
                    self.soft_reservations.release(sequence)
                    blocked_on_kv.append(sequence)
                was_unblocked = sequence is self._unblocked
                if was_unblocked:
                    self._unblocked = None
                if sequence.is_blocked:
                    if not self._soft_reserve(sequence, shared):
                        token_budget.blocked_on_embedding.pop()
                        num_unblocks -= was_unblocked
                    continue
                if count:
                    self._enter(sequence, shared, reason=admission_round.admit(sequence))
                    token_budget.take(sequence, start, count)
                    admitted.append(sequence)
                    for other in lacking:
                        other.num_bypassed += 1
                elif sequence.num_bypassed < MAX_BYPASSED:
                    lacking.append(sequence)
                else:
                    self._awaited_blocks = self._num_blocks(sequence)
        return admitted, blocked_on_kv

    def revoke_soft_reservations(self) -> list[Sequence]:
        """Revoke soft reservations that no longer fit together; returns their sequences."""
        if not self.soft_reservations.num_blocks:
            return []
        revoked = list(self.soft_reservations.revoke(keep=self._unreservable_blocks))
        for sequence in revoked:
            if sequence.is_blocked:
                self.waiting.block_on_encoder(sequence)
        return revoked

    @property
    def _num_places(self) -> int:
        """Sequences that rows and the running limit let in now."""
        return min(self._batch.num_free_rows, max(self.max_running - len(self._batch), 0))

    @property
    def _watermark(self) -> int:
        """Free blocks that an admission leaves for the growth of running sequences."""
        return self._watermark_blocks if len(self._batch) else 0

    @property
    def _unreservable_blocks(self) -> int:
        """Blocks that no soft reservation may use; the first one of an empty batch may use all."""
        return self._watermark_blocks if len(self._batch) or len(self.soft_reservations) else 0

    @property
    def _can_unblock(self) -> bool:
        """Whether a blocked sequence may get a soft reservation now."""
        return self.waiting.num_blocked > 0 and self.soft_reservations.has_new_capacity(
            keep=self._unreservable_blocks
        )

    def _unblock_one(self, *, now: float) -> None:
        """Unblock one sequence, so that this round examines it; one at a time."""
        if self._unblocked is None:
            bypassed = self.soft_reservations.next_bypassed
            self._unblocked = self.waiting.next_blocked(now=now, before=bypassed)
            if self._unblocked is not None:
                self._unblocked.unblock()

    def _next(self, admission_round: AdmissionRound, *, num_lacking: int) -> Sequence | None:
        """The next candidate: in order, until MAX_CANDIDATES do not fit or all wait for one."""
        sequence = None
        if num_lacking < MAX_CANDIDATES and not self._awaited_blocks:
            sequence = admission_round.next()
        return admission_round.next_reserved() if sequence is None else sequence

    def _has_blocks(self, sequence: Sequence, shared: list[int]) -> bool:
        """Whether the blocks of the whole prompt fit, missing images included."""
        count = self._num_blocks(sequence)
        num_new, reserved = count - len(shared), sequence.reserved_blocks
        if reserved:
            return self._pool.can_take(num_new, shared=shared, reserved=reserved)
        pending = self.pending_transfers
        if sequence.for_peer and not fits(pending.num_blocks, count, maximum=pending.max_blocks):
            return False
        keep = self._watermark + self.soft_reservations.withheld_from(sequence)
        return self._pool.can_take(num_new, shared=shared, keep=keep)

    def _num_blocks(self, sequence: Sequence) -> int:
        """Blocks of its known tokens."""
        return self._pool.kinds.of(sequence).num_blocks(sequence.num_tokens)

    def _soft_reserve(self, sequence: Sequence, shared: list[int]) -> bool:
        """Make a soft reservation, if the sequence's blocks fit beside all others."""
        num_blocks = 0
        if not sequence.reserved_blocks:
            count = self._num_blocks(sequence) - len(shared)
            num_blocks = self._pool.cost(count, shared=shared)
        return self.soft_reservations.reserve(sequence, num_blocks, keep=self._unreservable_blocks)

    def _enter(self, sequence: Sequence, shared: list[int], *, reason: AdmissionReason) -> None:
        if reason is AdmissionReason.AGED:  # it is not preempted at once
            sequence.aged_priority = self._batch.top_priority(least=MIN_PRIORITY)
        needed = self._num_blocks(sequence) - len(shared)
        blocks = self._pool.take(needed, shared=shared, reserved=sequence.reserved_blocks)
        assert blocks is not None, "can_take said that the blocks fit"
        sequence.blocks = shared + blocks
        self.soft_reservations.discard(sequence)
        if sequence.for_peer and not sequence.reserved_blocks:  # else it decodes here
            self.pending_transfers.admit(sequence)
        sequence.reserved_blocks, sequence.num_bypassed = 0, 0
        sequence.num_computed_tokens = self._pool.kinds.of(sequence).num_tokens(len(shared))
        sequence.num_cached_tokens = sequence.num_computed_tokens
        self._batch.add(sequence)


class SoftReservations:
    """Blocks of waiting sequences that request embeddings. Only the AdmissionController uses it.

    Attributes:
        num_blocks: of all soft reservations.
        num_withheld_blocks: of sequences that were bypassed too often; no other may take these.
    """

    def __init__(self, pool: BlockPool, *, max_bypassed: int) -> None:
        self.num_blocks = 0
        self.num_withheld_blocks = 0
        self._pool = pool
        self._max_bypassed = max_bypassed
        self._reserved: dict[Sequence, int] = {}  # in order of their grant
        self._bypassed: Sequence | None = None
        self._refused_at = -1

    def __len__(self) -> int:
        """Sequences that have a soft reservation."""
        return len(self._reserved)

    @property
    def next_bypassed(self) -> Sequence | None:
        """The refused sequence that was bypassed too often: no other is granted a reservation."""
        bypassed = self._bypassed
        return bypassed if bypassed is not None and self._is_bypassed(bypassed) else None

    def has_new_capacity(self, *, keep: int) -> bool:
        """Whether a refused sequence may get a reservation now; none may use `keep` blocks."""
        return not self._reserved or self._num_unreserved(keep) > self._refused_at

    def reserve(self, sequence: Sequence, num_blocks: int, *, keep: int) -> bool:
        """Reserve the `num_blocks` that a sequence lacks; False if they do not fit.

        A sequence with reserved blocks lacks none. The oldest refused sequence is remembered:
        at most `max_bypassed` others may bypass it.
        """
        if sequence.soft_reserved_blocks is not None:
            return True
        if num_blocks > max(self._num_unreserved(keep), 0):
            self._refuse(sequence, keep=keep)
            return False
        if sequence is self._bypassed:
            self._forget_bypassed()
        elif num_blocks and self._bypassed is not None:
            if self._is_bypassed(self._bypassed):
                return False
            self._bypassed.num_bypassed += self._bypassed.arrival < sequence.arrival
        sequence.soft_reserved_blocks = num_blocks
        self.num_blocks += num_blocks
        self._reserved[sequence] = num_blocks if self._is_bypassed(sequence) else 0
        self.num_withheld_blocks += self._reserved[sequence]
        return True

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence that is admitted or leaves."""
        if sequence is self._bypassed:
            self._forget_bypassed()
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Release the sequence's reservation, if it has one."""
        if sequence.soft_reserved_blocks is not None:
            self.num_blocks -= sequence.soft_reserved_blocks
            self.num_withheld_blocks -= self._reserved.pop(sequence)
            sequence.soft_reserved_blocks = None

    def revoke(self, *, keep: int) -> Iterator[Sequence]:
        """Revoke the newest reservations, one by one, until the rest fits."""
        while self.num_blocks > self._pool.num_available:
            sequence = next(
                other for other in reversed(self._reserved) if other.soft_reserved_blocks
            )
            self.release(sequence)
            self._refuse(sequence, keep=keep)
            yield sequence

    def withheld_from(self, sequence: Sequence) -> int:
        """Blocks that are withheld from a sequence for the reservations of others."""
        return self.num_withheld_blocks - self._reserved.get(sequence, 0)

    def _num_unreserved(self, keep: int) -> int:
        return self._pool.num_available - self.num_blocks - keep

    def _refuse(self, sequence: Sequence, *, keep: int) -> None:
        if self._bypassed is None or sequence.arrival < self._bypassed.arrival:
            self._bypassed = sequence
        self._refused_at = self._num_unreserved(keep)

    def _forget_bypassed(self) -> None:
        """Let the sequences that were refused because of it try again."""
        self._bypassed = None
        self._refused_at = -1

    def _is_bypassed(self, sequence: Sequence) -> bool:
        return sequence.num_bypassed >= self._max_bypassed


class PendingKVTransfers:
    """KV blocks that wait for a peer to read them. The scheduler and the engine's handoff write it.

    `num_held_blocks` of them are of prompts that are computed. A prompt of more than `max_blocks`
    is admitted if it is the only one.
    """

    def __init__(self, *, max_blocks: int) -> None:
        self.num_blocks = 0
        self.num_held_blocks = 0
        self.max_blocks = max_blocks

    def admit(self, sequence: Sequence) -> None:
        """Count a sequence that has taken its blocks."""
        sequence.pending_blocks = len(sequence.blocks)
        self.num_blocks += sequence.pending_blocks

    def hold(self, sequence: Sequence) -> None:
        """Count a sequence whose prefill is complete, if it was admitted for a peer."""
        self.num_held_blocks += sequence.pending_blocks

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence whose KV was read, adopted or freed."""
        self.num_blocks -= sequence.pending_blocks
        if sequence.status is Status.HELD:
            self.num_held_blocks -= sequence.pending_blocks
        sequence.pending_blocks = 0
