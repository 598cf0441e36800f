"""The encoder cache's laws E1-E7, for every order of operations."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vlm_worker.core.encoder_cache import EncoderCache, Entry, Lookup

MAX_BYTES = 100
TTL = 50.0
keys = st.sampled_from([b"a", b"b", b"c", b"d"])


class CacheMachine(RuleBasedStateMachine):
    """A cache beside the set of entries that somebody still relies on."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = EncoderCache(max_bytes=MAX_BYTES, ttl_seconds=TTL)
        self.now = 0.0
        self.filling: list[Entry] = []
        self.pins: list[tuple[Entry, int]] = []
        self.buffers: set[int] = set()
        self.owners = 0

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=keys, num_tokens=st.sampled_from([3, 4]), pin=st.booleans())
    def lookup(self, key: bytes, num_tokens: int, pin: bool) -> None:
        known = self.cache.find(key, num_tokens=num_tokens, now=self.now)
        found, entry = self.cache.lookup_or_begin(key, num_tokens=num_tokens, now=self.now)
        assert entry.image_key == key
        assert entry.num_tokens == num_tokens, "E5: an entry of another length was served"
        assert (known is None) == (found is Lookup.MINE)
        if found is Lookup.HIT:
            assert entry.id in self.buffers
        if found is Lookup.MINE:
            self.filling.append(entry)
        if pin:
            self.owners += 1
            self.cache.pin(entry, self.owners)
            self.pins.append((entry, self.owners))

    @precondition(lambda self: self.filling)
    @rule(num_bytes=st.integers(1, 150))
    def complete(self, num_bytes: int) -> None:
        entry = self.filling.pop(0)
        self.buffers.add(entry.id)
        self.cache.complete(entry, num_bytes=num_bytes, now=self.now)

    @precondition(lambda self: self.filling)
    @rule()
    def fail(self) -> None:
        entry = self.filling.pop()
        self.cache.fail(entry)
        found = self.cache.find(entry.image_key, num_tokens=entry.num_tokens, now=self.now)
        assert found is not entry, "E7: a failed entry is still found"

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        entry, owner = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        self.cache.unpin(entry, owner)
        self.cache.unpin(entry, owner)  # twice is once

    @rule()
    def expire(self) -> None:
        self.cache.expire(now=self.now)

    @invariant()
    def the_books_add_up(self) -> None:
        self.cache.check()
        dropped = set(self.cache.take_dropped())
        self.buffers -= dropped
        for entry, _ in self.pins:
            assert entry.id not in dropped, "E1: a pinned entry was dropped"
            assert not entry.ready or entry.id in self.buffers
        assert self.cache.num_pins == len(self.pins)
        held = {id(entry): entry.num_bytes for entry, _ in self.pins if entry.ready}
        assert self.cache.num_bytes <= max(MAX_BYTES, sum(held.values())), "E6: idle over budget"


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestCache = CacheMachine.TestCase


def fill(cache: EncoderCache, key: bytes, num_bytes: int, *, now: float = 0.0) -> Entry:
    found, entry = cache.lookup_or_begin(key, num_tokens=4, now=now)
    assert found is Lookup.MINE
    cache.complete(entry, num_bytes=num_bytes, now=now)
    return entry


def test_the_least_recently_used_goes_first() -> None:
    cache = EncoderCache(max_bytes=30, ttl_seconds=TTL)
    for key in (b"a", b"b", b"c"):
        fill(cache, key, 10)
    assert cache.lookup_or_begin(b"a", num_tokens=4, now=1.0)[0] is Lookup.HIT
    fill(cache, b"d", 10)
    assert cache.find(b"b", num_tokens=4, now=1.0) is None
    assert cache.find(b"a", num_tokens=4, now=1.0) is not None
    assert cache.num_evictions == 1


def test_two_who_need_the_same_picture_share_one_filling() -> None:
    cache = EncoderCache(max_bytes=30, ttl_seconds=TTL)
    found, entry = cache.lookup_or_begin(b"a", num_tokens=4, now=0.0)
    joined, same = cache.lookup_or_begin(b"a", num_tokens=4, now=0.0)
    assert (found, joined) == (Lookup.MINE, Lookup.JOIN)
    assert entry is same


def test_an_expired_entry_serves_its_pinner_and_nobody_new() -> None:
    cache = EncoderCache(max_bytes=30, ttl_seconds=TTL)
    old = fill(cache, b"a", 10)
    cache.pin(old, "me")
    found, new = cache.lookup_or_begin(b"a", num_tokens=4, now=TTL)
    assert found is Lookup.MINE
    assert new is not old
    assert cache.take_dropped() == []
    cache.unpin(old, "me")
    assert cache.take_dropped() == [old.id]


def test_an_item_larger_than_the_budget_is_served_while_pinned() -> None:
    cache = EncoderCache(max_bytes=30, ttl_seconds=TTL)
    found, entry = cache.lookup_or_begin(b"a", num_tokens=4, now=0.0)
    assert found is Lookup.MINE
    cache.pin(entry, "me")
    cache.complete(entry, num_bytes=1000, now=0.0)
    assert cache.find(b"a", num_tokens=4, now=0.0) is entry
    cache.unpin(entry, "me")
    assert cache.num_bytes == 0
