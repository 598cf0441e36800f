"""Chunked prefill: the tokens of each prompt in the next step. Pure.

tokens    t t t [image 0: 6 tokens] t t [image 1] t
start     ^ remaining ............................|
chunk     |---- budget ----|                            may end inside an available image
          |---|                                         ends before a missing image

Prompts share the token budget in two passes. First each gets what it can use, a long prompt up to a
cap. Then the rest goes to the prompts that the cap limited, in the same order.
"""

from __future__ import annotations

from vlm_worker.core.block_kinds import BlockKinds
from vlm_worker.core.sequence import Sequence

ONE_KIND = BlockKinds(1)
"""Blocks after any of whose tokens a chunk may end."""


def chunk_of(
    sequence: Sequence,
    start: int,
    *,
    budget: int,
    whole_images: bool,
    kinds: BlockKinds = ONE_KIND,
) -> tuple[int, bool]:
    """The tokens of the chunk at `start`, and whether a missing embedding ends it.

    With `whole_images`, an image, or the rest of it, runs in one chunk. So does a KV block in 4
    bits (law M5 of `block_kinds`), and a prompt whose tokens see each other both ways.
    """
    size = min(sequence.num_computable_tokens - start, budget)
    if sequence.whole_prompt and start < sequence.request.num_prompt_tokens:
        if any(
            embedding is None and item.end > start
            for item, embedding in zip(sequence.items, sequence.embeddings, strict=True)
        ):
            return 0, True
        return (size if start + size >= sequence.request.num_prompt_tokens else 0), False
    for item, embedding in zip(sequence.items, sequence.embeddings, strict=True):
        if item.offset >= start + size:
            break
        if item.end <= start:
            continue
        if embedding is None:
            return max(item.offset - start, 0), True
        if whole_images and item.end > start + size:
            return max(item.offset - start, 0), False
    if kinds.min_chunk > 1:
        size = kinds.of(sequence).whole_end(start + size) - start
    return size, False


class TokenBudget:
    """The prompt tokens of one step, and the chunks that use them.

    Attributes:
        remaining: tokens that no prompt has yet.
        chunks: sequences and their number of tokens, in order.
        blocked_on_embedding: sequences whose next token lacks its embedding, and that token.
    """

    def __init__(
        self,
        budget: int,
        *,
        cap: int | None,
        whole_images: bool,
        kinds: BlockKinds = ONE_KIND,
    ) -> None:
        self.remaining = budget
        self.chunks: list[tuple[Sequence, int]] = []
        self.blocked_on_embedding: list[tuple[Sequence, int]] = []
        self._cap = budget if cap is None else cap
        self._whole_images, self._kinds = whole_images, kinds
        self._capped: list[tuple[int, int]] = []  # index into chunks, start

    def next_chunk(self, sequence: Sequence, start: int) -> int:
        """Tokens from `start` that the sequence may compute; if an embedding is missing, block it.

        If an image or a block may not be split, its chunk may exceed the cap.
        """
        if sequence.is_blocked or not self.remaining:
            return 0
        size, is_missing = self._chunk(sequence, start, min(self.remaining, self._cap))
        if not size and not is_missing and self._cap < self.remaining:
            size, is_missing = self._chunk(sequence, start, self.remaining)
        if not size and is_missing:
            sequence.is_blocked = True
            self.blocked_on_embedding.append((sequence, start))
        return size

    def take(self, sequence: Sequence, start: int, count: int) -> None:
        """Assign a chunk of `count` tokens from `start` to the sequence."""
        if self._cap < self.remaining and start + count < sequence.num_tokens:
            self._capped.append((len(self.chunks), start))
        self.chunks.append((sequence, count))
        self.remaining -= count

    def distribute_rest(self) -> None:
        """Assign the remaining tokens to the prompts that the cap limited."""
        for index, start in self._capped:
            if not self.remaining:
                return
            sequence, count = self.chunks[index]
            size, _ = self._chunk(sequence, start, count + self.remaining)
            self.chunks[index] = sequence, size
            self.remaining -= size - count

    def _chunk(self, sequence: Sequence, start: int, budget: int) -> tuple[int, bool]:
        return chunk_of(
            sequence, start, budget=budget, whole_images=self._whole_images, kinds=self._kinds
        )
