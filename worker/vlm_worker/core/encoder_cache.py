"""The encoder cache: embeddings by image key, in two tiers. The runner copies between them.

A third tier, on disk, is optional (`engine.embedding_reads`): this cache tells it which entries
leave memory, and counts what it reads.

    begin -> filling -> complete -> HOT, pinned <-> HOT, idle --demote--> COLD --evict--> dropped
                `-> fail                ^                                   |
                                        `------------- promote -------------'

HOT is device memory, COLD is host memory. A pinned entry is HOT. Idle entries have one order: least
recently used first, each cold entry before each hot one. All entries have the same TTL, so this is
also the order of expiry. Session pins change what is evicted; then a cold entry may be newer than a
hot one. If a copy between the tiers fails, the entry is discarded.

A key covers the pixels and each effective parameter of their preprocessing, the resolution
included: an image at another resolution has another key.

Laws (tests/worker/core/test_encoder_cache.py):

    E1  only ready, unpinned entries are evicted: expired ones first, then least recently used
    E2  an expired entry stays valid for its pins; no lookup finds it
    E3  an entry that exceeds the budget of the hot tier moves to the cold one; a use promotes it
    E4  a sequence that waits without KV blocks unpins its embeddings (the engine's part)
    E5  an entry whose length differs from the request's visual tokens is discarded, not served
    E6  pinned entries may exceed the budget, so the largest item always fits; idle ones may not
    E7  a failed item leaves no entry
    E8  of a tier, an entry with a session pin is evicted only if no other idle one is left there
        (`session_pins`); no entry without one is demoted to evict it. Expiry is not affected.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Hashable
from typing import Any, Final, Protocol

from vlm_worker.core.session_pins import MAX_PERCENT, DropReason, SessionPins

NO_SCORES: Final = memoryview(b"")


class Codec(Protocol):
    """Converts embeddings to bytes and back. It logs an error before it raises it."""

    def export_embedding(self, embedding: Any) -> memoryview: ...
    def import_embedding(self, rows: memoryview, num_tokens: int) -> Any: ...
    def embedding_bytes(self, embedding: Any) -> int: ...
    def export_scores(self, embedding: Any) -> memoryview: ...
    def with_scores(self, embedding: Any, scores: memoryview) -> Any: ...


class Tier(enum.Enum):
    """The memory of a buffer: of the device (HOT) or of the host (COLD)."""

    HOT = "hot"
    COLD = "cold"


@dataclasses.dataclass(eq=False, slots=True)
class Entry:
    """One encoder output. The cache is its only writer.

    If an entry is discarded while pinned, no lookup finds it; its last unpin drops it.

    Attributes:
        ready: whether the encoder has filled it.
        buffer: the embedding in the hot tier, its rows as bytes in the cold one.
        num_bytes: of its buffer; 0 until it is ready.
        expires: seconds on the clock of `now`.
        pins: the owners that use it.
        scores: of a cold entry's embedding, if there is a disk tier.
        session_seconds: of the session pin that it gets when it is ready; 0 for none.
        is_from_disk: the disk tier filled it.
        counts_as_disk: its next counted hit is one of the disk tier.
        is_given: a client gave the embedding. The disk tier does not store it.
        waiters: called once when the entry is ready (None) or has failed.
    """

    image_key: bytes
    num_tokens: int
    ready: bool = False
    buffer: Any = None
    num_bytes: int = 0
    expires: float = 0.0
    tier: Tier = Tier.HOT
    pins: set[Hashable] = dataclasses.field(default_factory=set)
    scores: memoryview = NO_SCORES
    session_seconds: float = 0.0
    is_from_disk: bool = False
    counts_as_disk: bool = False
    is_given: bool = False
    waiters: list[Callable[[Exception | None], None]] = dataclasses.field(default_factory=list)

    def notify(self, error: Exception | None) -> None:
        """Call the waiters, each once: the entry is ready, or failed with this error."""
        waiters, self.waiters = self.waiters, []
        for on_filled in waiters:
            on_filled(error)


@dataclasses.dataclass(eq=False, slots=True)
class CacheTier:
    """The counts of one tier. `idle` has the evictable entries, least recently used first."""

    max_bytes: int
    num_bytes: int = 0
    num_entries: int = 0
    num_hits: int = 0
    num_evictions: int = 0
    idle: dict[Entry, None] = dataclasses.field(default_factory=dict)

    @property
    def oldest(self) -> Entry:
        """The least recently used idle entry."""
        return next(iter(self.idle))

    def append(self, entry: Entry) -> None:
        """Make an entry the most recently used idle one that expires no later."""
        last = next(reversed(self.idle), None)
        self.idle[entry] = None
        if last is not None and last.expires > entry.expires:  # it had a session pin
            self.idle = dict.fromkeys(sorted(self.idle, key=lambda one: one.expires))

    def add(self, entry: Entry) -> None:
        self.num_bytes += entry.num_bytes
        self.num_entries += 1

    def remove(self, entry: Entry) -> None:
        self.idle.pop(entry, None)
        self.num_bytes -= entry.num_bytes
        self.num_entries -= 1


class EncoderCache:
    """Entries by image key. Time is an argument.

    `max_bytes` is the budget of the hot tier, `cold_bytes` of the cold one: 0 disables it. An entry
    expires if it was not used for `ttl_seconds`.

    If there is a disk tier, it sets `on_leave`, which gets each filled entry that is evicted or
    expires, while it still has its buffer. `expire` stops at an entry for which `can_leave` is
    False: a later call continues.
    """

    def __init__(
        self, codec: Codec, *, max_bytes: int, cold_bytes: int = 0, ttl_seconds: float
    ) -> None:
        self.hot, self.cold = CacheTier(max_bytes), CacheTier(cold_bytes)
        self.num_misses = 0
        self.num_joins = 0
        self.num_evictions = 0
        self.num_expirations = 0
        self.num_demotions = 0
        self.num_promotions = 0
        self.num_pins = 0
        self.num_disk_hits = 0
        self.on_leave: Callable[[Entry], None] | None = None
        self.can_leave: Callable[[Entry], bool] = lambda _: True
        max_pinned = (max_bytes + cold_bytes) * MAX_PERCENT // 100
        self.session_pins: SessionPins[Entry] = SessionPins(max_bytes=max_pinned)
        self._codec = codec
        self._ttl_seconds = ttl_seconds
        self._listed: dict[bytes, Entry] = {}

    # ---- for users of embeddings -----------------------------------------------------------------

    def find(self, image_key: bytes, *, num_tokens: int, now: float) -> Entry | None:
        """The usable entry of a key: ready and not expired, or being filled. Changes nothing."""
        entry = self._listed.get(image_key)
        if entry is None or entry.num_tokens != num_tokens:
            return None
        return None if entry.ready and entry.expires <= now else entry

    def lookup(
        self,
        image_key: bytes,
        owner: Hashable,
        *,
        num_tokens: int,
        now: float,
        counted: bool = True,
    ) -> Entry | None:
        """Pin the usable entry of a key for `owner`, who unpins it; None if there is none.

        With `counted` False, no hit or join is counted: the caller counted this lookup before.
        """
        entry = self.find(image_key, num_tokens=num_tokens, now=now)
        if entry is None:
            return None
        tier = self.cold if entry.tier is Tier.COLD else self.hot
        if tier is self.cold and not self._promote(entry, now):
            return None
        if counted and entry.ready:
            self.count_hit(entry, tier)
        elif counted:
            self.num_joins += 1
        if entry.ready:
            entry.expires = now + self._ttl_seconds
        self._pin(entry, owner)
        return entry

    def count_hit(self, entry: Entry, tier: CacheTier) -> None:
        """Count a hit of an entry that was in `tier`; the first one after a read is the disk's."""
        if entry.counts_as_disk:
            self.num_disk_hits += 1
            entry.counts_as_disk = False
        else:
            tier.num_hits += 1

    def begin(
        self,
        image_key: bytes,
        owner: Hashable,
        *,
        num_tokens: int,
        counted: bool = True,
        now: float = -math.inf,
    ) -> Entry:
        """Add an entry to be filled, pinned for `owner`; it replaces an entry of the same key.

        The owner must `complete` or `fail` it. With `counted`, this is a miss. The disk tier gets
        an entry that expired before `now`.
        """
        if (stale := self._listed.get(image_key)) is not None:
            is_expired = stale.ready and stale.expires <= now
            if self.on_leave is not None and is_expired and stale.num_tokens == num_tokens:
                self.on_leave(stale)  # before a call of `expire`
            self._discard(stale)
        entry = self._listed[image_key] = Entry(image_key, num_tokens)
        self._pin(entry, owner)
        self.num_misses += counted
        return entry

    def unpin(self, entry: Entry, owner: Hashable, *, now: float) -> None:
        """Remove the pin of an owner; idempotent."""
        if owner not in entry.pins:
            return
        entry.pins.remove(owner)
        self.num_pins -= 1
        if not entry.pins:
            self._settle(entry, now)

    def pin_for_session(self, entry: Entry, *, seconds: float, now: float) -> None:
        """Evict an entry after all others for so long, from when it is ready.

        `seconds` must be the same in every call.
        """
        if not entry.ready:
            entry.session_seconds = seconds
        elif self._is_listed(entry):
            self.session_pins.expire(now=now)
            self.session_pins.pin(entry, entry.num_bytes, until=now + seconds)

    # ---- for the encoder -------------------------------------------------------------------------

    def complete(self, entry: Entry, embedding: Any, *, now: float) -> None:
        """Fill an entry, in the hot tier; older idle entries are demoted or evicted."""
        assert not entry.ready
        entry.ready = True
        entry.buffer = embedding
        entry.num_bytes = self._codec.embedding_bytes(embedding)
        entry.expires = now + self._ttl_seconds
        self.hot.add(entry)
        if entry.session_seconds:
            self.pin_for_session(entry, seconds=entry.session_seconds, now=now)
        if not entry.pins:
            self._settle(entry, now)
        self._evict_excess(now)

    def fail(self, entry: Entry) -> None:
        """Discard an entry that will never be filled; the next lookup misses."""
        assert not entry.ready
        self._discard(entry)

    # ---- eviction --------------------------------------------------------------------------------

    def expire(self, *, now: float) -> None:
        """Discard the idle entries that have expired, as far as the disk tier takes them."""
        for cache_tier in (self.cold, self.hot):
            while cache_tier.idle and cache_tier.oldest.expires <= now:
                if not self.can_leave(cache_tier.oldest):
                    return
                self._expire(cache_tier.oldest)

    def check(self) -> None:
        """Raise AssertionError if the entries and the counts disagree."""
        idle = [*self.cold.idle, *self.hot.idle]
        for entry in idle:
            assert entry.ready, "E1: an idle entry is not filled"
            assert not entry.pins, "E1: an idle entry is pinned"
            assert self._is_listed(entry), "an idle entry cannot be found"
        orders = [[*self.cold.idle], [*self.hot.idle]] if self.session_pins.is_used else [idle]
        for order in orders:
            expiries = [entry.expires for entry in order]
            assert expiries == sorted(expiries), "E1: the order of use is not that of expiry"
        assert self.cold.num_entries == len(self.cold.idle), "E3: a cold entry is in use"
        assert self.cold.num_bytes == sum(entry.buffer.nbytes for entry in self.cold.idle)
        assert self.cold.num_bytes <= self.cold.max_bytes, "E6: the cold tier exceeds its budget"
        self.session_pins.check()
        over = self.hot.num_bytes > self.hot.max_bytes
        assert not (over and self.hot.idle), "E6: idle entries exceed the hot tier's budget"

    def _evict_excess(self, now: float) -> None:
        hot, cold = self.hot, self.cold
        if hot.num_bytes <= hot.max_bytes:
            return
        self.expire(now=now)
        self.session_pins.expire(now=now)
        while hot.num_bytes > hot.max_bytes and hot.idle:
            hot.num_evictions += 1
            entry = self._victim(hot)
            if entry.num_bytes > cold.max_bytes or not self._may_demote(entry):
                self._evict(entry)
                continue
            while cold.num_bytes + entry.num_bytes > cold.max_bytes:
                cold.num_evictions += 1
                self._evict(self._victim(cold))
            self._demote(entry)

    def _victim(self, cache_tier: CacheTier) -> Entry:
        """The idle entry that leaves a tier next (E8)."""
        if not len(self.session_pins):
            return cache_tier.oldest
        return self.session_pins.first_without(cache_tier.idle) or cache_tier.oldest

    def _may_demote(self, entry: Entry) -> bool:
        """Whether an entry fits into the cold tier without evicting one with a session pin (E8)."""
        pins, cold = self.session_pins, self.cold
        if not len(pins) or pins.first_without((entry,)) is None:
            return True
        kept = sum(one.num_bytes for one in cold.idle if pins.first_without((one,)) is None)
        return kept + entry.num_bytes <= cold.max_bytes

    def _evict(self, entry: Entry) -> None:
        self.num_evictions += 1
        self._leave(entry, DropReason.EVICTED)

    def _expire(self, entry: Entry) -> None:
        self.num_expirations += 1
        self._leave(entry, DropReason.EXPIRED)

    def _leave(self, entry: Entry, reason: DropReason) -> None:
        """Discard a filled entry without pins that could be used again."""
        if self.on_leave is not None:
            self.on_leave(entry)
        self.session_pins.drop(entry, reason)
        self._discard(entry)

    def _demote(self, entry: Entry) -> None:
        """Copy an idle entry to the cold tier."""
        try:
            rows = self._codec.export_embedding(entry.buffer)
            if self.on_leave is not None:
                entry.scores = self._codec.export_scores(entry.buffer)
        except Exception:  # noqa: BLE001  the codec logs it
            self._discard(entry)
            return
        self.hot.remove(entry)
        entry.tier, entry.buffer = Tier.COLD, rows
        self.cold.add(entry)
        self.cold.append(entry)
        self.num_demotions += 1

    def _promote(self, entry: Entry, now: float) -> bool:
        """Copy a cold entry to the hot tier; False if the copy fails.

        If the device is out of memory, this is a miss: the image is encoded again, or fails then.
        """
        try:
            embedding = self._codec.import_embedding(entry.buffer, entry.num_tokens)
            if entry.scores.nbytes:
                embedding = self._codec.with_scores(embedding, entry.scores)
        except Exception:  # noqa: BLE001  the codec logs it
            self._discard(entry)
            return False
        self.cold.remove(entry)
        entry.tier, entry.buffer, entry.scores = Tier.HOT, embedding, NO_SCORES
        self.hot.add(entry)
        self.num_promotions += 1
        self._evict_excess(now)
        return True

    # ---- parts -----------------------------------------------------------------------------------

    def _pin(self, entry: Entry, owner: Hashable) -> None:
        if owner not in entry.pins:
            entry.pins.add(owner)
            self.num_pins += 1
        self.hot.idle.pop(entry, None)

    def _settle(self, entry: Entry, now: float) -> None:
        """Make an entry without pins idle, or drop it."""
        if not self._is_listed(entry):
            self._drop(entry)
        elif entry.ready and entry.expires <= now:
            self._expire(entry)
        elif entry.ready:
            entry.expires = now + self._ttl_seconds
            self.hot.idle[entry] = None
            self._evict_excess(now)

    def _discard(self, entry: Entry) -> None:
        """Hide an entry from lookups; it is dropped at once, or with its last pin."""
        if self._is_listed(entry):
            del self._listed[entry.image_key]
            self.session_pins.drop(entry, DropReason.REPLACED)
        if not entry.pins:
            self._drop(entry)

    def _is_listed(self, entry: Entry) -> bool:
        return self._listed.get(entry.image_key) is entry

    def _drop(self, entry: Entry) -> None:
        if entry.ready:
            (self.hot if entry.tier is Tier.HOT else self.cold).remove(entry)
        entry.buffer = None
