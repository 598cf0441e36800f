"""The cache of windows: bounded, by content, and the least valuable byte leaves first."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlm_worker.core.window_cache import WindowCache, window_key

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["get", "put"]),
        st.integers(0, 7),
        st.integers(1, 12),
        st.integers(1, 4),
        st.floats(0, 3),
    ),
    max_size=60,
)


@given(STEPS)
@settings(deadline=None)
def test_it_returns_what_was_put_and_never_exceeds_its_bytes(
    steps: list[tuple[str, int, int, int, float]],
) -> None:
    cache, now, asked = WindowCache(max_bytes=30, ttl_seconds=2.0), 0.0, 0
    for what, number, num_bytes, relevance, seconds in steps:
        now += seconds
        key = bytes([number, num_bytes])
        if what == "get":
            asked += 1
            assert cache.get(key, now=now) in (None, (number, num_bytes))
        else:
            cache.put(
                key, (number, num_bytes), num_bytes=num_bytes, relevance=relevance / 4, now=now
            )
        held = sum(
            n for i, n in itertools.product(range(8), range(13)) if bytes([i, n]) in cache._entries
        )
        assert cache.num_bytes == held <= 30
    assert cache.num_hits + cache.num_misses == asked


def filled(*entries: tuple[bytes, int, float], ttl_seconds: float = 100.0) -> WindowCache:
    cache = WindowCache(max_bytes=30, ttl_seconds=ttl_seconds)
    for key, num_bytes, relevance in entries:
        cache.put(key, key, num_bytes=num_bytes, relevance=relevance, now=0.0)
    return cache


def held(cache: WindowCache) -> set[bytes]:
    return set(cache._entries)


def test_the_least_relevant_window_leaves_first() -> None:
    cache = filled((b"a", 10, 0.5), (b"b", 10, 0.2), (b"c", 10, 0.9))
    cache.put(b"d", b"d", num_bytes=10, relevance=0.4, now=1.0)
    assert held(cache) == {b"a", b"c", b"d"}
    cache.put(b"e", b"e", num_bytes=10, relevance=0.1, now=1.0)
    assert held(cache) == {b"a", b"c", b"d"}, "it is of less value than all others"


def test_uses_and_few_bytes_keep_a_window() -> None:
    cache = filled((b"a", 10, 0.2), (b"b", 10, 0.5), (b"c", 5, 0.3))
    for _ in range(3):
        assert cache.get(b"a", now=1.0) == b"a"
    cache.put(b"d", b"d", num_bytes=10, relevance=0.6, now=1.0)
    assert held(cache) == {b"a", b"c", b"d"}


def test_uses_halve_each_ttl() -> None:
    cache = filled((b"a", 10, 0.2), (b"b", 10, 0.5), (b"c", 10, 0.9), ttl_seconds=10.0)
    for _ in range(3):
        cache.get(b"a", now=1.0)
    cache.put(b"d", b"d", num_bytes=10, relevance=0.6, now=30.0)
    assert held(cache) == {b"b", b"c", b"d"}, "3 uses, 1 after 10 s, none after 20 s"


def test_a_window_larger_than_the_cache_is_not_kept() -> None:
    cache = filled((b"a", 31, 1.0))
    assert not held(cache)
    assert cache.num_bytes == 0


@pytest.mark.parametrize("changed", range(5))
def test_windows_of_other_models_tenants_scales_shapes_or_pixels_have_other_keys(
    changed: int,
) -> None:
    patches = np.arange(24, dtype=np.float32).reshape(4, 6)
    one = [b"m", b"salt", 0, (1, 1), patches]
    other = list(one)
    other[changed] = [b"n", b"sal", 1, (2, 2), patches + 1][changed]
    assert window_key(*one) == window_key(*one[:4], patches.copy())  # type: ignore[arg-type]
    assert window_key(*one) != window_key(*other)  # type: ignore[arg-type]
