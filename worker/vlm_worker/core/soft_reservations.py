"""Soft reservations: which waiting sequences may request and pin embeddings. Pure.

    free blocks  |- A reserves -|- B reserves -|-- unreserved --|     C needs more: it is blocked

A soft reservation takes no block: a sequence without images bypasses it. Reservations that no
longer fit together are revoked, so that no sequence pins an image without blocks for it (E4).

Laws (tests/worker/core/test_soft_reservations.py):

    reserved blocks are free                    after every step
    a blocked sequence is unblocked             if unreserved blocks grew, or no reservation is left
    a sequence bypassed too often is next       no other reservation is granted; its own is withheld
"""

from __future__ import annotations

from collections.abc import Iterator

from vlm_worker.core.kv_cache import BlockPool
from vlm_worker.core.sequence import Sequence


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
        """Whether a refused sequence may be granted a reservation now.

        Args:
            keep: blocks that no reservation may use.
        """
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
