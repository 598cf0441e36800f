"""Who enters the running batch, and with which blocks. Pure.

ready      KV is complete already (received, adopted): first, for only by finishing they free it
waiting    if the whole prompt fits, its pictures included; if not, others may pass, so often;
           who has blocks set aside passes however often, for nobody else can use these
asking     whoever lacks a picture asks for it if its blocks fit beside those of all who asked
           (`claims`); if not it sleeps, and is looked at again when there is more room
"""

from __future__ import annotations

import itertools
from typing import Final

from vlm_worker.core.blocks import BlockPool
from vlm_worker.core.chunks import PromptShares
from vlm_worker.core.claims import Claims
from vlm_worker.core.queues import Waiting, Wave
from vlm_worker.core.sequence import MIN_PRIORITY, Sequence
from vlm_worker.core.table import SequenceTable
from vlm_worker.core.unread import Unread
from vlm_worker.core.waves import AdmissionReason, AdmissionRules

MAX_OVERTAKEN: Final = 64
"""So many others may enter before one that lacks blocks or budget; then it is waited for."""

MAX_TRIES: Final = 4
"""So many waiting sequences that lack blocks or budget are looked at in one step."""

MAX_IDLE_SECONDS: Final = 0.1
"""So long nobody is tried again where nothing changed; whoever has aged meanwhile is first then."""


