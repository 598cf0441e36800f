"""Blocks of two kinds: which tokens each holds, and that no answer depends on kinds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker.answers import make_image
from worker.core.simulation import BLOCK_SIZE, Simulation, Work, expected, works

from vlm_worker.core.block_kinds import BlockKinds, BlockShape, entries_of
from vlm_worker.core.kv_cache import extend_hash_chain
from vlm_worker.testing import IMAGE_TOKEN
from vlm_worker.types import (
    ImageItem,
    KVLayout,
    Narrow,
    Request,
    RequestKey,
    SamplingParams,
)

NARROW = list(Narrow)
KINDS = st.builds(BlockKinds, st.integers(1, 5), st.sampled_from(NARROW), st.sampled_from([2, 4]))


@st.composite
def placed_items(draw: st.DrawFn) -> tuple[ImageItem, ...]:
    """Images with text between some of them."""
    out, at = [], 0
    for number in range(draw(st.integers(0, 4))):
        at += draw(st.integers(0, 30))
        num_tokens = draw(st.integers(1, 60))
        out.append(ImageItem(bytes([number]), at, num_tokens, (1, 2, 2 * num_tokens)))
        at += num_tokens
    return tuple(out)


def held(shape: BlockShape, num_blocks: int) -> list[range]:
    """The tokens of each block."""
    return [range(shape.num_tokens(i), shape.num_tokens(i + 1)) for i in range(num_blocks)]


# ---- the shape of one sequence ---------------------------------------------------------------


@given(KINDS, placed_items(), st.integers(1, 300))
def test_a_narrow_block_holds_its_modality_alone_and_each_token_has_one_block(
    kinds: BlockKinds, items: tuple[ImageItem, ...], num_tokens: int
) -> None:
    shape = kinds.of_items(items)
    blocks = held(shape, shape.num_blocks(num_tokens))
    assert blocks[0].start == 0
    assert blocks[-1].start < num_tokens <= blocks[-1].stop
    visual = {token for item in items for token in range(item.offset, item.end)}
    for index, tokens in enumerate(blocks):
        (entries,) = _entries(shape, index, block=5)
        is_narrow = bool(entries[0] // kinds.num_parts % 2)
        assert len(entries) * kinds.block_size == len(tokens)
        if not is_narrow:
            assert len(tokens) == kinds.block_size
        elif kinds.narrow is Narrow.TEXT:
            assert visual.isdisjoint(tokens)
        else:
            assert visual.issuperset(tokens)
            of_one = any(item.offset <= tokens[0] and tokens[-1] < item.end for item in items)
            assert of_one or kinds.narrow is Narrow.VISION


@given(KINDS, placed_items(), st.integers(0, 300))
def test_counts_agree_with_each_other(
    kinds: BlockKinds, items: tuple[ImageItem, ...], num_tokens: int
) -> None:
    shape = kinds.of_items(items)
    full, needed = shape.num_full(num_tokens), shape.num_blocks(num_tokens)
    assert full <= needed <= full + 1
    assert shape.num_tokens(full) <= num_tokens <= shape.num_tokens(needed)
    assert (full == needed) == (shape.num_tokens(full) == num_tokens)
    assert needed <= -(-num_tokens // kinds.block_size), "a narrow block costs memory"


@given(st.integers(1, 9), placed_items(), st.integers(0, 200))
def test_without_a_narrow_modality_blocks_are_of_one_size(
    size: int, items: tuple[ImageItem, ...], num_tokens: int
) -> None:
    shape = BlockKinds(size).of_items(items)
    assert shape.num_blocks(num_tokens) == -(-num_tokens // size)
    assert shape.num_full(num_tokens) == num_tokens // size
    assert shape.num_tokens(7) == 7 * size
    assert list(shape.entries([4, 9])) == [4, 9]


def test_an_image_of_256_tokens_takes_a_third_fewer_blocks() -> None:
    image = ImageItem(b"", 20, 256, (1, 32, 32))
    mixed = BlockKinds(16, Narrow.VISION, 2).of_items((image,))
    assert (mixed.num_blocks(316), BlockKinds(16).of_text.num_blocks(316)) == (13, 20)
    reverse = BlockKinds(16, Narrow.TEXT, 2).of_items((image,))
    assert reverse.num_blocks(316) == 19


@given(KINDS, placed_items(), st.lists(st.integers(0, 3), min_size=300, max_size=300))
def test_equal_hashes_mean_equal_kinds(
    kinds: BlockKinds, items: tuple[ImageItem, ...], ids: list[int]
) -> None:
    """A prompt that goes on differently behind the same images shares their blocks (M2, M4)."""
    chains = []
    for kept in (items, items[: len(items) // 2]):
        hashes: list[bytes] = []
        key = RequestKey("one", 0)
        request = Request(key, tuple(ids), len(ids), SamplingParams(1), kept)
        token_ids, shape = np.array(ids, np.int32), kinds.of_items(kept)
        extend_hash_chain(hashes, token_ids, request, shape=shape, num_tokens=len(ids))
        chains.append((hashes, held(shape, len(hashes))))
    (one, tokens), (other, other_tokens) = chains
    places = dict(zip(one, tokens, strict=True))
    for block_hash, place in zip(other, other_tokens, strict=True):
        assert places.get(block_hash, place) == place
    if items and len(items) > 1:
        clear = kinds.of_items(items).num_full(items[len(items) // 2 - 1].end)
        before = items[len(items) // 2].offset - items[len(items) // 2 - 1].end
        if before >= kinds.block_size * kinds.num_parts:
            assert one[:clear] == other[:clear], "the same prefix is not found"


def test_the_layout_that_pods_compare_contains_the_policy() -> None:
    plain = KVLayout("r", 2, 2, 16, 4, "bfloat16")
    kinds = [KVLayout("r", 2, 2, 16, 4, "bfloat16", narrow=narrow) for narrow in (None, *NARROW)]
    assert kinds[0].fingerprint == plain.fingerprint
    assert len({layout.fingerprint for layout in kinds}) == 4
    assert kinds[1].block_bytes == 2 * 2 * 2 * 4 * (16 + 4) * 2
    assert BlockKinds.of_layout(kinds[1]).num_parts == 2
    whole = KVLayout("r", 2, 2, 64, 8, "bfloat16", narrow=Narrow.VISION_KIVI4)
    assert whole.block_bytes == 2 * 2 * 2 * 32 * (64 // 2 + 2 * 4), "32 tokens in 4 bits"
    assert BlockKinds.of_layout(whole).num_parts == 4


def test_a_layout_of_one_kind_has_the_fingerprint_of_other_versions() -> None:
    """Pods of two versions exchange KV during a rollout."""
    assert KVLayout("r", 2, 2, 16, 4, "int8").fingerprint.hex() == FINGERPRINT


FINGERPRINT = "662197e67d279cc796249537a52b5382"

# ---- in the scheduler ------------------------------------------------------------------------


@pytest.mark.parametrize("narrow", NARROW)
@given(todo=works(), spare=st.integers(1, 40), rows=st.integers(1, 4), budget=st.integers(4, 40))
@settings(max_examples=60, deadline=None)
def test_answers_do_not_depend_on_kinds_and_every_block_is_returned(
    todo: list[Work], spare: int, rows: int, budget: int, narrow: Narrow
) -> None:
    """With chunks, hits, preemptions and answers that grow, over blocks of both kinds."""
    kinds = BlockKinds(BLOCK_SIZE, narrow, 4)
    budget += (kinds.min_chunk > 1) * (kinds.min_chunk + rows)
    run = Simulation(num_blocks=17 + spare, max_num_seqs=rows, budget=budget, kinds=kinds)
    run.run(todo)
    assert run.answers == expected(todo)


@pytest.mark.parametrize("narrow", NARROW)
def test_both_kinds_are_used_and_a_seen_image_is_hit(narrow: Narrow) -> None:
    kinds = BlockKinds(BLOCK_SIZE, narrow, 4)
    budget = 12 + kinds.min_chunk + narrow.is_grouped
    run = Simulation(num_blocks=40, max_num_seqs=2, budget=budget, kinds=kinds)
    image = make_image(1, num_tokens=30)
    todo = []
    for number in range(2):
        ids = (*range(40, 45), *[IMAGE_TOKEN] * 30, *range(60, 60 + 9))
        item = ImageItem(image.image_key, 5, 30, image.grid_thw)
        request = Request(
            RequestKey(str(number), 0), ids, len(ids), SamplingParams(20, ignore_eos=True), (item,)
        )
        todo.append(Work(request, (image,), number * 40))
    shape = kinds.of_items(todo[0].request.items)
    of_all = [_entries(shape, i, block=1)[0][0] // 4 % 2 for i in range(shape.num_blocks(64))]
    assert set(of_all) == {0, 1}
    run.run(todo)
    assert run.answers == expected(todo)
    prompt = len(todo[0].request.token_ids)
    assert run.cached == {"0": 0, "1": shape.num_tokens(shape.num_full(prompt - 1))}


@given(
    starts=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 40), st.integers(0, 9), st.integers(0, 9)),
        min_size=1,
        max_size=6,
    ),
    spare=st.integers(0, 30),
    rows=st.integers(1, 3),
    budget=st.integers(0, 20),
    cap=st.none() | st.integers(1, 20),
)
@settings(max_examples=60, deadline=None)
def test_blocks_in_4_bits_are_whole_in_any_step(
    starts: list[tuple[int, int, int, int]], spare: int, rows: int, budget: int, cap: int | None
) -> None:
    """The runner refuses a part of a block: with chunks, hits and preemptions."""
    kinds = BlockKinds(BLOCK_SIZE, Narrow.VISION_KIVI4, 4)
    todo = []
    for number, (before, size, behind, at) in enumerate(starts):
        image = make_image(size % 3, num_tokens=size)
        ids = (*[40] * before, *[IMAGE_TOKEN] * size, *range(60, 61 + behind))
        item = ImageItem(image.image_key, before, size, image.grid_thw)
        request = Request(RequestKey(str(number), 0), ids, len(ids), SamplingParams(9), (item,))
        todo.append(Work(request, (image,), at))
    run = Simulation(
        num_blocks=17 + spare,
        max_num_seqs=rows,
        budget=kinds.min_chunk + rows + budget,
        long_prefill_tokens=cap,
        kinds=kinds,
    )
    run.run(todo)
    assert run.answers == expected(todo)


def test_a_step_that_no_block_in_4_bits_fits_is_refused() -> None:
    kinds = BlockKinds(8, Narrow.VISION_KIVI4, 4)
    BlockKinds(16).check_chunks(0)
    kinds.check_chunks(32)
    with pytest.raises(ValueError, match=r"computed whole.* is 31"):
        kinds.check_chunks(31)


def _entries(shape: BlockShape, index: int, *, block: int) -> list[list[int]]:
    """The entries of the block at `index`, if the pool gave it this number."""
    before = len(shape.entries([block] * index)) if index else 0
    return [[int(entry) for entry in shape.entries([block] * (index + 1))[before:]]]


@given(st.integers(0, 1000), st.sampled_from([2, 4]))
def test_entries_are_distinct_and_those_of_a_block_adjacent(block: int, num_parts: int) -> None:
    narrow = entries_of(block, is_narrow=True, num_parts=num_parts)
    wide = entries_of(block, is_narrow=False, num_parts=num_parts)
    after = entries_of(block + 1, is_narrow=False, num_parts=num_parts)
    assert len(narrow) == num_parts
    assert len(wide) == 1
    assert {*narrow, *wide}.isdisjoint(after)
    assert max(narrow) < after[0]
