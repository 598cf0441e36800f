"""Which KV block belongs to whom. Numbers only; the bytes live in the runner's buffer.

    ref > 0   in use by one or more sequences        (a prefix hit shares blocks)
    ref = 0   in the free list, least recently used first:
                  without a hash -> at the head, taken first
                  with a hash    -> cached: a prefix hit brings it back, `take` evicts it
    promised  a count, no block yet: room that a reservation may claim

Laws (reference: vLLM's block pool; tests/worker/core/test_blocks.py holds each of them):

    K1  free + in use = num_blocks - 1; block 0 is null, it pads block tables and is never given out
    K2  a block is in the free list if and only if its ref count is 0
    K3  only full blocks get a hash, and only after their KV was written (`publish`)
    K4  a hit never covers the last token of a prompt that is to be prefilled (the scheduler's part)
    K5  a sequence's blocks never change under it: no deduplication after the fact
    K6  what was written wrongly is never published, and forgotten where it was
    K7  of two cached blocks of one chain, the later is evicted first: what is cached can be hit
    K8  a picture enters a hash by its content, never by its placeholders alone (`prefix`'s part)
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

NULL_BLOCK = 0


class BlockPool:
    """A fixed number of KV blocks, ref-counted, with an index of prefix hashes."""

    def __init__(self, num_blocks: int, *, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_promised = 0
        self.num_cached = 0  # of the free ones, those with a hash
        self.num_evictions = 0  # of blocks with a hash, for others
        self.num_gains = 0  # how often something was freed or became known: what a take may need
        self._ref = [0] * num_blocks
        self._free = collections.OrderedDict.fromkeys(range(1, num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * num_blocks

    @property
    def capacity(self) -> int:
        """Blocks that there are, without the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks with ref count 0, cached ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Distinct blocks in use."""
        return self.capacity - self.num_free

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now without breaking a promise."""
        return self.num_free - self.num_promised

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens`."""
        return -(-num_tokens // self.block_size)

    # ---- taking and giving back ------------------------------------------------------------------

    def take(
        self, count: int, *, shared: Sequence[int] = (), promised: int = 0, keep: int = 0
    ) -> list[int] | None:
        """Take `count` new blocks and a reference to each of `shared`: all of it, or None.

        Args:
            count: new blocks; cached ones are evicted, least recently used first.
            shared: blocks of a prefix hit, from `match` in the same turn.
            promised: size of the caller's own promise, which this uses up as a whole.
            keep: blocks that have to stay available afterwards.
        """
        if not self.can_take(count, shared=shared, promised=promised, keep=keep):
            return None
        self.num_promised -= promised
        for block in shared:
            self._acquire(block)
        return [self._pop() for _ in range(count)]

    def can_take(
        self, count: int, *, shared: Sequence[int] = (), promised: int = 0, keep: int = 0
    ) -> bool:
        """Whether `take` would give them."""
        return self.cost(count, shared=shared) + keep <= self.num_available + promised

    def cost(self, count: int, *, shared: Sequence[int] = ()) -> int:
        """Free blocks that `take` would use up: the new ones, and those of `shared` not in use."""
        return count + sum(self._ref[block] == 0 for block in shared)

    def release(self, blocks: Sequence[int]) -> None:
        """Give one reference to each block back; a tail is evicted before its head."""
        self.num_gains += 1
        for block in reversed(blocks):
            assert self._ref[block] > 0, f"block {block} released twice"
            self._ref[block] -= 1
            if self._ref[block]:
                continue
            self._free[block] = None
            if self._hash_of[block] is None:
                self._free.move_to_end(block, last=False)
            else:
                self.num_cached += 1

    def promise(self, count: int, *, keep: int = 0) -> bool:
        """Set room for `count` blocks aside; False where there is none."""
        if count + keep > self.num_available:
            return False
        self.num_promised += count
        return True

    def unpromise(self, count: int) -> None:
        """Take a promise back."""
        assert count <= self.num_promised
        self.num_gains += 1
        self.num_promised -= count

    # ---- prefix cache ----------------------------------------------------------------------------

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix of a hash chain. Changes nothing."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, block: int, block_hash: bytes) -> None:
        """Make a full block, whose KV is written, known. The first publisher of a hash wins."""
        assert self._ref[block] > 0, f"block {block} is nobody's"
        if block_hash not in self._block_of and self._hash_of[block] is None:
            self.num_gains += 1
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def forget(self, blocks: Sequence[int]) -> None:
        """Make blocks unknown: what they hold may be wrong."""
        for block in blocks:
            block_hash = self._hash_of[block]
            if block_hash is None:
                continue
            self._hash_of[block] = None
            del self._block_of[block_hash]
            if self._ref[block] == 0:
                self.num_cached -= 1
                self._free.move_to_end(block, last=False)

    def check(self) -> None:
        """Raise AssertionError where the pool's own account does not add up (K1, K2)."""
        free = [block for block in range(1, self.num_blocks) if self._ref[block] == 0]
        assert set(free) == set(self._free), "K2: the free list and the ref counts disagree"
        assert self.num_cached == sum(self._hash_of[block] is not None for block in free)
        assert 0 <= self.num_promised <= self.num_free, "more is promised than there is"
        assert NULL_BLOCK not in self._free
        assert self._ref[NULL_BLOCK] == 0
        known = {h: b for b, h in enumerate(self._hash_of) if h is not None}
        assert known == self._block_of, "the prefix index and the blocks' hashes disagree"

    def _acquire(self, block: int) -> None:
        if self._ref[block] == 0:
            del self._free[block]
            self.num_cached -= self._hash_of[block] is not None
        self._ref[block] += 1

    def _pop(self) -> int:
        block, _ = self._free.popitem(last=False)
        block_hash = self._hash_of[block]
        if block_hash is not None:
            self._hash_of[block] = None
            del self._block_of[block_hash]
            self.num_cached -= 1
            self.num_evictions += 1
        self._ref[block] = 1
        return block
