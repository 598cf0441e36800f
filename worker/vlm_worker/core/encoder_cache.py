"""The encoder cache: embeddings by image key, in two tiers. Pure: it counts bytes, but has none.

    begin -> filling -> complete -> HOT, pinned <-> HOT, idle --demote--> COLD --evict--> dropped
                `-> fail                ^                                   |
                                        `--------------- use ---------------'

HOT is device memory, COLD is host memory. A pinned entry is HOT. Idle entries have one order: least
recently used first, each cold entry before each hot one. All entries have the same TTL, so this is
also the order of expiry.

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
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable, Hashable


class Tier(enum.Enum):
    """The memory of a buffer: of the device (HOT) or of the host (COLD)."""

    HOT = "hot"
    COLD = "cold"


@dataclasses.dataclass(eq=False, slots=True)
class Entry:
    """One encoder output. The cache is its only writer.

    If an entry is discarded while pinned, no lookup finds it; its last unpin drops it.

    Attributes:
        id: identifies its buffer.
        num_tokens: rows of the embedding.
        ready: whether the encoder has filled it.
        num_bytes: of its buffer; 0 until it is ready.
        expires: seconds on the clock of `now`.
        pins: the owners that use it.
        waiters: called once when the entry is ready (None) or has failed.
    """

    id: int
    image_key: bytes
    num_tokens: int
    ready: bool = False
    num_bytes: int = 0
    expires: float = 0.0
    tier: Tier = Tier.HOT
    pins: set[Hashable] = dataclasses.field(default_factory=set)
    waiters: list[Callable[[Exception | None], None]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class TierMove:
    """An action on the buffer of an entry: copy it to a tier, or drop it (None)."""

    entry: Entry
    to: Tier | None


@dataclasses.dataclass(eq=False, slots=True)
class CacheTier:
    """The counts of one tier. `idle` has the evictable entries, least recently used first."""

    max_bytes: int
    num_bytes: int = 0
    num_entries: int = 0
    num_hits: int = 0
    num_evictions: int = 0
    idle: collections.OrderedDict[int, Entry] = dataclasses.field(
        default_factory=collections.OrderedDict
    )

    @property
    def oldest(self) -> Entry:
        """The least recently used idle entry."""
        return next(iter(self.idle.values()))

    def add(self, entry: Entry) -> None:
        """Count an entry in this tier."""
        self.num_bytes += entry.num_bytes
        self.num_entries += 1

    def remove(self, entry: Entry) -> None:
        """Stop counting an entry in this tier."""
        self.idle.pop(entry.id, None)
        self.num_bytes -= entry.num_bytes
        self.num_entries -= 1


class Lookup(enum.Enum):
    """The result of a lookup."""

    HIT = "hit"  # the entry is ready
    JOIN = "join"  # another request encodes it: wait for the same entry
    MISS = "miss"  # there is no entry: encode, then `complete` or `fail`


class EncoderCache:
    """Entries by image key. Time is an argument; the caller keeps the buffers by `Entry.id`.

    Args:
        max_bytes: budget of the hot tier.
        cold_bytes: budget of the cold tier; 0 disables it.
        ttl_seconds: an entry expires if it was not used for this time.
    """

    def __init__(self, *, max_bytes: int, cold_bytes: int = 0, ttl_seconds: float) -> None:
        self.hot, self.cold = CacheTier(max_bytes), CacheTier(cold_bytes)
        self.num_misses = 0
        self.num_joins = 0
        self.num_evictions = 0
        self.num_expirations = 0
        self.num_demotions = 0
        self.num_promotions = 0
        self.num_pins = 0
        self._ttl_seconds = ttl_seconds
        self._listed: dict[bytes, Entry] = {}
        self._moves: list[TierMove] = []
        self._next_id = 0

    def __len__(self) -> int:
        """Number of entries that a lookup can find."""
        return len(self._listed)

    @property
    def num_bytes(self) -> int:
        """Bytes in both tiers."""
        return self.hot.num_bytes + self.cold.num_bytes

    @property
    def num_hits(self) -> int:
        """Hits in both tiers."""
        return self.hot.num_hits + self.cold.num_hits

    # ---- for users of embeddings -----------------------------------------------------------------

    def find(self, image_key: bytes, *, num_tokens: int, now: float) -> Entry | None:
        """The usable entry of a key: ready and not expired, or being filled. Changes nothing."""
        entry = self._listed.get(image_key)
        if entry is None or entry.num_tokens != num_tokens:
            return None
        return None if entry.ready and entry.expires <= now else entry

    def use(self, entry: Entry, owner: Hashable, *, now: float, counted: bool = True) -> None:
        """Pin an entry for `owner`; idempotent.

        The caller must have copied the buffer of a cold entry to the device before.

        Args:
            entry: the result of `find` in the same turn.
            owner: must unpin it.
            now: extends the expiry of a ready entry.
            counted: count a hit or a join; False if the same lookup was counted before.
        """
        if counted:
            self._count(entry)
        if entry.tier is Tier.COLD:
            self.cold.remove(entry)
            entry.tier = Tier.HOT
            self.hot.add(entry)
            self.num_promotions += 1
            self._make_room(now)
        if entry.ready:
            entry.expires = now + self._ttl_seconds
        self._pin(entry, owner)

    def begin(self, image_key: bytes, owner: Hashable, *, num_tokens: int) -> Entry:
        """Add an entry to be filled, pinned for `owner`; it replaces an entry of the same key.

        The owner must `complete` or `fail` it. Counts as a miss.
        """
        if image_key in self._listed:
            self.discard(self._listed[image_key])
        self._next_id += 1
        entry = Entry(self._next_id, image_key, num_tokens)
        self._listed[image_key] = entry
        self._pin(entry, owner)
        self.num_misses += 1
        return entry

    def unpin(self, entry: Entry, owner: Hashable, *, now: float) -> None:
        """Remove the pin of an owner; idempotent."""
        if owner not in entry.pins:
            return
        entry.pins.remove(owner)
        self.num_pins -= 1
        if not entry.pins:
            self._settle(entry, now)

    # ---- for the encoder -------------------------------------------------------------------------

    def complete(self, entry: Entry, *, num_bytes: int, now: float) -> None:
        """Mark an entry as filled, in the hot tier; older idle entries are demoted or evicted."""
        assert not entry.ready
        entry.ready = True
        entry.num_bytes = num_bytes
        entry.expires = now + self._ttl_seconds
        self.hot.add(entry)
        if not entry.pins:
            self._settle(entry, now)
        self._make_room(now)

    def fail(self, entry: Entry) -> None:
        """Discard an entry that will never be filled; the next lookup misses."""
        assert not entry.ready
        self.discard(entry)

    def discard(self, entry: Entry) -> None:
        """Hide an entry from lookups; it is dropped at once, or with its last pin."""
        if self._is_listed(entry):
            del self._listed[entry.image_key]
        if not entry.pins:
            self._drop(entry)

    # ---- eviction --------------------------------------------------------------------------------

    def expire(self, *, now: float) -> None:
        """Discard the idle entries that have expired."""
        for cache_tier in (self.cold, self.hot):
            while cache_tier.idle and cache_tier.oldest.expires <= now:
                self.num_expirations += 1
                self.discard(cache_tier.oldest)

    def take_moves(self) -> list[TierMove]:
        """Return and clear the actions on buffers since the last call, in order."""
        moves, self._moves = self._moves, []
        return moves

    def check(self) -> None:
        """Raise AssertionError if the entries and the counts disagree."""
        idle = [*self.cold.idle.values(), *self.hot.idle.values()]
        for entry in idle:
            assert entry.ready, "E1: an idle entry is not filled"
            assert not entry.pins, "E1: an idle entry is pinned"
            assert self._is_listed(entry), "an idle entry cannot be found"
        expiries = [entry.expires for entry in idle]
        assert expiries == sorted(expiries), "E1: the order of use is not that of expiry"
        assert self.cold.num_entries == len(self.cold.idle), "E3: a cold entry is in use"
        assert self.cold.num_bytes == sum(entry.num_bytes for entry in self.cold.idle.values())
        assert self.cold.num_bytes <= self.cold.max_bytes, "E6: the cold tier exceeds its budget"
        over = self.hot.num_bytes > self.hot.max_bytes
        assert not (over and self.hot.idle), "E6: idle entries exceed the hot tier's budget"

    def _make_room(self, now: float) -> None:
        hot, cold = self.hot, self.cold
        if hot.num_bytes <= hot.max_bytes:
            return
        self.expire(now=now)
        while hot.num_bytes > hot.max_bytes and hot.idle:
            hot.num_evictions += 1
            entry = hot.oldest
            if entry.num_bytes > cold.max_bytes:
                self._evict(entry)
                continue
            while cold.num_bytes + entry.num_bytes > cold.max_bytes:
                cold.num_evictions += 1
                self._evict(cold.oldest)
            self._demote(entry)

    def _demote(self, entry: Entry) -> None:
        self.hot.remove(entry)
        entry.tier = Tier.COLD
        self.cold.add(entry)
        self.cold.idle[entry.id] = entry
        self.num_demotions += 1
        self._moves.append(TierMove(entry, Tier.COLD))

    def _evict(self, entry: Entry) -> None:
        self.num_evictions += 1
        self.discard(entry)

    # ---- parts -----------------------------------------------------------------------------------

    def _count(self, entry: Entry) -> None:
        if not entry.ready:
            self.num_joins += 1
        elif entry.tier is Tier.HOT:
            self.hot.num_hits += 1
        else:
            self.cold.num_hits += 1

    def _pin(self, entry: Entry, owner: Hashable) -> None:
        if owner not in entry.pins:
            entry.pins.add(owner)
            self.num_pins += 1
        self.hot.idle.pop(entry.id, None)

    def _settle(self, entry: Entry, now: float) -> None:
        """Make an entry without pins idle, or drop it."""
        if not self._is_listed(entry):
            self._drop(entry)
        elif entry.ready and entry.expires <= now:
            self.num_expirations += 1
            self.discard(entry)
        elif entry.ready:
            entry.expires = now + self._ttl_seconds
            self.hot.idle[entry.id] = entry
            self._make_room(now)

    def _is_listed(self, entry: Entry) -> bool:
        return self._listed.get(entry.image_key) is entry

    def _drop(self, entry: Entry) -> None:
        if entry.ready:
            (self.hot if entry.tier is Tier.HOT else self.cold).remove(entry)
        self._moves.append(TierMove(entry, None))
