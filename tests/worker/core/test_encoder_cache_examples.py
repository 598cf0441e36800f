"""The encoder cache one step at a time: who goes first, what moves between tiers, who shares."""

from __future__ import annotations

from worker.core.test_encoder_cache import BytesCodec

from vlm_worker.core.encoder_cache import EncoderCache, Entry, Tier

TTL = 50.0


def filled(cache: EncoderCache, key: bytes, num_bytes: int, *, now: float = 0.0) -> Entry:
    """An idle entry."""
    entry = cache.begin(key, "filler", num_tokens=4)
    cache.complete(entry, bytes(num_bytes), now=now)
    cache.unpin(entry, "filler", now=now)
    return entry


def found(cache: EncoderCache, keys: str, *, now: float = 0.0) -> str:
    """Which of some entries can be found."""
    return "".join(k for k in keys if cache.find(k.encode(), num_tokens=4, now=now) is not None)


def use(cache: EncoderCache, key: bytes, *, now: float) -> None:
    entry = cache.lookup(key, "user", num_tokens=4, now=now)
    assert entry is not None
    cache.unpin(entry, "user", now=now)


def test_the_least_recently_used_goes_first() -> None:
    cache = EncoderCache(BytesCodec(), max_bytes=30, ttl_seconds=TTL)
    for key in (b"a", b"b", b"c"):
        filled(cache, key, 10)
    use(cache, b"a", now=1.0)
    filled(cache, b"d", 10)
    assert found(cache, "abcd", now=1.0) == "acd"
    assert cache.num_evictions == cache.hot.num_evictions == 1


def test_what_expired_goes_before_what_is_merely_older() -> None:
    cache = EncoderCache(BytesCodec(), max_bytes=30, cold_bytes=10, ttl_seconds=TTL)
    for key in (b"a", b"b", b"c"):
        filled(cache, key, 10)
    use(cache, b"a", now=TTL - 1)
    filled(cache, b"d", 20, now=TTL)  # b and c are over: nothing has to move for it
    assert found(cache, "abcd", now=TTL) == "ad"
    assert (cache.num_expirations, cache.num_evictions, cache.num_demotions) == (2, 0, 0)


def test_an_entry_demoted_to_the_cold_tier_is_promoted_when_used() -> None:
    cache = EncoderCache(BytesCodec(), max_bytes=20, cold_bytes=20, ttl_seconds=TTL)
    entries = [filled(cache, bytes([n]), 10) for n in range(4)]
    assert [entry.tier for entry in entries] == [Tier.COLD, Tier.COLD, Tier.HOT, Tier.HOT]
    cache.lookup(entries[0].image_key, "me", num_tokens=4, now=1.0)
    assert [entry.tier for entry in entries] == [Tier.HOT, Tier.COLD, Tier.COLD, Tier.HOT]
    assert (cache.num_demotions, cache.num_promotions, cache.num_evictions) == (3, 1, 0)
    assert (cache.hot.num_hits, cache.cold.num_hits) == (0, 1)


def test_the_oldest_of_the_cold_tier_is_the_one_that_goes() -> None:
    cache = EncoderCache(BytesCodec(), max_bytes=10, cold_bytes=20, ttl_seconds=TTL)
    for key in (b"a", b"b", b"c", b"d"):
        filled(cache, key, 10)
    assert found(cache, "abcd") == "bcd"
    assert (cache.num_evictions, cache.cold.num_evictions) == (1, 1)


def test_what_is_larger_than_the_cold_tier_makes_no_room_there_for_nothing() -> None:
    cache = EncoderCache(BytesCodec(), max_bytes=30, cold_bytes=20, ttl_seconds=TTL)
    filled(cache, b"a", 10)
    filled(cache, b"b", 25)  # a is demoted
    filled(cache, b"c", 25)  # b is dropped
    assert found(cache, "abc") == "ac"


def test_two_requests_of_the_same_image_share_one_encode() -> None:
    cache = EncoderCache(BytesCodec(), max_bytes=30, ttl_seconds=TTL)
    entry = cache.begin(b"a", "one", num_tokens=4)
    assert cache.find(b"a", num_tokens=4, now=0.0) is entry
    cache.lookup(b"a", "two", num_tokens=4, now=0.0)
    assert (cache.num_misses, cache.num_joins, cache.hot.num_hits) == (1, 1, 0)


def test_an_expired_entry_serves_only_requests_that_pin_it() -> None:
    cache = EncoderCache(BytesCodec(), max_bytes=30, ttl_seconds=TTL)
    old = filled(cache, b"a", 10)
    cache.lookup(b"a", "me", num_tokens=4, now=0.0)
    assert found(cache, "a", now=TTL) == ""
    cache.begin(b"a", "you", num_tokens=4)
    assert old.buffer is not None
    cache.unpin(old, "me", now=TTL)
    assert old.buffer is None


def test_an_item_larger_than_the_budget_is_served_while_pinned() -> None:
    cache = EncoderCache(BytesCodec(), max_bytes=30, ttl_seconds=TTL)
    entry = cache.begin(b"a", "me", num_tokens=4)
    cache.complete(entry, bytes(1000), now=0.0)
    assert cache.find(b"a", num_tokens=4, now=0.0) is entry
    cache.unpin(entry, "me", now=0.0)
    assert cache.hot.num_bytes == cache.cold.num_bytes == 0
