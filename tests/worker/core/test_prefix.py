"""Equal hashes mean equal KV: tokens, images, their places and forms, the tenant, the weights."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.block_kinds import BlockKinds
from vlm_worker.core.kv_cache import PrefixCounts, extend_hash_chain, num_visual_tokens
from vlm_worker.types import ImageItem, Request, RequestKey, SamplingParams

SIZE = 4
SHAPE = BlockKinds(SIZE).of_text


def chain(
    token_ids: list[int],
    items: tuple[ImageItem, ...] = (),
    *,
    salt: bytes = b"",
    adapter: bytes = b"",
) -> list[bytes]:
    hashes: list[bytes] = []
    request = Request(
        RequestKey("r", 0),
        tuple(token_ids),
        len(token_ids),
        SamplingParams(1),
        items,
        cache_salt=salt,
        adapter=adapter,
    )
    array = np.array(token_ids, np.int32)
    extend_hash_chain(hashes, array, request, shape=SHAPE, num_tokens=len(token_ids))
    return hashes


def item(key: bytes, offset: int, num_tokens: int) -> ImageItem:
    return ImageItem(key, offset, num_tokens, (1, 2, 2 * num_tokens))


tokens = st.lists(st.integers(0, 3), min_size=1, max_size=20)


@given(tokens, tokens)
def test_chains_agree_exactly_as_far_as_the_tokens_do(a: list[int], b: list[int]) -> None:
    common = sum(x == y for x, y in zip(chain(a), chain(b), strict=False))
    same = 0
    while (
        a[: (same + 1) * SIZE] == b[: (same + 1) * SIZE]
        and len(a[: (same + 1) * SIZE]) == (same + 1) * SIZE
    ):
        same += 1
    assert common == same


@given(tokens, st.integers(1, 20))
def test_a_chain_made_in_two_parts_is_the_same(token_ids: list[int], cut: int) -> None:
    hashes: list[bytes] = []
    array = np.array(token_ids, np.int32)
    request = Request(RequestKey("r", 0), tuple(token_ids), len(token_ids), SamplingParams(1))
    for end in (min(cut, len(token_ids)), len(token_ids)):
        extend_hash_chain(hashes, array, request, shape=SHAPE, num_tokens=end)
    assert hashes == chain(token_ids)


def test_placeholders_of_different_images_differ() -> None:
    placeholders = [7] * 8
    one, two = chain(placeholders, (item(b"1", 0, 8),)), chain(placeholders, (item(b"2", 0, 8),))
    assert set(one).isdisjoint(two)
    assert set(one).isdisjoint(chain(placeholders))


def test_an_image_elsewhere_in_the_block_is_another_block() -> None:
    placeholders = [7] * 4
    assert chain(placeholders, (item(b"1", 0, 4),)) != chain(placeholders, (item(b"1", 1, 3),))


def test_a_block_in_the_middle_of_an_image_knows_where_it_is() -> None:
    long = chain([7] * 12, (item(b"1", 0, 12),))
    shifted = chain([1] * 4 + [7] * 8, (item(b"1", 4, 8),))
    assert len({*long, *shifted}) == 6


def test_a_later_image_does_not_touch_earlier_blocks() -> None:
    token_ids = [1] * 4 + [7] * 4
    plain, with_image = chain(token_ids), chain(token_ids, (item(b"1", 4, 4),))
    assert plain[0] == with_image[0]
    assert plain[1] != with_image[1]


def test_tenants_differ_from_the_first_block_on() -> None:
    assert set(chain([1] * 8, salt=b"a")).isdisjoint(chain([1] * 8, salt=b"b"))


def test_weights_differ_from_the_first_block_on() -> None:
    assert set(chain([1] * 8, adapter=b"a")).isdisjoint(chain([1] * 8, adapter=b"b"))
    assert set(chain([1] * 8, adapter=b"a")).isdisjoint(chain([1] * 8))


short = st.text("ab", max_size=3).map(str.encode)


@given(short, short, short, short)
def test_salt_and_adapter_are_not_mistaken_for_one_another(
    salt: bytes, adapter: bytes, other_salt: bytes, other_adapter: bytes
) -> None:
    one = chain([1] * 4, salt=salt, adapter=adapter)
    two = chain([1] * 4, salt=other_salt, adapter=other_adapter)
    assert (one == two) == ((salt, adapter) == (other_salt, other_adapter))


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[int], tuple[ImageItem, ...]]:
    """Two blocks of equal tokens, with images anywhere, whose keys have different lengths."""
    items = []
    offset = draw(st.integers(0, 3))
    while offset < 2 * SIZE and len(items) < 3:
        num_tokens = draw(st.integers(1, 5))
        key = draw(st.sampled_from([b"", b"k", b"kk", b"k" * 8]))
        grid = (1, 2, draw(st.sampled_from([2, 4])))
        items.append(ImageItem(key, offset, num_tokens, grid))
        offset += num_tokens + draw(st.integers(0, 2))
    return [7] * (2 * SIZE), tuple(items)


@given(prompts(), prompts())
def test_chains_agree_exactly_as_far_as_the_images_do(
    one: tuple[list[int], tuple[ImageItem, ...]], two: tuple[list[int], tuple[ImageItem, ...]]
) -> None:
    for block, (a, b) in enumerate(zip(chain(*one), chain(*two), strict=True)):
        until = (block + 1) * SIZE
        seen = [[item for item in items if item.offset < until] for _, items in (one, two)]
        assert (a == b) == (seen[0] == seen[1])


def test_a_key_that_contains_another_images_fields_is_not_taken_for_both() -> None:
    one, two = item(b"1", 0, 2), item(b"2", 2, 2)
    fields = (one.offset, one.num_tokens, *one.grid_thw)
    packed = b"".join(number.to_bytes(8, "little", signed=True) for number in fields)
    both = dataclasses.replace(two, image_key=one.image_key + packed + two.image_key)
    assert chain([7] * 4, (one, two)) != chain([7] * 4, (both,))


def test_hits_are_counted_by_what_they_cover() -> None:
    items = (item(b"1", 2, 4), item(b"2", 8, 4))
    assert [num_visual_tokens(items, end=end) for end in (0, 2, 4, 8, 10, 20)] == [0, 0, 2, 4, 6, 8]
    counts = PrefixCounts()
    counts.add(items, num_tokens=14, num_cached_tokens=4)
    counts.add(items, num_tokens=14, num_cached_tokens=12)
    assert counts == PrefixCounts(queries=28, hits=16, visual_queries=16, visual_hits=10)