class Entrance:
    """What stands between the queue and the table. Used by the scheduler alone.

    Attributes:
        waiting: the queue.
        ready: who enters before it, in order.
        max_running: sequences that may run; whoever runs already goes on.
        unread: bounds what is computed for peers.
    """

    def __init__(
        self,
        pool: BlockPool,
        table: SequenceTable,
        *,
        watermark_blocks: int,
        unread: Unread,
        rules: AdmissionRules,
    ) -> None:
        self.waiting = Waiting(rules)
        self.ready: dict[Sequence, None] = {}
        self.max_running = len(table.sequences)
        self.unread = unread
        self._pool = pool
        self._table = table
        self._watermark_blocks = watermark_blocks
        self._awaited_blocks = 0
        self._claims = Claims(pool, max_overtaken=MAX_OVERTAKEN)
        self._woken: Sequence | None = None
        self._tried_with: tuple[int, ...] = ()
        self._tried_at = 0.0

    @property
    def kept_blocks(self) -> int:
        """Blocks that a reservation leaves: the watermark, and what somebody was passed by for."""
        return self._watermark + max(self._awaited_blocks, self._claims.num_kept_blocks)

    @property
    def claimed_blocks(self) -> int:
        """Blocks that those who ask for pictures count on."""
        return self._claims.num_blocks

    def match(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest prefix hit that leaves a token to compute (K4)."""
        pool = self._pool
        return pool.match(sequence.hashes[: (sequence.num_tokens - 1) // pool.block_size])

    def enter_ready(self) -> None:
        """Let those enter that have all their blocks."""
        if not self.ready:
            return
        for sequence in list(itertools.islice(self.ready, self._num_places)):
            del self.ready[sequence]
            self._table.enter(sequence)

    def may_ask(self, sequence: Sequence) -> bool:
        """Whether a sequence that comes now may ask for its pictures at once; it has a claim then.

        Nobody goes before those who sleep.
        """
        shared = self.match(sequence)
        if self.waiting.num_asleep or not self._has_blocks(sequence, shared):
            return False
        return self._claim(sequence, shared)

    def let_go(self, sequence: Sequence) -> None:
        """A sequence leaves the queue, or the batch."""
        self._claims.discard(sequence)
        if sequence is self._woken:
            self._woken = None

    def admit(self, shares: PromptShares, *, now: float) -> tuple[list[Sequence], list[Sequence]]:
        """Let waiting sequences enter and give them their first chunk.

        Blocks come before embeddings: who finds no blocks asks for nothing. Where nothing changed
        since the last time, nobody could enter, and nobody is tried.

        Returns:
            Who entered; and who found no blocks.
        """
        if not (self.waiting and shares.left and self._num_places):
            self._awaited_blocks, self._tried_with = 0, ()
            return [], []
        conditions = self._conditions(shares)
        recent = now - self._tried_at < MAX_IDLE_SECONDS
        if recent and conditions == self._tried_with and not self._may_wake:
            return [], []
        self._tried_with, self._tried_at = conditions, now
        return self._try(shares, now=now)

    def _conditions(self, shares: PromptShares) -> tuple[int, ...]:
        """What decides who may enter, time apart. Blocks that were taken let nobody enter."""
        return (
            self.waiting.num_changes,
            self._pool.num_gains,
            self.unread.num_blocks,
            self._claims.num_kept_blocks,
            self._num_places,
            shares.left,
        )

    def _try(self, shares: PromptShares, *, now: float) -> tuple[list[Sequence], list[Sequence]]:
        """A wave; see `admit`."""
        admitted: list[Sequence] = []
        lacking: list[Sequence] = []
        roomless: list[Sequence] = []
        self._awaited_blocks = 0
        num_wakes = MAX_TRIES if self._may_wake else 0
        with self.waiting.wave(now=now) as wave:
            while shares.left and self._num_places:
                if num_wakes:
                    self._wake_one(now=now)
                sequence = self._next(wave, num_lacking=len(lacking))
                if sequence is None:
                    break
                shared = self.match(sequence)
                start = len(shared) * self._pool.block_size
                count = 0
                if self._has_blocks(sequence, shared):
                    count = shares.offer(sequence, start)
                else:
                    self._claims.release(sequence)
                    roomless.append(sequence)
                was_woken = sequence is self._woken
                if was_woken:
                    self._woken = None
                if sequence.stalled:
                    if not self._claim(sequence, shared):
                        shares.stalled.pop()
                        num_wakes -= was_woken
                    continue
                if count:
                    self._enter(sequence, shared, reason=wave.admit(sequence))
                    shares.take(sequence, start, count)
                    admitted.append(sequence)
                    for other in lacking:
                        other.overtaken += 1
                elif sequence.overtaken < MAX_OVERTAKEN:
                    lacking.append(sequence)
                else:
                    self._awaited_blocks = self._pool.blocks_for(sequence.num_tokens)
        return admitted, roomless

    def revoke_claims(self) -> list[Sequence]:
        """Take back what claims can no longer have, all of them together; returns whose."""
        if not self._claims.num_blocks:
            return []
        revoked = list(self._claims.revoke(keep=self._unclaimable))
        for sequence in revoked:
            if sequence.stalled:
                self.waiting.put_to_sleep(sequence)
        return revoked

    @property
    def _num_places(self) -> int:
        """Sequences that may enter now, as far as their number goes."""
        return min(self._table.num_free_rows, max(self.max_running - len(self._table), 0))

    @property
    def _watermark(self) -> int:
        """Blocks that whoever comes new leaves to those who run, for their growth."""
        return self._watermark_blocks if len(self._table) else 0

    @property
    def _unclaimable(self) -> int:
        """Blocks that no claim may count on; the first claim of an empty batch may have all."""
        return self._watermark_blocks if len(self._table) or len(self._claims) else 0

    @property
    def _may_wake(self) -> bool:
        """Whether somebody sleeps who may be granted a claim now."""
        return self.waiting.num_asleep > 0 and self._claims.has_new_room(keep=self._unclaimable)

    def _wake_one(self, *, now: float) -> None:
        """Have one of those who sleep looked at; one at a time."""
        if self._woken is None:
            self._woken = self.waiting.first_asleep(now=now, before=self._claims.next)
            if self._woken is not None:
                self._woken.wake()

    def _next(self, wave: Wave, *, num_lacking: int) -> Sequence | None:
        """Who is to be tried: in order, until enough lack something or one is waited for."""
        sequence = None
        if num_lacking < MAX_TRIES and not self._awaited_blocks:
            sequence = wave.next()
        return wave.next_reserved() if sequence is None else sequence

    def _has_blocks(self, sequence: Sequence, shared: list[int]) -> bool:
        """Whether there is room for the whole prompt, pictures that are not here included."""
        num_blocks = self._pool.blocks_for(sequence.num_tokens)
        if _is_for_peer(sequence) and not self.unread.has_room(num_blocks):
            return False
        return self._pool.can_take(
            num_blocks - len(shared),
            shared=shared,
            promised=sequence.promised,
            keep=0 if sequence.promised else self._watermark + self._claims.kept_from(sequence),
        )

    def _claim(self, sequence: Sequence, shared: list[int]) -> bool:
        """Let a sequence ask for its pictures, if its blocks fit beside all claims."""
        num_blocks = 0
        if not sequence.promised:
            count = self._pool.blocks_for(sequence.num_tokens) - len(shared)
            num_blocks = self._pool.cost(count, shared=shared)
        return self._claims.claim(sequence, num_blocks, keep=self._unclaimable)

    def _raise(self, sequence: Sequence) -> None:
        """Make one that waited for long as important as any that runs: it keeps what it gets."""
        sequence.raised_priority = self._table.top_priority(least=MIN_PRIORITY)

    def _enter(self, sequence: Sequence, shared: list[int], *, reason: AdmissionReason) -> None:
        if reason is AdmissionReason.AGED:
            self._raise(sequence)
        needed = self._pool.blocks_for(sequence.num_tokens) - len(shared)
        blocks = self._pool.take(needed, shared=shared, promised=sequence.promised)
        assert blocks is not None, "there was room a moment ago"
        sequence.blocks = shared + blocks
        self._claims.discard(sequence)
        if _is_for_peer(sequence):
            self.unread.admit(sequence)
        sequence.promised, sequence.overtaken = 0, 0
        sequence.num_computed_tokens = len(shared) * self._pool.block_size
        sequence.num_cached_tokens = sequence.num_computed_tokens
        self._table.enter(sequence)


def _is_for_peer(sequence: Sequence) -> bool:
    """Whether a peer is to read its KV; where blocks were set aside, it is to go on here."""
    return sequence.hold and not sequence.promised
