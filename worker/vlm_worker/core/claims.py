"""Which of the waiting may ask for pictures, and pin them: as many as could run at once. Pure.

    free blocks  |- claimed by A -|- by B -|-- room --|     C needs more than the room: it sleeps

A claim takes no block: whoever needs no picture passes. What claims can no longer have together is
revoked, so that nobody pins a picture for which there are no blocks (E4).

Laws (tests/worker/core/test_claims.py):

    what is claimed is free                     after every step
    whoever sleeps is woken                     when the room grew, or nobody has a claim any more
    whoever was passed by too often is next     no other claim is granted, and its own is kept
"""

from __future__ import annotations

from collections.abc import Iterator

from vlm_worker.core.blocks import BlockPool
from vlm_worker.core.sequence import Sequence


class Claims:
    """Blocks of waiting sequences that ask for pictures. Used by the entrance alone.

    Attributes:
        num_blocks: of all claims.
        num_kept_blocks: of those whose sequences were passed by too often: nobody else takes these.
    """

    def __init__(self, pool: BlockPool, *, max_overtaken: int) -> None:
        self.num_blocks = 0
        self.num_kept_blocks = 0
        self._pool = pool
        self._max_overtaken = max_overtaken
        self._kept: dict[Sequence, int] = {}  # who has a claim, the latest last
        self._passed: Sequence | None = None
        self._room_refused = -1

    def __len__(self) -> int:
        """Sequences that have a claim."""
        return len(self._kept)

    @property
    def next(self) -> Sequence | None:
        """Who was refused and passed by too often: nobody else is granted a claim."""
        passed = self._passed
        return passed if passed is not None and self._is_overtaken(passed) else None

    def has_new_room(self, *, keep: int) -> bool:
        """Whether one of those who were refused may be granted a claim now.

        Args:
            keep: blocks that no claim may count on.
        """
        return not self._kept or self._room(keep) > self._room_refused

    def claim(self, sequence: Sequence, num_blocks: int, *, keep: int) -> bool:
        """Count `num_blocks` that a sequence lacks among the claims, if there is room for them.

        One that has its blocks set aside lacks none. The oldest one that is refused is remembered:
        others may pass it so often.
        """
        if sequence.claim is not None:
            return True
        if num_blocks > max(self._room(keep), 0):
            self._refuse(sequence, keep=keep)
            return False
        if sequence is self._passed:
            self._forget_passed()
        elif num_blocks and self._passed is not None:
            if self._is_overtaken(self._passed):
                return False
            self._passed.overtaken += self._passed.arrival < sequence.arrival
        sequence.claim = num_blocks
        self.num_blocks += num_blocks
        self._kept[sequence] = num_blocks if self._is_overtaken(sequence) else 0
        self.num_kept_blocks += self._kept[sequence]
        return True

    def discard(self, sequence: Sequence) -> None:
        """The sequence enters, or leaves."""
        if sequence is self._passed:
            self._forget_passed()
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """The sequence lets go of its pictures, if it has any."""
        if sequence.claim is not None:
            self.num_blocks -= sequence.claim
            self.num_kept_blocks -= self._kept.pop(sequence)
            sequence.claim = None

    def revoke(self, *, keep: int) -> Iterator[Sequence]:
        """Take back the latest claims, one by one, until the rest can all be had."""
        while self.num_blocks > self._pool.num_available:
            sequence = next(other for other in reversed(self._kept) if other.claim)
            self.release(sequence)
            self._refuse(sequence, keep=keep)
            yield sequence

    def kept_from(self, sequence: Sequence) -> int:
        """Blocks that a sequence leaves to others who have a claim."""
        return self.num_kept_blocks - self._kept.get(sequence, 0)

    def _room(self, keep: int) -> int:
        return self._pool.num_available - self.num_blocks - keep

    def _refuse(self, sequence: Sequence, *, keep: int) -> None:
        if self._passed is None or sequence.arrival < self._passed.arrival:
            self._passed = sequence
        self._room_refused = self._room(keep)

    def _forget_passed(self) -> None:
        """Others that were refused because of it may try again."""
        self._passed = None
        self._room_refused = -1

    def _is_overtaken(self, sequence: Sequence) -> bool:
        return sequence.overtaken >= self._max_overtaken
