"""How much KV waits for peers to read it, and when that is too much for more to be made.

    HELD sequences' blocks <= a share of the pool  ─▶ the door is open
                           >                       ─▶ OverloadedError, until peers have read

So prompts that are computed next find blocks, however slow the readers are. No two workers wait for
each other here: decode reserves its room before the prompt is prefilled, so that whoever holds KV
holds it for somebody who can take it, and whoever cannot is gone with its lease.
"""

from __future__ import annotations

from vlm_worker.core.sequence import Sequence


class Unread:
    """Blocks of HELD sequences. Lives on the engine thread."""

    def __init__(self, *, capacity: int, percent: int) -> None:
        self.num_blocks = 0
        self.most_blocks = capacity * percent // 100
        self._held: dict[Sequence, int] = {}

    @property
    def too_much(self) -> bool:
        """Whether nobody may begin a prompt whose KV is to be read by a peer."""
        return self.num_blocks > self.most_blocks

    def add(self, sequence: Sequence) -> None:
        """Its prefill is over, and its KV waits."""
        self._held[sequence] = len(sequence.blocks)
        self.num_blocks += len(sequence.blocks)

    def discard(self, sequence: Sequence) -> None:
        """It is read, adopted, or given up."""
        self.num_blocks -= self._held.pop(sequence, 0)
