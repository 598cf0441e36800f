"""Which encoder outputs there are, being made, in use, or to be dropped. Bookkeeping without bytes.

    lookup_or_begin(key) -> MINE  nobody has it: encode, then `complete` or `fail`
                            JOIN  somebody is encoding it: wait with them
                            HIT   it is there
    an entry is evictable when it is READY and unpinned: least recently used first, budget in bytes

Laws (tests/worker/core/test_encoder_cache.py):

    E1  only READY, unpinned entries are evicted
    E2  an expired entry serves whoever pins it, and nobody new
    E4  whoever waits without blocks unpins (the engine's part)
    E5  an entry of another length than the request's placeholders is discarded, not served
    E6  the largest item always fits: what is pinned may exceed the budget, what is idle may not
    E7  a failed item leaves no entry behind
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Hashable


class Lookup(enum.Enum):
    """What `lookup_or_begin` found."""

    HIT = "hit"
    JOIN = "join"
    MINE = "mine"


@dataclasses.dataclass(eq=False, slots=True)
class Entry:
    """One encoder output. The cache is its only writer.

    One that was discarded while pinned is not found any more, and goes with its last pin.
    """

    id: int
    image_key: bytes
    num_tokens: int
    ready: bool = False
    num_bytes: int = 0
    expires: float = 0.0
    pins: set[Hashable] = dataclasses.field(default_factory=set)


class EncoderCache:
    """Entries by image key. Time is an argument; buffers are kept elsewhere, by `Entry.id`."""

    def __init__(self, *, max_bytes: int, ttl_seconds: float) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_hits = 0
        self.num_misses = 0
        self.num_evictions = 0
        self.num_pins = 0
        self._ttl_seconds = ttl_seconds
        self._listed: dict[bytes, Entry] = {}
        self._idle: collections.OrderedDict[int, Entry] = collections.OrderedDict()
        self._dropped: list[int] = []
        self._next_id = 0

    def __len__(self) -> int:
        """Entries that a lookup can find."""
        return len(self._listed)

    def find(self, image_key: bytes, *, num_tokens: int, now: float) -> Entry | None:
        """The entry that a lookup would hit or join. Changes nothing."""
        entry = self._listed.get(image_key)
        if entry is None or entry.num_tokens != num_tokens:
            return None
        return None if entry.ready and entry.expires <= now else entry

    def lookup_or_begin(
        self, image_key: bytes, *, num_tokens: int, now: float
    ) -> tuple[Lookup, Entry]:
        """Find an entry, or begin one that the caller has to complete or fail."""
        entry = self.find(image_key, num_tokens=num_tokens, now=now)
        if entry is not None:
            self.num_hits += 1
            if entry.ready:
                self.touch(entry, now=now)
            return (Lookup.HIT if entry.ready else Lookup.JOIN), entry
        self.num_misses += 1
        return Lookup.MINE, self.begin(image_key, num_tokens=num_tokens)

    def begin(self, image_key: bytes, *, num_tokens: int) -> Entry:
        """A new entry under the key, for the caller to complete or fail; replaces what is there."""
        if image_key in self._listed:
            self._discard(self._listed[image_key])
        self._next_id += 1
        entry = Entry(self._next_id, image_key, num_tokens)
        self._listed[image_key] = entry
        return entry

    def complete(self, entry: Entry, *, num_bytes: int, now: float) -> None:
        """The entry's output is there; older idle ones make room for it."""
        assert not entry.ready
        entry.ready = True
        entry.num_bytes = num_bytes
        self.num_bytes += num_bytes
        if self._is_listed(entry):
            self.touch(entry, now=now)
        elif not entry.pins:
            self._drop(entry)
        self._make_room()

    def fail(self, entry: Entry) -> None:
        """The entry will never be filled; the next lookup begins anew."""
        assert not entry.ready
        self._discard(entry)

    def touch(self, entry: Entry, *, now: float) -> None:
        """A READY entry is used now."""
        entry.expires = now + self._ttl_seconds
        if not entry.pins:
            self._idle[entry.id] = entry
            self._idle.move_to_end(entry.id)

    def pin(self, entry: Entry, owner: Hashable) -> None:
        """Keep the entry for `owner`; pinning twice is pinning once."""
        if owner not in entry.pins:
            entry.pins.add(owner)
            self.num_pins += 1
        self._idle.pop(entry.id, None)

    def unpin(self, entry: Entry, owner: Hashable) -> None:
        """The owner needs it no longer; idempotent."""
        if owner not in entry.pins:
            return
        entry.pins.remove(owner)
        self.num_pins -= 1
        if entry.pins:
            return
        if not self._is_listed(entry):
            self._drop(entry)
        elif entry.ready:
            self._idle[entry.id] = entry
            self._make_room()

    def expire(self, *, now: float) -> None:
        """Drop idle entries whose time is over."""
        while self._idle:
            oldest = next(iter(self._idle.values()))
            if oldest.expires > now:
                return
            self._evict(oldest)

    def take_dropped(self) -> list[int]:
        """Ids of entries that are gone since the last call: their buffers can be freed."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def check(self) -> None:
        """Raise AssertionError where the cache's own account does not add up."""
        for entry in self._idle.values():
            assert entry.ready, "E1: an idle entry is not filled"
            assert not entry.pins, "E1: an idle entry is pinned"
            assert self._is_listed(entry)
        idle_bytes = sum(entry.num_bytes for entry in self._idle.values())
        assert not self._idle or self.num_bytes <= self.max_bytes, "idle entries exceed the budget"
        assert idle_bytes <= self.num_bytes

    def _make_room(self) -> None:
        while self.num_bytes > self.max_bytes and self._idle:
            self._evict(next(iter(self._idle.values())))

    def _evict(self, entry: Entry) -> None:
        self.num_evictions += 1
        self._discard(entry)

    def _discard(self, entry: Entry) -> None:
        """Take an entry off the list; its pinners, if any, keep it."""
        if self._is_listed(entry):
            del self._listed[entry.image_key]
        self._idle.pop(entry.id, None)
        if not entry.pins:
            self._drop(entry)

    def _is_listed(self, entry: Entry) -> bool:
        return self._listed.get(entry.image_key) is entry

    def _drop(self, entry: Entry) -> None:
        self.num_bytes -= entry.num_bytes
        self._dropped.append(entry.id)
