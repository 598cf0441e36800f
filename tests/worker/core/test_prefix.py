"""Equal hashes mean equal KV: tokens, pictures, their places, the tenant."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.prefix import extend_chain
from vlm_worker.types import ImageItem

SIZE = 4


def chain(
    token_ids: list[int], items: tuple[ImageItem, ...] = (), *, salt: bytes = b""
) -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(
        hashes,
        np.array(token_ids, np.int32),
        items,
        cache_salt=salt,
        block_size=SIZE,
        num_tokens=len(token_ids),
    )
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
    for end in (min(cut, len(token_ids)), len(token_ids)):
        extend_chain(hashes, array, (), cache_salt=b"", block_size=SIZE, num_tokens=end)
    assert hashes == chain(token_ids)


def test_placeholders_of_different_pictures_differ() -> None:
    placeholders = [7] * 8
    one, two = chain(placeholders, (item(b"1", 0, 8),)), chain(placeholders, (item(b"2", 0, 8),))
    assert set(one).isdisjoint(two)
    assert set(one).isdisjoint(chain(placeholders))


def test_a_picture_elsewhere_in_the_block_is_another_block() -> None:
    placeholders = [7] * 4
    assert chain(placeholders, (item(b"1", 0, 4),)) != chain(placeholders, (item(b"1", 1, 3),))


def test_a_block_in_the_middle_of_a_picture_knows_where_it_is() -> None:
    long = chain([7] * 12, (item(b"1", 0, 12),))
    shifted = chain([1] * 4 + [7] * 8, (item(b"1", 4, 8),))
    assert len({*long, *shifted}) == 6


def test_a_later_picture_does_not_touch_earlier_blocks() -> None:
    token_ids = [1] * 4 + [7] * 4
    plain, with_picture = chain(token_ids), chain(token_ids, (item(b"1", 4, 4),))
    assert plain[0] == with_picture[0]
    assert plain[1] != with_picture[1]


def test_tenants_differ_from_the_first_block_on() -> None:
    assert set(chain([1] * 8, salt=b"a")).isdisjoint(chain([1] * 8, salt=b"b"))
