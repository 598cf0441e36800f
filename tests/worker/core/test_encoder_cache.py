"""The encoder cache's laws E1-E7, for every order of operations, against a list of entries."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vlm_worker.core.encoder_cache import EncoderCache, Entry, Tier

HOT, COLD = 100, 60
TTL = 50.0
keys = st.sampled_from([b"a", b"b", b"c", b"d", b"e"])


@dataclasses.dataclass(eq=False)
class Known:
    """What the model knows of an entry; `used` orders by last use, later ones are larger."""

    entry: Entry
    used: int = 0
    num_bytes: int = 0
    expires: float = 0.0
    filled: bool = False
    cold: bool = False
    pins: set[int] = dataclasses.field(default_factory=set)


class Model:
    """The same cache as a list that is searched and sorted anew every time."""

    def __init__(self) -> None:
        self.listed: dict[bytes, Known] = {}
        self.unlisted: list[Known] = []  # pinned, and found by nobody
        self.clock = 0

    def all(self) -> list[Known]:
        return [*self.listed.values(), *self.unlisted]

    def size(self, *, cold: bool) -> int:
        return sum(k.num_bytes for k in self.all() if k.filled and k.cold is cold)

    def find(self, key: bytes, num_tokens: int, now: float) -> Known | None:
        known = self.listed.get(key)
        if known is None or known.entry.num_tokens != num_tokens:
            return None
        return None if known.filled and known.expires <= now else known

    def use(self, known: Known, now: float) -> None:
        self.clock += 1
        known.used = self.clock
        if known.filled:
            known.expires = now + TTL

    def forget(self, known: Known) -> None:
        del self.listed[known.entry.image_key]
        if known.pins:
            self.unlisted.append(known)

    def unpin(self, known: Known, now: float) -> None:
        if known.pins:
            return
        if known in self.unlisted:
            self.unlisted.remove(known)
        elif known.filled and known.expires <= now:
            self.forget(known)
        elif known.filled:
            self.use(known, now)
            self.evict_excess(now)

    def evict_excess(self, now: float) -> None:
        if self.size(cold=False) <= HOT:
            return
        self.expire(now)
        while self.size(cold=False) > HOT and (known := self.oldest(cold=False)):
            if known.num_bytes > COLD:
                self.forget(known)
                continue
            while self.size(cold=True) + known.num_bytes > COLD:
                old = self.oldest(cold=True)
                assert old is not None
                self.forget(old)
            known.cold = True

    def oldest(self, *, cold: bool) -> Known | None:
        idle = [k for k in self.listed.values() if k.filled and not k.pins and k.cold is cold]
        return min(idle, key=lambda known: known.used, default=None)

    def expire(self, now: float) -> None:
        for known in list(self.listed.values()):
            if known.filled and not known.pins and known.expires <= now:
                self.forget(known)


class BytesCodec:
    """Embeddings are bytes on the device, and a view of them on the host."""

    def export_embedding(self, embedding: bytes) -> memoryview:
        return memoryview(embedding)

    def import_embedding(self, rows: memoryview, num_tokens: int) -> bytes:
        return bytes(rows)

    def embedding_bytes(self, embedding: bytes) -> int:
        return len(embedding)


class CacheMachine(RuleBasedStateMachine):
    """The cache beside its model."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = EncoderCache(BytesCodec(), max_bytes=HOT, cold_bytes=COLD, ttl_seconds=TTL)
        self.model = Model()
        self.now = 0.0
        self.filling: list[Known] = []
        self.pins: list[tuple[Known, int]] = []
        self.owners = 0

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(key=keys, num_tokens=st.sampled_from([3, 4]))
    def somebody_needs_it(self, key: bytes, num_tokens: int) -> None:
        self.owners += 1
        entry = self.cache.lookup(key, self.owners, num_tokens=num_tokens, now=self.now)
        known = self.model.find(key, num_tokens, self.now)
        assert (entry is None) == (known is None), "E2, E5: what is found is what may be served"
        if entry is None:
            entry = self.cache.begin(key, self.owners, num_tokens=num_tokens)
            if key in self.model.listed:
                self.model.forget(self.model.listed[key])
            known = self.model.listed[key] = Known(entry)
            self.filling.append(known)
        else:
            assert known is not None
            assert known.entry is entry
            assert entry.image_key == key
            assert entry.num_tokens == num_tokens
            self.model.use(known, self.now)
        known.pins.add(self.owners)
        self.pins.append((known, self.owners))
        if known.cold:  # only uploaded entries take memory
            known.cold = False
            self.model.evict_excess(self.now)

    @precondition(lambda self: self.filling)
    @rule(num_bytes=st.integers(1, 150))
    def complete(self, num_bytes: int) -> None:
        known = self.filling.pop(0)
        self.cache.complete(known.entry, bytes(num_bytes), now=self.now)
        known.filled, known.num_bytes = True, num_bytes
        self.model.use(known, self.now)
        if not known.pins and self.model.listed.get(known.entry.image_key) is not known:
            known.num_bytes = 0  # nobody waits for it any more
        self.model.evict_excess(self.now)

    @precondition(lambda self: self.filling)
    @rule()
    def fail(self) -> None:
        known = self.filling.pop()
        entry = known.entry
        self.cache.fail(entry)
        if self.model.listed.get(entry.image_key) is known:
            self.model.forget(known)
        found = self.cache.find(entry.image_key, num_tokens=entry.num_tokens, now=self.now)
        assert found is not entry, "E7: a failed entry is still found"

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        known, owner = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        known.pins.discard(owner)
        self.model.unpin(known, self.now)
        self.cache.unpin(known.entry, owner, now=self.now)
        self.cache.unpin(known.entry, owner, now=self.now)  # twice is once

    @rule()
    def expire(self) -> None:
        self.cache.expire(now=self.now)
        self.model.expire(self.now)

    @invariant()
    def the_cache_is_its_model(self) -> None:
        self.cache.check()
        for known in self.model.all():
            entry = known.entry
            tier = Tier.COLD if known.cold else Tier.HOT
            assert entry.tier is tier, "E3: an entry is in the other tier"
            kind = memoryview if known.cold else bytes
            held = isinstance(entry.buffer, kind) and len(entry.buffer) == known.num_bytes
            assert held is known.filled, "E1: an entry that is in use has no embedding"
        assert self.cache.hot.num_bytes == self.model.size(cold=False)
        assert self.cache.cold.num_bytes == self.model.size(cold=True)
        assert self.cache.num_pins == len(self.pins)
        pinned = sum(k.num_bytes for k in self.model.all() if k.pins)
        assert self.cache.hot.num_bytes <= max(HOT, pinned), "E6: idle over budget"


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestCache = CacheMachine.TestCase


class LongCacheMachine(CacheMachine):
    """The same, for longer."""


LongCacheMachine.TestCase.settings = settings(max_examples=5000, stateful_step_count=60)
TestCacheAtLength = pytest.mark.timeout(1800)(pytest.mark.full(LongCacheMachine.TestCase))
