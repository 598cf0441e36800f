"""The share of visual blocks in the prefix cache (K9): its laws, and a flood of images."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from worker.answers import make_image
from worker.core.simulation import BLOCK_SIZE, Simulation, Work, expected, works

from vlm_worker.core.block_kinds import BlockKinds
from vlm_worker.core.kv_cache import BlockPool, extend_hash_chain, is_visual_block
from vlm_worker.testing import IMAGE_TOKEN
from vlm_worker.types import ImageItem, Request, RequestKey, SamplingParams

NUM_BLOCKS = 9
PERCENTS = st.sampled_from([0, 1, 34, 50, 99, 100])


class PlainPool:
    """One list of free blocks: without a hash at the head, then by last use, whatever their kind.

    It chooses by K9 written out, in time linear in the pool. At 100 % it looks at no kind.
    """

    def __init__(self, *, percent: int) -> None:
        self.percent = percent
        self.free = list(range(1, NUM_BLOCKS))
        self.ref = [0] * NUM_BLOCKS
        self.hashes: dict[int, bytes] = {}
        self.kinds: dict[bytes, bool] = {}
        self.evicted: list[bytes] = []

    def choose(self) -> int:
        cached = [block for block in self.free if block in self.hashes]
        visual = [block for block in cached if self.kinds[self.hashes[block]]]
        if self.percent == 100 or len(cached) < len(self.free):
            return self.free[0]
        over = visual and len(visual) / len(cached) > self.percent / 100
        return visual[0] if over else self.free[0]

    def take(self, count: int, shared: Sequence[int]) -> list[int] | None:
        if count + sum(self.ref[block] == 0 for block in shared) > len(self.free):
            return None
        for block in shared:
            if self.ref[block] == 0:
                self.free.remove(block)
            self.ref[block] += 1
        taken = []
        for _ in range(count):
            block = self.choose()
            self.free.remove(block)
            if block in self.hashes:
                self.evicted.append(self.hashes.pop(block))
            self.ref[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):
            self.ref[block] -= 1
            if self.ref[block] == 0:
                self.free.insert(len(self.free) if block in self.hashes else 0, block)

    def match(self, hashes: Sequence[bytes]) -> Iterator[int]:
        blocks = {block_hash: block for block, block_hash in self.hashes.items()}
        for block_hash in hashes:
            if block_hash not in blocks:
                return
            yield blocks[block_hash]

    def publish(self, block: int, block_hash: bytes, *, is_visual: bool) -> None:
        if block not in self.hashes and block_hash not in self.hashes.values():
            self.hashes[block], self.kinds[block_hash] = block_hash, is_visual

    def invalidate(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self.hashes.pop(block, None) is not None and self.ref[block] == 0:
                self.free.remove(block)
                self.free.insert(0, block)


def chain_of(text: str) -> list[tuple[bytes, bool]]:
    """A hash per block, and whether it is visual. `i` is a block with an image."""
    prefixes = [text[: end + 1] for end in range(len(text))]
    return [(prefix.encode(), "i" in prefix) for prefix in prefixes]


class QuotaMachine(RuleBasedStateMachine):
    """The pool beside the plain one: they do the same in every order of operations."""

    @initialize(percent=PERCENTS)
    def build(self, percent: int) -> None:
        self.pool = BlockPool(NUM_BLOCKS, block_size=4, visual_percent=percent)
        self.plain = PlainPool(percent=percent)
        self.holders: list[list[int]] = []
        self.seen: set[str] = set()
        self.is_hittable = True

    @rule(text=st.text("abi", min_size=1, max_size=4), num_published=st.integers(0, 4))
    def come(self, text: str, num_published: int) -> None:
        chain = chain_of(text)
        shared = self.pool.match([block_hash for block_hash, _ in chain])
        assert shared == list(self.plain.match([block_hash for block_hash, _ in chain]))
        count = len(chain) - len(shared)
        new = self.pool.take(count, shared=shared)
        assert new == self.plain.take(count, shared)
        if new is None:
            return
        for block, (block_hash, is_visual) in list(zip(shared + new, chain, strict=True))[
            : max(num_published, len(shared))
        ]:
            self.pool.publish(block, block_hash, is_visual=is_visual)
            self.plain.publish(block, block_hash, is_visual=is_visual)
        self.holders.append(shared + new)
        self.seen.add(text)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(blocks)
        self.plain.release(blocks)

    @rule(count=st.integers(1, 3))
    def others_take_and_return(self, count: int) -> None:
        blocks = self.pool.take(count)
        assert blocks == self.plain.take(count, ())
        if blocks is not None:
            self.pool.release(blocks)
            self.plain.release(blocks)

    @rule(block=st.integers(1, NUM_BLOCKS - 1))
    def invalidate(self, block: int) -> None:
        self.is_hittable = False  # blocks behind an invalid one stay, so that K7 says nothing
        self.pool.invalidate([block])
        self.plain.invalidate([block])

    @invariant()
    def both_have_the_same_books(self) -> None:
        self.pool.check()
        evicted = self.plain.evicted
        assert self.pool.num_evictions == len(evicted)
        assert self.pool.num_visual_evictions == sum(self.plain.kinds[one] for one in evicted)
        cached = [self.plain.hashes[b] for b in self.plain.free if b in self.plain.hashes]
        assert self.pool.num_cached == len(cached)
        assert self.pool.num_cached_visual == sum(self.plain.kinds[one] for one in cached)

    @invariant()
    def what_is_cached_can_be_hit(self) -> None:
        for text in self.seen if self.is_hittable else ():
            known = [bool(self.pool.match([block_hash])) for block_hash, _ in chain_of(text)]
            assert known == sorted(known, reverse=True), "K7: a head went before its tail"


QuotaMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestQuota = QuotaMachine.TestCase


@given(works(), st.integers(18, 60), PERCENTS, st.integers(1, 3))
def test_together_equals_alone_and_every_block_is_returned(
    todo: list[Work], num_blocks: int, percent: int, max_num_seqs: int
) -> None:
    run = Simulation(
        num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=24, visual_percent=percent
    )
    run.run(todo)
    assert run.answers == expected(todo)
    assert run.pool.num_free == run.pool.capacity
    has_images = any(work.images for work in todo)
    assert has_images or not run.pool.num_cached_visual


@given(st.integers(0, 20), st.integers(1, 9), st.integers(1, 30))
def test_a_block_is_visual_if_its_hash_depends_on_the_image(
    offset: int, num_visual: int, num_after: int
) -> None:
    def hashes(number: int) -> list[bytes]:
        image = make_image(number, num_tokens=num_visual)
        item = ImageItem(image.image_key, offset, num_visual, image.grid_thw)
        token_ids = (*range(20, 20 + offset), *[IMAGE_TOKEN] * num_visual, *[7] * num_after)
        key = RequestKey("one", 0)
        request = Request(key, token_ids, len(token_ids), SamplingParams(1), (item,))
        found: list[bytes] = []
        extend_hash_chain(
            found,
            np.array(token_ids, np.int32),
            request,
            shape=BlockKinds(BLOCK_SIZE).of_text,
            num_tokens=len(token_ids),
        )
        items.append((item,))
        return found

    items: list[tuple[ImageItem, ...]] = []
    for index, (one, other) in enumerate(zip(hashes(1), hashes(2), strict=True)):
        end = (index + 1) * BLOCK_SIZE
        assert is_visual_block(items[0], end=end) == (one != other)
        assert not is_visual_block((), end=end)


def prompt(name: str, token_ids: Sequence[int], *images: int, num_visual: int = 36) -> Work:
    """A request: text, then images of `num_visual` tokens each, then a question."""
    ids, items, patches = list(token_ids), [], []
    for number in images:
        image = make_image(number, num_tokens=num_visual)
        items.append(ImageItem(image.image_key, len(ids), num_visual, image.grid_thw))
        patches.append(image)
        ids += [IMAGE_TOKEN] * num_visual
    ids += [5, 6, 7]
    sampling = SamplingParams(2, ignore_eos=True)
    return Work(
        Request(RequestKey(name, 0), tuple(ids), len(ids), sampling, tuple(items)),
        tuple(patches),
        0,
    )


def one_by_one(run: Simulation, work: Work) -> int:
    """Answer a request alone; returns the tokens that a prefix hit covered."""
    run.run([dataclasses.replace(work, at=0)])
    return run.cached[work.request.key.request_id]


@dataclasses.dataclass(frozen=True)
class Flood:
    """Share of the text prompts' tokens, and of a repeated image's, that hits covered."""

    text: float
    image: float


def flood(*, percent: int, num_rounds: int = 12, num_images: int = 3) -> Flood:
    """Conversations of text, each between new images; and one image that each round repeats.

    The 6 conversations have 66 of 160 blocks. A round shows 18 new images: 180 blocks.
    """
    run = Simulation(num_blocks=161, max_num_seqs=2, budget=64, visual_percent=percent)
    hits, possible, image_hits = 0, 0, 0
    for turn in range(num_rounds):
        for topic in range(6):
            text = [100 + 50 * topic + place for place in range(40)]
            covered = one_by_one(run, prompt(f"text {turn}.{topic}", text))
            if turn:
                hits, possible = hits + covered, possible + len(text)
            for number in range(num_images):
                new = 1000 + 100 * turn + 10 * topic + number
                one_by_one(run, prompt(f"image {new}", [8], new))
            again = one_by_one(run, prompt(f"again {turn}.{topic}", [8], 3))
            image_hits += again >= 36
    return Flood(hits / possible, image_hits / (num_rounds * 6 - 1))


def test_a_flood_of_images_leaves_the_text_in_the_cache() -> None:
    assert flood(percent=50).text >= 0.9


def test_without_a_quota_the_flood_evicts_the_text() -> None:
    assert flood(percent=100).text < 0.5


def test_an_image_that_is_used_again_stays_within_the_quota() -> None:
    assert flood(percent=50).image >= 0.9


def test_text_behind_an_image_goes_before_text_of_its_own() -> None:
    pool = BlockPool(4, block_size=4, visual_percent=50)
    blocks = pool.take(3)
    assert blocks is not None
    for block, (block_hash, is_visual) in zip(blocks, chain_of("aib"), strict=True):
        pool.publish(block, block_hash, is_visual=is_visual)
    pool.release(blocks)
    assert pool.take(1) == [blocks[2]]
    assert (pool.num_evictions, pool.num_visual_evictions, pool.num_cached_visual) == (1, 1, 1)


@pytest.mark.parametrize(("percent", "victim"), [(0, 1), (50, 1), (66, 1), (67, 0), (100, 0)])
def test_the_oldest_visual_block_goes_first_while_there_are_too_many(
    percent: int, victim: int
) -> None:
    pool = BlockPool(4, block_size=4, visual_percent=percent)
    blocks = pool.take(3)
    assert blocks is not None
    for block, text in zip(blocks, ("a", "i", "ii"), strict=True):
        pool.publish(block, text.encode(), is_visual="i" in text)
        pool.release([block])
    assert pool.take(1) == [blocks[victim]]
