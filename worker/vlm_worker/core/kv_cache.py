"""KV blocks: their ref counts, and the hash chain of the prefix cache. The runner has the bytes.

    ref > 0   in use by one or more sequences        (a prefix hit shares blocks)
    ref = 0   in the free list, least recently used first:
                  without a hash -> at the head, taken first
                  with a hash    -> cached: a prefix hit reuses it, `take` evicts it
                                    visual: an image is in its tokens, or before them in its chain
    reserved  a number of free blocks for a reservation; no block is chosen yet

Laws (reference: vLLM's block pool; tests/worker/core/test_kv_cache.py checks each of them):

    K1  free + in use = num_blocks - 1; block 0 is null: it pads block tables and is never taken
    K2  a block is in the free list if and only if its ref count is 0
    K3  only full blocks get a hash, and only after their KV was written (`scheduler`)
    K4  a hit never covers the last token of a prompt to prefill (the scheduler's part)
    K5  the blocks of a sequence never change: two equal blocks are not merged later. Pruning is
        the one exception: it replaces blocks once, and the copies are never published (`pruning`)
    K6  a block with wrong KV is never published; if it was, it is removed from the prefix cache
    K7  of two cached blocks of one chain, the later is evicted first: each cached block can be hit
    K8  an image enters a hash by its image key, never by its placeholders alone (`hash_block`)
    K9  while visual blocks exceed their share of the cached ones, the oldest of them is evicted
        first. If none exceeds 100 %, the order is that of least recent use (ADR 0036)
    K10 each prefetched block is unused until a request hits it (used) or it is evicted (wasted)
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from vlm_worker.core.block_kinds import BlockKinds, BlockShape
from vlm_worker.types import ImageItem, Request

NULL_BLOCK = 0


class BlockPool:
    """A fixed number of KV blocks, ref-counted, with an index of prefix hashes.

    `visual_percent` is the share of the cached blocks that visual ones may have (K9). `kinds` are
    of the blocks; without it, all hold `block_size` tokens.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int,
        kinds: BlockKinds | None = None,
        visual_percent: int = 100,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.kinds = kinds or BlockKinds(block_size)
        self.visual_percent = visual_percent
        self.num_reserved = 0
        self.num_cached = 0  # free blocks with a hash
        self.num_evictions = 0  # cached blocks that were taken for other content
        self.num_visual_evictions = 0  # of them, visual ones
        self.num_prefetched = 0  # blocks that a prefetch published
        self.num_prefetched_used = 0  # of them, those that a request has hit
        self.num_prefetched_wasted = 0  # of them, those that were evicted before
        self.num_gains = 0  # events that may let a refused `take` succeed: freed or published
        self._ref = [0] * num_blocks
        self._free: collections.OrderedDict[int, None] = collections.OrderedDict.fromkeys(
            range(1, num_blocks)
        )
        self._is_visual = [False] * num_blocks  # of a block with a hash
        self._cached_visual: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._prefetched: set[int] = set()  # published by a prefetch, and not hit since

    @property
    def capacity(self) -> int:
        """All blocks but the null block."""
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
    def num_cached_visual(self) -> int:
        """Cached blocks that are visual."""
        return len(self._cached_visual)

    @property
    def num_available(self) -> int:
        """Free blocks that are not reserved."""
        return self.num_free - self.num_reserved

    def most_blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` need if none is narrow."""
        return -(-num_tokens // self.block_size)

    # ---- take and release ------------------------------------------------------------------------

    def take(
        self, count: int, *, shared: Sequence[int] = (), reserved: int = 0, keep: int = 0
    ) -> list[int] | None:
        """Take `count` new blocks and a reference to each of `shared`: all or nothing.

        Args:
            count: new blocks; cached ones are evicted, least recently used first (but see K9).
            shared: blocks of a prefix hit, from `match` in the same turn.
            reserved: size of the caller's reservation, which this call ends.
            keep: blocks that must stay available afterwards.
        """
        if not self.can_take(count, shared=shared, reserved=reserved, keep=keep):
            return None
        self.num_reserved -= reserved
        for block in shared:
            self._acquire(block)
        return [self._pop() for _ in range(count)]

    def can_take(
        self, count: int, *, shared: Sequence[int] = (), reserved: int = 0, keep: int = 0
    ) -> bool:
        """Whether `take` with the same arguments succeeds."""
        return self.cost(count, shared=shared) + keep <= self.num_available + reserved

    def cost(self, count: int, *, shared: Sequence[int] = ()) -> int:
        """Free blocks that `take` uses: the new ones, and those of `shared` that are not in use."""
        return count + sum(self._ref[block] == 0 for block in shared)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block. The last block is evicted before the first (K7)."""
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
                if self._is_visual[block]:
                    self._cached_visual[block] = None

    def is_used(self, block: int) -> bool:
        """Whether a block has a reference."""
        return self._ref[block] > 0

    def is_shared(self, block: int) -> bool:
        """Whether a block has more than one reference."""
        return self._ref[block] > 1

    def reserve(self, count: int, *, keep: int = 0) -> bool:
        """Reserve `count` blocks; False if fewer than `count + keep` are available."""
        if count + keep > self.num_available:
            return False
        self.num_reserved += count
        return True

    def unreserve(self, count: int) -> None:
        """End a reservation of `count` blocks."""
        assert count <= self.num_reserved
        self.num_gains += 1
        self.num_reserved -= count

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

    def publish(self, block: int, block_hash: bytes, *, is_visual: bool = False) -> None:
        """Add a full block with written KV to the prefix cache. The first block of a hash stays.

        `is_visual` follows from the hash chain (`is_visual_block`), so it is the same for a hash.
        """
        assert self._ref[block] > 0, f"block {block} has no owner"
        if block_hash not in self._block_of and self._hash_of[block] is None:
            self.num_gains += 1
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            self._is_visual[block] = is_visual

    def count_prefetched(self, blocks: Sequence[int]) -> None:
        """Count the published ones of these blocks as prefetched (K10)."""
        new = {block for block in blocks if self._hash_of[block] is not None} - self._prefetched
        self.num_prefetched += len(new)
        self._prefetched |= new

    def count_used(self, blocks: Sequence[int]) -> None:
        """Count the prefetched ones of the blocks that a request has hit."""
        if self._prefetched:
            used = self._prefetched.intersection(blocks)
            self.num_prefetched_used += len(used)
            self._prefetched -= used

    def invalidate(self, blocks: Sequence[int]) -> None:
        """Remove blocks from the prefix cache: their data may be wrong."""
        for block in blocks:
            if self._hash_of[block] is None:
                continue
            if self._ref[block] == 0:
                self._uncache(block)
                self._free.move_to_end(block, last=False)
            self._unpublish(block)

    def check(self) -> None:
        """Raise AssertionError if the ref counts, the free list and the index disagree (K1, K2)."""
        free = [block for block in range(1, self.num_blocks) if self._ref[block] == 0]
        assert set(free) == set(self._free), "K2: the free list and the ref counts disagree"
        cached = [block for block in self._free if self._hash_of[block] is not None]
        assert self.num_cached == len(cached)
        assert cached == list(self._free)[len(free) - len(cached) :], "a cached block precedes"
        visual = [block for block in cached if self._is_visual[block]]
        assert visual == list(self._cached_visual), "the visual blocks are in another order"
        assert 0 <= self.num_reserved <= self.num_free, "more is reserved than there is"
        assert NULL_BLOCK not in self._free
        assert self._ref[NULL_BLOCK] == 0
        hashed = {block for block, block_hash in enumerate(self._hash_of) if block_hash is not None}
        assert hashed.issuperset(b for b, is_visual in enumerate(self._is_visual) if is_visual)
        blocks = {h: b for b, h in enumerate(self._hash_of) if h is not None}
        assert self._prefetched <= hashed, "K10: a prefetched block has no hash"
        ended = self.num_prefetched_used + self.num_prefetched_wasted
        assert self.num_prefetched == ended + len(self._prefetched), "K10: a block is not counted"
        assert blocks == self._block_of, "the prefix index and the blocks' hashes disagree"

    def _acquire(self, block: int) -> None:
        if self._ref[block] == 0:
            del self._free[block]
            if self._hash_of[block] is not None:
                self._uncache(block)
        self._ref[block] += 1

    def _pop(self) -> int:
        if self._has_too_many_visual():
            block, _ = self._cached_visual.popitem(last=False)
            del self._free[block]
        else:
            block, _ = self._free.popitem(last=False)
        if self._hash_of[block] is not None:
            self.num_evictions += 1
            self.num_visual_evictions += self._is_visual[block]
            self._uncache(block)
            self._unpublish(block)
        self._ref[block] = 1
        return block

    def _has_too_many_visual(self) -> bool:
        """Whether all free blocks are cached, and visual ones have more than their share (K9)."""
        if self.num_cached < len(self._free):
            return False
        return len(self._cached_visual) * 100 > self.num_cached * self.visual_percent

    def _uncache(self, block: int) -> None:
        """Count a block with a hash as free no longer."""
        self.num_cached -= 1
        if self._is_visual[block]:
            self._cached_visual.pop(block, None)

    def _unpublish(self, block: int) -> None:
        block_hash = self._hash_of[block]
        assert block_hash is not None
        self._hash_of[block], self._is_visual[block] = None, False
        del self._block_of[block_hash]
        if block in self._prefetched:
            self._prefetched.remove(block)
            self.num_prefetched_wasted += 1


def root_hash(cache_salt: bytes, adapter: bytes) -> bytes:
    """The parent of a chain's first block: 32 bytes that separate tenants and adapters."""
    digest = hashlib.sha256(b"triptych/prefix/2")
    for field in (cache_salt, adapter):
        digest.update(len(field).to_bytes(4, "little"))
        digest.update(field)
    return digest.digest()


def hash_block(
    parent: bytes, token_ids: np.ndarray, items: Sequence[ImageItem], *, start: int
) -> bytes:
    """The hash of the full block that begins at token `start`.

    `parent` is the hash of the block before it, or the root_hash. `token_ids` are the block's:
    int32 `[block_size]`, C-contiguous. `items` are all images of the sequence, in order.
    """
    digest = hashlib.sha256(parent)
    digest.update(len(token_ids).to_bytes(4, "little"))
    digest.update(token_ids.data)
    end = start + len(token_ids)
    for item in items:
        if item.offset >= end:
            break
        if item.end > start:
            digest.update(len(item.image_key).to_bytes(4, "little"))
            digest.update(item.image_key)
            for number in (item.offset - start, item.num_tokens, *item.grid_thw):
                digest.update(number.to_bytes(8, "little", signed=True))
    return digest.digest()


def extend_hash_chain(
    hashes: list[bytes],
    token_ids: np.ndarray,
    request: Request,
    *,
    shape: BlockShape,
    num_tokens: int,
    whole_prompt: bool = False,
) -> None:
    """Append to `hashes` until every full block of the first `num_tokens` has one.

    `shape` is of the sequence's blocks. A hash covers the number of tokens, thus the kind (M4).
    With `whole_prompt`, it covers the prompt: KV of its first tokens depends on its last ones.
    `token_ids` is int32: at least these tokens of the sequence that answers `request`.
    """
    items = request.items
    for index in range(len(hashes), shape.num_full(num_tokens)):
        start, end = shape.num_tokens(index), shape.num_tokens(index + 1)
        parent = hashes[-1] if hashes else _root_of(request, whole_prompt=whole_prompt)
        block = token_ids[start:end]
        near = items if items and items[-1].end > start else ()
        hashes.append(hash_block(parent, block, near, start=start))


def _root_of(request: Request, *, whole_prompt: bool) -> bytes:
    if not whole_prompt:
        return root_hash(request.cache_salt, request.adapter)
    prompt = request.token_ids[: request.num_prompt_tokens]
    return content_of(dataclasses.replace(request, token_ids=prompt))


def content_of(request: Request) -> bytes:
    """32 bytes that identify the KV of a request for given weights.

    They cover tokens, images, salt and adapter: another prompt or tenant has another value.
    """
    token_ids = np.array(request.token_ids, np.int32)
    return hash_block(
        root_hash(request.cache_salt, request.adapter), token_ids, request.items, start=0
    )


def is_visual_block(items: Sequence[ImageItem], *, end: int) -> bool:
    """Whether a block that ends before token `end` has a visual token, or follows one.

    Text behind an image is visual, too: it can be hit only while the image is cached (K7).
    """
    return bool(items) and items[0].offset < end


@dataclasses.dataclass(slots=True)
class PrefixCounts:
    """Tokens that were looked up, and tokens that a hit covered. The engine is its only writer."""

    queries: int = 0
    hits: int = 0
    visual_queries: int = 0
    visual_hits: int = 0

    def add(self, items: Sequence[ImageItem], *, num_tokens: int, num_cached_tokens: int) -> None:
        """Count one prompt, of whose tokens a hit covered the first `num_cached_tokens`."""
        self.queries += num_tokens
        self.hits += num_cached_tokens
        self.visual_queries += num_visual_tokens(items, end=num_tokens)
        self.visual_hits += num_visual_tokens(items, end=num_cached_tokens)


def num_visual_tokens(items: Sequence[ImageItem], *, end: int) -> int:
    """Number of visual tokens among the first `end` tokens."""
    return sum(min(max(end - item.offset, 0), item.num_tokens) for item in items)
