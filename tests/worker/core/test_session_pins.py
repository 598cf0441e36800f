"""Session pins: bounded, expiring, and evicted after all others, in memory and on the disk."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.disk_index import DiskIndex, StoredFile
from vlm_worker.core.encoder_cache import EncoderCache, Entry, Tier
from vlm_worker.core.session_pins import DropReason, SessionPins
from vlm_worker.settings.encoder_cache import EncoderCacheSettings

SECONDS, TTL = 30.0, 50.0
HOT, COLD = 100, 60


# ---- the pins alone ------------------------------------------------------------------------------

OPERATIONS = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.integers(0, 60), st.floats(0, 12)), max_size=40
)


@given(OPERATIONS)
def test_pins_are_bounded_expire_in_time_and_are_counted(operations: list[Any]) -> None:
    pins: SessionPins[str] = SessionPins(max_bytes=100)
    renewed: dict[str, float] = {}
    now, num_pins = 0.0, 0
    for key, num_bytes, seconds in operations:
        now += seconds
        pins.expire(now=now)
        is_new = not pins.seconds_left(key, now=now)
        pins.pin(key, num_bytes, until=now + SECONDS)
        renewed[key] = now
        num_pins += is_new
        pins.check()
        for one, at in renewed.items():
            left = pins.seconds_left(one, now=now)
            assert left == 0 or left == pytest.approx(at + SECONDS - now)
        assert len(pins) + pins.num_dropped.total() == num_pins
    left = pins.seconds_to_end(now=now)
    assert (left is None) == (len(pins) == 0)
    if left is not None:
        before = len(pins)
        pins.expire(now=now + left + 1e-6)
        assert len(pins) < before, "the next pin has not ended"
    pins.expire(now=now + SECONDS)
    assert (len(pins), pins.num_bytes) == (0, 0)
    assert pins.seconds_to_end(now=now) is None


def test_the_pin_that_was_renewed_first_makes_room() -> None:
    pins: SessionPins[str] = SessionPins(max_bytes=100)
    for second, key in enumerate("aba"):
        pins.pin(key, 40, until=second + SECONDS)
    pins.pin("c", 40, until=3 + SECONDS)
    assert pins.seconds_left("b", now=3) == 0
    assert pins.first_without("abc") == "b"
    assert pins.num_dropped[DropReason.BOUND] == 1
    pins.pin("huge", 101, until=4 + SECONDS)
    assert pins.first_without(["a", "c", "huge"]) == "huge"
    assert len(pins) == 2, "one that never fits drops no other"


# ---- in memory -----------------------------------------------------------------------------------


class Codec:
    """Embeddings are bytes."""

    def export_embedding(self, embedding: Any) -> memoryview:
        return memoryview(embedding)

    def import_embedding(self, rows: memoryview, num_tokens: int) -> Any:
        return bytes(rows)

    def embedding_bytes(self, embedding: Any) -> int:
        return len(embedding)

    def export_scores(self, embedding: Any) -> memoryview:
        return memoryview(b"")

    def with_scores(self, embedding: Any, scores: memoryview) -> Any:
        return embedding


class Cache:
    """A cache in which every image is used once, and what leaves it in order."""

    def __init__(self, *, hot: int = HOT, cold: int = COLD) -> None:
        self.cache = EncoderCache(Codec(), max_bytes=hot, cold_bytes=cold, ttl_seconds=TTL)
        self.left: list[bytes] = []
        self.wrong: list[bytes] = []
        self.now = 0.0
        self.cache.on_leave = self._leaves

    def _leaves(self, entry: Entry) -> None:
        self.left.append(entry.image_key)
        pins, tier = self.cache.session_pins, self.cache.hot
        if entry.expires <= self.now or not pins.seconds_left(entry, now=self.now):
            return
        if entry.tier is Tier.COLD:
            tier = self.cache.cold
        others = [one for one in tier.idle if one is not entry]
        if pins.first_without(others) is not None:
            self.wrong.append(entry.image_key)

    def use(self, key: bytes, num_bytes: int, *, session: bool) -> None:
        cache, now = self.cache, self.now
        cache.expire(now=now)
        entry = cache.lookup(key, "me", num_tokens=1, now=now)
        new = entry is None
        entry = entry or cache.begin(key, "me", num_tokens=1, now=now)
        if session:
            cache.pin_for_session(entry, seconds=SECONDS, now=now)
        if new:
            cache.complete(entry, bytes(num_bytes), now=now)
        cache.unpin(entry, "me", now=now)
        cache.check()


USES = st.lists(
    st.tuples(
        st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f", b"g"]),
        st.integers(1, 60),
        st.booleans(),
        st.floats(0, 20),
    ),
    max_size=40,
)


@given(uses=USES, cold=st.sampled_from([0, COLD]))
def test_a_pinned_image_is_evicted_after_all_others_and_every_byte_is_returned(
    uses: list[Any], cold: int
) -> None:
    cache = Cache(cold=cold)
    sizes: dict[bytes, int] = {}
    for key, num_bytes, session, seconds in uses:
        cache.now += seconds
        cache.use(key, sizes.setdefault(key, num_bytes), session=session)
        assert cache.cache.session_pins.num_bytes <= (HOT + cold) // 2
    assert cache.wrong == []
    cache.now += TTL
    cache.cache.expire(now=cache.now)
    cache.cache.check()
    assert (cache.cache.hot.num_bytes, cache.cache.cold.num_bytes) == (0, 0)
    assert (len(cache.cache.session_pins), cache.cache.session_pins.num_bytes) == (0, 0)


@given(uses=USES, cold=st.sampled_from([0, COLD]))
def test_with_the_same_pins_on_all_images_the_order_is_that_of_none(
    uses: list[Any], cold: int
) -> None:
    """Bounded pins alone change an order, so the cache is large enough for all of them."""
    off, on = Cache(cold=cold), Cache(cold=cold)
    on.cache.session_pins.max_bytes = 10**6
    sizes: dict[bytes, int] = {}
    for key, num_bytes, _, seconds in uses:
        for cache in (off, on):
            cache.now += min(seconds, 0.5)  # no pin ends
            cache.use(key, sizes.setdefault(key, num_bytes), session=cache is on)
    assert on.left == off.left


def test_a_conversation_keeps_its_image_while_others_come_and_go() -> None:
    cache = Cache()
    cache.use(b"mine", 40, session=True)
    for number in range(20):
        cache.now += 1
        cache.use(b"other %d" % number, 30, session=False)
    assert b"mine" not in cache.left
    cache.now += SECONDS
    for number in range(20, 30):
        cache.use(b"other %d" % number, 30, session=False)
    assert b"mine" in cache.left
    assert cache.cache.session_pins.num_dropped[DropReason.EXPIRED] == 1


def test_a_discarded_image_has_no_pin() -> None:
    cache = Cache()
    cache.use(b"a", 40, session=True)
    cache.cache.begin(b"a", "other", num_tokens=2, now=cache.now)  # another length: E5
    assert len(cache.cache.session_pins) == 0
    assert cache.cache.session_pins.num_dropped[DropReason.REPLACED] == 1


# ---- on the disk ---------------------------------------------------------------------------------


def file(name: str, num_bytes: int, now: float) -> StoredFile:
    return StoredFile(name, num_bytes, now)


@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 50), st.booleans(), st.floats(0, 9)),
        max_size=40,
    )
)
def test_a_pinned_file_is_deleted_after_all_others(writes: list[Any]) -> None:
    index = DiskIndex(max_bytes=100, max_age_seconds=60.0)
    now, complete = 0.0, {}
    for name, num_bytes, session, seconds in writes:
        now += seconds
        pinned = {one for one in complete if index.session_pins.seconds_left(one, now=now)}
        expired = {one for one, at in complete.items() if now - at >= 60.0}
        victims = index.begin_write(file(name, num_bytes, now), now=now)
        assert victims is not None
        gone = {victim.name for victim in victims}
        if session:
            index.pin_for_session(name, seconds=SECONDS, now=now)
        index.complete_write(name)
        index.check()
        complete = {one: at for one, at in complete.items() if one not in gone} | {name: now}
        if gone & pinned - {name} - expired:
            assert set(complete) - {name} <= pinned, "a file without a pin was left"
        assert index.num_bytes <= 100
        assert index.session_pins.num_bytes <= 50


def test_a_file_that_was_not_written_has_no_pin() -> None:
    index = DiskIndex(max_bytes=100, max_age_seconds=60.0)
    index.begin_write(file("a", 40, 0.0), now=0.0)
    index.pin_for_session("a", seconds=SECONDS, now=0.0)
    index.pin_for_session("unknown", seconds=SECONDS, now=0.0)
    assert len(index.session_pins) == 1
    index.abort_write("a")
    assert len(index.session_pins) == 0
    index.check()


def test_a_file_that_replaces_another_has_the_rest_of_its_pin() -> None:
    index = DiskIndex(max_bytes=100, max_age_seconds=60.0)
    index.load([file("a", 20, 0.0), file("b", 20, 0.0)], now=0.0)
    index.pin_for_session("a", seconds=SECONDS, now=0.0)
    assert index.begin_write(file("a", 30, 10.0), now=10.0) == [file("a", 20, 0.0)]
    index.complete_write("a")
    assert index.session_pins.seconds_left("a", now=10.0) == SECONDS - 10.0
    assert index.session_pins.num_bytes == 30
    assert index.session_pins.num_dropped.total() == 0
    index.check()


# ---- settings ------------------------------------------------------------------------------------


def test_a_pin_that_would_outlast_its_embedding_is_refused_by_name() -> None:
    assert EncoderCacheSettings().session_pin_seconds == 0
    settings = EncoderCacheSettings(embedding_ttl_seconds=60.0, session_pin_seconds=60)
    with pytest.raises(ValueError, match=r"--session-pin-seconds: 61 .*--embedding-ttl-seconds"):
        dataclasses.replace(settings, session_pin_seconds=61)
