"""The block pool's laws K1-K7, for every order of operations."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vlm_worker.core.kv_cache import NULL_BLOCK, BlockPool

NUM_BLOCKS = 9


class PoolMachine(RuleBasedStateMachine):
    """A pool beside a model of it: who holds which blocks, and which hash is whose."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, block_size=4)
        self.holders: list[list[int]] = []
        self.promises: list[int] = []
        self.content: dict[int, bytes] = {}  # what a block was last published as

    @rule(count=st.integers(0, 5), keep=st.integers(0, 2))
    def take(self, count: int, keep: int) -> None:
        available = self.pool.num_available
        blocks = self.pool.take(count, keep=keep)
        assert (blocks is None) == (count + keep > available)
        if blocks is not None:
            self.own(blocks, new=blocks)

    @rule(hashes=st.lists(st.binary(min_size=1, max_size=1), max_size=3), count=st.integers(0, 3))
    def take_with_a_prefix(self, hashes: list[bytes], count: int) -> None:
        shared = self.pool.match(hashes)
        assert [self.content[block] for block in shared] == hashes[: len(shared)]
        before = self.pool.num_free
        blocks = self.pool.take(count, shared=shared)
        if blocks is None:
            assert self.pool.num_free == before, "a refused take took something"
        else:
            assert [self.content[block] for block in shared] == hashes[: len(shared)]
            self.own(shared + blocks, new=blocks)

    def own(self, blocks: list[int], *, new: list[int]) -> None:
        in_use = {block for held in self.holders for block in held}
        assert NULL_BLOCK not in blocks
        assert not in_use & set(new), "a block was given to two"
        for block in new:
            self.content.pop(block, None)  # it will be written anew
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(which))

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data(), block_hash=st.binary(min_size=1, max_size=1))
    def publish(self, data: st.DataObject, block_hash: bytes) -> None:
        block = data.draw(st.sampled_from([b for held in self.holders for b in held]))
        known = self.pool.match([block_hash])
        self.pool.publish(block, block_hash)
        if not known and block not in self.content:
            self.content[block] = block_hash
        if known:
            assert self.pool.match([block_hash]) == known, "K5: a known block was replaced"

    @precondition(lambda self: any(self.holders))
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.holders))
        hashes = [self.content.pop(block) for block in set(held) if block in self.content]
        self.pool.invalidate(held)
        for block_hash in hashes:
            assert self.pool.match([block_hash]) == [], "K6: a forgotten block is still found"

    @rule(count=st.integers(1, 4), keep=st.integers(0, 2))
    def reserve(self, count: int, keep: int) -> None:
        available = self.pool.num_available
        if self.pool.reserve(count, keep=keep):
            assert count + keep <= available
            self.promises.append(count)

    @precondition(lambda self: self.promises)
    @rule(used=st.integers(0, 4))
    def claim_a_promise(self, used: int) -> None:
        reserved = self.promises[-1]
        blocks = self.pool.take(min(used, reserved), reserved=reserved)
        assert blocks is not None, "a promise was broken"
        self.promises.pop()
        self.own(blocks, new=blocks)

    @precondition(lambda self: self.promises)
    @rule()
    def unreserve(self) -> None:
        self.pool.unreserve(self.promises.pop())

    @invariant()
    def the_books_add_up(self) -> None:
        self.pool.check()  # K1, K2
        in_use = {block for held in self.holders for block in held}
        assert self.pool.num_used == len(in_use)
        assert self.pool.num_free == NUM_BLOCKS - 1 - len(in_use)
        assert self.pool.num_reserved == sum(self.promises)


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestPool = PoolMachine.TestCase


class ChainMachine(RuleBasedStateMachine):
    """Sequences that share prefixes; each takes what a hit leaves and publishes all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, block_size=4)
        self.holders: list[list[int]] = []
        self.seen: set[tuple[bytes, ...]] = set()

    @rule(text=st.text("ab", min_size=1, max_size=4))
    def come(self, text: str) -> None:
        chain = tuple(text[: end + 1].encode() for end in range(len(text)))
        shared = self.pool.match(chain)
        new = self.pool.take(len(chain) - len(shared), shared=shared)
        if new is None:
            return
        blocks = shared + new
        for block, block_hash in zip(blocks, chain, strict=True):
            self.pool.publish(block, block_hash)
        self.holders.append(blocks)
        self.seen.add(chain)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(self.holders) - 1))
        self.pool.release(self.holders.pop(which))

    @rule(count=st.integers(1, 3))
    def others_take_and_return(self, count: int) -> None:
        blocks = self.pool.take(count)
        if blocks is not None:
            self.pool.release(blocks)

    @invariant()
    def what_is_cached_can_be_hit(self) -> None:
        for chain in self.seen:
            known = [bool(self.pool.match([block_hash])) for block_hash in chain]
            assert known == sorted(known, reverse=True), "K7: a head went before its tail"


ChainMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestChains = ChainMachine.TestCase


def test_blocks_without_a_hash_are_taken_before_cached_ones() -> None:
    pool = BlockPool(4, block_size=4)
    blocks = pool.take(3)
    assert blocks is not None
    pool.publish(blocks[0], b"a")
    pool.release(blocks)
    assert pool.take(2) == [blocks[1], blocks[2]]
    assert pool.match([b"a"]) == [blocks[0]]


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pool = BlockPool(4, block_size=4)
    blocks = pool.take(3)
    assert blocks is not None
    hashes = [b"a", b"b", b"c"]
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block, block_hash)
    pool.release(blocks)
    assert pool.take(1) == [blocks[2]]
    assert pool.match(hashes) == blocks[:2]
    assert pool.num_evictions == 1


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(3, block_size=4)
    first, second = pool.take(2) or []
    pool.publish(first, b"a")
    pool.publish(second, b"b")
    pool.release([first])
    pool.release([second])
    assert pool.take(0, shared=pool.match([b"a"])) == []  # used again
    pool.release([first])
    assert pool.take(1) == [second]


def test_a_hit_is_not_evicted_by_the_blocks_taken_with_it() -> None:
    pool = BlockPool(3, block_size=4)
    blocks = pool.take(2)
    assert blocks is not None
    pool.publish(blocks[0], b"a")
    pool.release(blocks)
    assert pool.take(2, shared=pool.match([b"a"])) is None
    assert pool.take(1, shared=pool.match([b"a"])) == [blocks[1]]


def test_releasing_twice_is_a_defect() -> None:
    pool = BlockPool(3, block_size=4)
    blocks = pool.take(1)
    assert blocks is not None
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)
