"""Which encoder outputs there are, being made, in use, or to be dropped. Bookkeeping without bytes.

    begin -> filling -> complete -> HOT, pinned <-> HOT, idle --no room--> COLD --no room--> gone
                `-> fail                ^                                   |
                                        `--------------- use ---------------'

Idle entries of both tiers stand in one order, least recently used first, every cold one before
every hot one; since all live equally long, it is also the order in which they expire. HOT is memory
of the device, COLD of the host; what is pinned is HOT.

A key stands for pixels and for every effective parameter that they were processed with, resolution
among them: another resolution is another picture, and never served in its place.

Laws (tests/worker/core/test_encoder_cache.py):

    E1  only READY, unpinned entries are evicted: expired ones first, then least recently used
    E2  an expired entry serves whoever pins it, and nobody new
    E3  what a tier has no room for goes to the next one; a use brings it back
    E4  whoever waits without blocks unpins (the engine's part)
    E5  an entry of another length than the request's placeholders is discarded, not served
    E6  the largest item always fits: what is pinned may exceed the budget, what is idle may not
    E7  a failed item leaves no entry behind
"""

from __future__ import annotations

import enum
from collections.abc import Hashable

from vlm_worker.core.encoder_entries import Entry, Move, Shelf, Tier


class Lookup(enum.Enum):
    """What somebody who needs an embedding found."""

    HIT = "hit"  # it is there
    JOIN = "join"  # somebody is encoding it: wait with them
    MINE = "mine"  # nobody has it: encode, then `complete` or `fail`


class EncoderCache:
    """Entries by image key. Time is an argument; buffers are kept elsewhere, by `Entry.id`.

    Args:
        max_bytes: budget of the hot tier.
        cold_bytes: budget of the cold tier; 0 is none.
        ttl_seconds: an entry that nobody used for so long is not served again.
    """

    def __init__(self, *, max_bytes: int, cold_bytes: int = 0, ttl_seconds: float) -> None:
        self.hot, self.cold = Shelf(max_bytes), Shelf(cold_bytes)
        self.num_misses = 0
        self.num_joins = 0
        self.num_evictions = 0
        self.num_expirations = 0
        self.num_demotions = 0
        self.num_promotions = 0
        self.num_pins = 0
        self._ttl_seconds = ttl_seconds
        self._listed: dict[bytes, Entry] = {}
        self._moves: list[Move] = []
        self._next_id = 0

    def __len__(self) -> int:
        """Entries that a lookup can find."""
        return len(self._listed)

    @property
    def num_bytes(self) -> int:
        """Of both tiers."""
        return self.hot.num_bytes + self.cold.num_bytes

    @property
    def num_hits(self) -> int:
        """Of both tiers."""
        return self.hot.num_hits + self.cold.num_hits

    # ---- for whoever needs an embedding ----------------------------------------------------------

    def find(self, image_key: bytes, *, num_tokens: int, now: float) -> Entry | None:
        """The entry that can be used: READY, or being filled. Changes nothing."""
        entry = self._listed.get(image_key)
        if entry is None or entry.num_tokens != num_tokens:
            return None
        return None if entry.ready and entry.expires <= now else entry

    def use(self, entry: Entry, owner: Hashable, *, now: float, counted: bool = True) -> None:
        """Pin what `find` returned for `owner`; pinning twice is pinning once.

        The caller has brought a cold entry's buffer up before.

        Args:
            entry: found in the same turn.
            owner: who unpins it.
            now: the entry is used now.
            counted: a hit or a join, for the statistics; False where the same need was counted.
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
        """A new entry, pinned for `owner`, who has it completed or failed; replaces what is there.

        Counts as a miss.
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
        """The owner needs it no longer; idempotent."""
        if owner not in entry.pins:
            return
        entry.pins.remove(owner)
        self.num_pins -= 1
        if not entry.pins:
            self._settle(entry, now)

    # ---- for whoever fills it --------------------------------------------------------------------

    def complete(self, entry: Entry, *, num_bytes: int, now: float) -> None:
        """The entry's output is there, in the hot tier; older idle ones make room for it."""
        assert not entry.ready
        entry.ready = True
        entry.num_bytes = num_bytes
        entry.expires = now + self._ttl_seconds
        self.hot.add(entry)
        if not entry.pins:
            self._settle(entry, now)
        self._make_room(now)

    def fail(self, entry: Entry) -> None:
        """The entry will never be filled; the next lookup begins anew."""
        assert not entry.ready
        self.discard(entry)

    def discard(self, entry: Entry) -> None:
        """Nobody finds the entry any more; its pinners, if any, keep it."""
        if self._is_listed(entry):
            del self._listed[entry.image_key]
        if not entry.pins:
            self._drop(entry)

    # ---- making room -----------------------------------------------------------------------------

    def expire(self, *, now: float) -> None:
        """Drop idle entries whose time is over."""
        for shelf in (self.cold, self.hot):
            while shelf.idle and shelf.oldest.expires <= now:
                self.num_expirations += 1
                self.discard(shelf.oldest)

    def take_moves(self) -> list[Move]:
        """What is to be done with buffers since the last call, in order."""
        moves, self._moves = self._moves, []
        return moves

    def check(self) -> None:
        """Raise AssertionError where the cache's own account does not add up."""
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
        self._moves.append(Move(entry, Tier.COLD))

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
        """An entry that nobody pins is idle from now on, or gone."""
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
        self._moves.append(Move(entry, None))
