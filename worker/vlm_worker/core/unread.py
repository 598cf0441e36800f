"""How much KV is for peers to read, and when that is too much for more to be made. Pure.

    admitted, and HELD in the end <= a share of the pool   a prompt for a peer may enter
                                  >                        it waits, until peers have read

So prompts that nobody has to read find blocks, however slow the readers are. One prompt that is
larger than the share enters alone. No two workers wait for each other here: decode reserves its
room before the prompt is prefilled, so that whoever holds KV holds it for somebody who can take it,
and whoever cannot is gone with its lease.
"""

from __future__ import annotations

from vlm_worker.core.sequence import Sequence


class Unread:
    """Blocks of sequences for peers. Written by the scheduler, and by who hands over.

    Attributes:
        num_blocks: of those admitted, computed or not.
        num_held_blocks: of those whose prefill is over.
        most_blocks: so many may be.
    """

    def __init__(self, *, most_blocks: int) -> None:
        self.num_blocks = 0
        self.num_held_blocks = 0
        self.most_blocks = most_blocks
        self._admitted: dict[Sequence, int] = {}
        self._held: set[Sequence] = set()

    def has_room(self, num_blocks: int) -> bool:
        """Whether a prompt of so many blocks may be computed for a peer."""
        return not self._admitted or self.num_blocks + num_blocks <= self.most_blocks

    @property
    def too_much(self) -> bool:
        """Whether so much is computed and not read that none may even wait for its turn."""
        return self.num_held_blocks > self.most_blocks

    def admit(self, sequence: Sequence) -> None:
        """It has its blocks."""
        assert self.has_room(len(sequence.blocks))
        self._admitted[sequence] = len(sequence.blocks)
        self.num_blocks += len(sequence.blocks)

    def hold(self, sequence: Sequence) -> None:
        """Its prefill is over, and its KV waits, if it is for a peer."""
        if sequence in self._admitted:
            self._held.add(sequence)
            self.num_held_blocks += self._admitted[sequence]

    def discard(self, sequence: Sequence) -> None:
        """It is read, adopted, or given up."""
        num_blocks = self._admitted.pop(sequence, 0)
        self.num_blocks -= num_blocks
        if sequence in self._held:
            self._held.remove(sequence)
            self.num_held_blocks -= num_blocks
