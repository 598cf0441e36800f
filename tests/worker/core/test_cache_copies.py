"""The embedding that is served is the one that was encoded, whichever tier it was in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.encoder_cache import EncoderCache, Entry, Tier
from vlm_worker.engine.runner import EmbeddingCopies

TTL = 50.0


class Codec:
    """Embeddings are strings; copies fail while their counts are above 0."""

    def __init__(self) -> None:
        self.failing_exports = 0
        self.failing_imports = 0

    def export_embedding(self, embedding: str) -> memoryview:
        if self.failing_exports:
            self.failing_exports -= 1
            raise MemoryError("no host memory")
        return memoryview(embedding.encode())

    def import_embedding(self, rows: memoryview, num_tokens: int) -> str:
        if self.failing_imports:
            self.failing_imports -= 1
            raise MemoryError("no device memory")
        return bytes(rows).decode()

    def embedding_bytes(self, embedding: str) -> int:
        return len(embedding)


def encoded(key: bytes) -> str:
    """What the encoder makes of an image: of another size for each."""
    return key.decode() * (4 + key[0] % 5)


def need(cache: EncoderCache, key: bytes, owner: object, *, now: float) -> tuple[bool, Entry]:
    """Look an embedding up, encode it if it is not there, and see that it is the right one.

    Returns whether it was there, and its entry.
    """
    known = cache.lookup(key, owner, num_tokens=4, now=now)
    entry = known or cache.begin(key, owner, num_tokens=4)
    if known is None:
        cache.complete(entry, encoded(key), now=now)
    assert entry.buffer == encoded(key)
    cache.check()
    return known is not None, entry


operations = st.lists(
    st.tuples(
        st.sampled_from(["use", "use", "use", "hold", "let go", "wait", "export", "import"]),
        st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"]),
    ),
    max_size=60,
)


@given(operations, st.integers(0, 20), st.integers(0, 20))
def test_whatever_happens_each_image_has_its_own_embedding(
    todo: list[tuple[str, bytes]], hot: int, cold: int
) -> None:
    codec = Codec()
    cache = EncoderCache(codec, max_bytes=hot, cold_bytes=cold, ttl_seconds=TTL)
    held: list[tuple[Entry, int]] = []
    now = 0.0
    for owner, (what, key) in enumerate(todo):
        if what == "use":
            _, entry = need(cache, key, owner, now=now)
            cache.unpin(entry, owner, now=now)
        elif what == "hold":
            held.append((need(cache, key, owner, now=now)[1], owner))
        elif what == "let go" and held:
            cache.unpin(*held.pop(0), now=now)
        elif what == "wait":
            now += TTL / 3
        elif what == "export":
            codec.failing_exports = 1
        elif what == "import":
            codec.failing_imports = 1
        for entry, _ in held:
            assert entry.buffer == encoded(entry.image_key)
        cache.check()
    for entry, owner in held:
        cache.unpin(entry, owner, now=now)
    cache.expire(now=now + TTL)
    assert cache.hot.num_entries == cache.cold.num_entries == cache.num_pins == 0
    cache.check()


def idle(cache: EncoderCache, key: bytes) -> tuple[bool, Entry]:
    """Need an embedding for a moment."""
    found, entry = need(cache, key, "me", now=0.0)
    cache.unpin(entry, "me", now=0.0)
    return found, entry


def test_an_embedding_is_restored_from_host_memory_unchanged() -> None:
    cache = EncoderCache(Codec(), max_bytes=8, cold_bytes=8, ttl_seconds=TTL)
    _, first = idle(cache, b"a")
    idle(cache, b"b")
    assert first.tier is Tier.COLD
    found, again = idle(cache, b"a")
    assert (found, again) == (True, first)
    assert cache.cold.num_hits == cache.num_promotions == 1


@pytest.mark.parametrize("way", ["failing_exports", "failing_imports"])
def test_a_copy_that_fails_is_a_miss_and_no_more(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    codec = Codec()
    cache = EncoderCache(EmbeddingCopies(codec), max_bytes=8, cold_bytes=8, ttl_seconds=TTL)
    setattr(codec, way, 1)
    idle(cache, b"a")
    idle(cache, b"b")  # a is carried to host memory
    found, _ = idle(cache, b"a")  # and back
    assert not found
    assert getattr(codec, way) == 0, "the fault did not happen"
    assert caplog.messages == ["a copy failed"]
    assert idle(cache, b"a")[0]
