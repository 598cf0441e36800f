"""Bounds the KV blocks that wait for a peer to read them: backpressure on prefill. Pure.

    blocks of admitted and HELD prompts for peers <= limit    a prompt for a peer may enter
                                                  >  limit    it waits until peers have read

So prompts that no peer reads find free blocks, even if peers read slowly. A prompt that is larger
than the limit enters if it is the only one. Two workers never wait for each other: decode reserves
its KV blocks before prefill computes the prompt. If decode fails, the lease on the KV expires.
"""

from __future__ import annotations

from vlm_worker.core.sequence import Sequence


class PendingKVTransfers:
    """Blocks of sequences for peers. The scheduler and the engine's handoff write them.

    Attributes:
        num_blocks: blocks of all admitted sequences for peers, HELD ones included.
        num_held_blocks: blocks of the sequences whose prefill is complete.
        max_blocks: limit on `num_blocks`.
    """

    def __init__(self, *, max_blocks: int) -> None:
        self.num_blocks = 0
        self.num_held_blocks = 0
        self.max_blocks = max_blocks
        self._admitted: dict[Sequence, int] = {}
        self._held: set[Sequence] = set()

    def has_capacity(self, num_blocks: int) -> bool:
        """Whether a prompt of `num_blocks` may be computed for a peer."""
        return not self._admitted or self.num_blocks + num_blocks <= self.max_blocks

    @property
    def is_over_limit(self) -> bool:
        """Whether the computed and unread KV exceeds the limit: new prompts may not even queue."""
        return self.num_held_blocks > self.max_blocks

    def admit(self, sequence: Sequence) -> None:
        """Count a sequence that has taken its blocks."""
        assert self.has_capacity(len(sequence.blocks))
        self._admitted[sequence] = len(sequence.blocks)
        self.num_blocks += len(sequence.blocks)

    def hold(self, sequence: Sequence) -> None:
        """Count a sequence whose prefill is complete, if it was admitted for a peer."""
        if sequence in self._admitted:
            self._held.add(sequence)
            self.num_held_blocks += self._admitted[sequence]

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence whose KV was read, adopted or freed."""
        num_blocks = self._admitted.pop(sequence, 0)
        self.num_blocks -= num_blocks
        if sequence in self._held:
            self._held.remove(sequence)
            self.num_held_blocks -= num_blocks
