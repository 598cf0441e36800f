"""A prefetch fills the prefix cache and changes nothing else: no token, no wait, no block."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from worker.answers import image_item, make_image
from worker.engine.by_hand import ByHand
from worker.engine.talk import text

from vlm_worker.core.block_kinds import BlockKinds
from vlm_worker.engine import prefetches
from vlm_worker.engine.prefetches import whole_blocks
from vlm_worker.errors import ContextTooLongError, DrainingError
from vlm_worker.testing import IMAGE_TOKEN
from vlm_worker.types import (
    ImageItem,
    Narrow,
    Request,
    RequestKey,
    SamplingParams,
    TokenEvent,
)
from vlm_worker.wire.prefetch_messages import PrefetchOutcome, PrefetchResult

BLOCK_SIZE = 4
CHUNK = 8


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetches, "CHUNK_TOKENS", CHUNK)


def prefetch(engine: ByHand, request: Request) -> list[PrefetchResult]:
    results: list[PrefetchResult] = []
    engine.state.prefetch(request, results.append)
    return results


def run(engine: ByHand) -> None:
    while engine.turn():
        pass
    engine.state.check_idle()


def with_image(name: str = "i", *, before: int = 2, after: int = 14, salt: bytes = b"") -> Request:
    image = make_image(1, num_tokens=5)
    token_ids = (*range(30, 30 + before), *[IMAGE_TOKEN] * 5, *range(50, 50 + after))
    return Request(
        RequestKey(name, 0),
        token_ids,
        len(token_ids),
        SamplingParams(max_tokens=4),
        (image_item(image, before),),
        cache_salt=salt,
    )


def cached_tokens(engine: ByHand, request: Request) -> int:
    engine.submit(request)
    run(engine)
    events = engine.told[request.key.request_id]
    return max(event.num_cached_tokens for event in events if isinstance(event, TokenEvent))


def test_a_follow_up_finds_the_whole_blocks_of_a_prefetch() -> None:
    engine = ByHand()
    results = prefetch(engine, text("p", length=30))
    assert results == []
    run(engine)
    assert results == [PrefetchResult(PrefetchOutcome.COMPUTED, 0, 28)]
    assert engine.told == {}, "nobody sees a token"
    assert cached_tokens(engine, text("r", length=34)) == 28


def test_only_the_missing_tail_is_computed() -> None:
    engine = ByHand()
    engine.submit(text("r", length=18, max_tokens=1))
    run(engine)
    results = prefetch(engine, text("p", length=30))
    run(engine)
    assert results == [PrefetchResult(PrefetchOutcome.COMPUTED, 16, 12)]
    assert prefetch(engine, text("q", length=29)) == [PrefetchResult(PrefetchOutcome.CACHED, 28)]


@given(length=st.integers(1, 50), more=st.integers(1, 10), steps=st.integers(0, 8))
def test_a_request_has_the_same_tokens_whenever_it_interrupts_a_prefetch(
    length: int, more: int, steps: int
) -> None:
    alone, together = ByHand(), ByHand()
    request = text("r", length=length + more, max_tokens=3)
    prefetch(together, text("p", length=length))
    for _ in range(steps):
        together.turn()
    for engine in (alone, together):
        engine.submit(request)
        run(engine)
    assert together.tokens("r") == alone.tokens("r")


@given(steps=st.integers(0, 6))
def test_a_request_waits_for_at_most_one_chunk_and_every_block_is_returned(steps: int) -> None:
    engine = ByHand(num_blocks=17)
    results = prefetch(engine, text("p", length=48))
    for _ in range(steps):
        engine.turn()
    num_calls = len(engine.calls)
    assert num_calls == min(steps, 6)
    # All 16 blocks are needed: the request gets them although the prefetch had up to 12.
    engine.submit(dataclasses.replace(text("r", length=60, max_tokens=3)))
    assert engine.state.sequences.pool.num_used == 0, "it gives way before the request takes blocks"
    engine.turn()
    assert len(engine.calls) == num_calls + 1, "the next step is the request's"
    assert engine.state.sequences.num_requests == 1
    expected = PrefetchOutcome.COMPUTED if steps >= 6 else PrefetchOutcome.YIELDED
    assert [result.outcome for result in results] == [expected]
    run(engine)
    pool = engine.state.sequences.pool
    assert (pool.num_used, pool.num_reserved) == (0, 0)
    pool.check()


def test_a_reservation_finds_the_blocks_of_a_prefetch_free() -> None:
    engine = ByHand(num_blocks=17)
    results = prefetch(engine, text("p", length=60))
    engine.turn()
    engine.state.sequences.reserve(RequestKey("r", 0), 64)
    assert [result.outcome for result in results] == [PrefetchOutcome.YIELDED]
    engine.state.sequences.release(RequestKey("r", 0))


def test_images_to_encode_end_a_prefetch() -> None:
    engine = ByHand()
    results = prefetch(engine, text("p", length=30))
    engine.turn()
    engine.encode("e", [make_image(7, num_tokens=3)])
    engine.turn()
    assert [result.outcome for result in results] == [PrefetchOutcome.YIELDED]
    assert results[0].num_computed_tokens == CHUNK


def test_a_prefetch_does_not_start_beside_a_request_or_another_prefetch() -> None:
    engine = ByHand()
    engine.submit(text("r", length=10))
    busy = [PrefetchResult(PrefetchOutcome.BUSY)]
    assert prefetch(engine, text("p", length=30)) == busy
    run(engine)
    assert prefetch(engine, text("p", length=30)) == []
    assert prefetch(engine, text("q", length=30)) == busy
    run(engine)


def test_a_prompt_without_a_whole_block_needs_nothing() -> None:
    engine = ByHand()
    assert prefetch(engine, text("p", length=3)) == [PrefetchResult(PrefetchOutcome.CACHED)]
    assert not engine.turn()


def test_it_is_given_up_if_an_image_is_in_no_cache_and_encodes_nothing() -> None:
    engine = ByHand()
    results = prefetch(engine, with_image(before=9))
    run(engine)
    assert [result.outcome for result in results] == [PrefetchOutcome.NO_EMBEDDING]
    assert engine.state.encode_requests.queue.num_images == 0
    assert engine.told == {}


def test_it_reads_the_embeddings_of_the_encoder_cache_and_unpins_them() -> None:
    engine, fresh = ByHand(), ByHand()
    image = make_image(1, num_tokens=5)
    for one in (engine, fresh):
        one.encode("e", [image])
        one.turn()
        one.state.encode_requests.release(RequestKey("e", 0), 0)
        run(one)
    hits = engine.state.encode_requests.cache.hot.num_hits
    results = prefetch(engine, with_image(after=30))
    run(engine)
    assert results == [PrefetchResult(PrefetchOutcome.COMPUTED, 0, 36)]
    assert engine.state.encode_requests.cache.num_pins == 0
    assert engine.state.encode_requests.cache.hot.num_hits == hits
    for one in (engine, fresh):
        one.submit(with_image("r", after=33))
        run(one)
    assert engine.tokens("r") == fresh.tokens("r")


def test_a_prefetch_shares_nothing_with_another_salt() -> None:
    engine = ByHand()
    mine = dataclasses.replace(text("p", length=30), cache_salt=b"m" * 32)
    prefetch(engine, mine)
    run(engine)
    other = dataclasses.replace(text("o", length=34), cache_salt=b"o" * 32)
    assert cached_tokens(engine, other) == 0
    own = dataclasses.replace(text("s", length=34), cache_salt=b"m" * 32)
    assert cached_tokens(engine, own) == 28


def test_a_prefetch_is_in_no_statistic_of_requests() -> None:
    engine = ByHand()
    before = engine.state.snapshot()
    prefetch(engine, text("p", length=30))
    engine.turn()
    during = engine.state.snapshot()
    assert during.kv is not None
    assert before.kv is not None
    assert during.kv.running_tokens == 0
    available = before.kv.free_tokens + before.kv.cached_tokens
    assert during.kv.free_tokens + during.kv.cached_tokens == available
    run(engine)
    after = engine.state.snapshot()
    assert (after.inflight, after.num_running, after.requests) == (0, 0, 0)
    assert after.work_admitted_seconds_total == 0
    assert after.busy == before.busy
    assert after.queue == before.queue
    assert after.count("output_tokens") == 0
    assert after.count("prefix_cache_queries") == 0


def test_prefetched_tokens_are_used_or_wasted() -> None:
    engine = ByHand(num_blocks=17)
    prefetch(engine, text("p", length=30))
    run(engine)
    assert _counts(engine) == {"computed": 28, "used": 0, "wasted": 0}
    engine.submit(text("r", length=18, max_tokens=1))
    run(engine)
    assert _counts(engine) == {"computed": 28, "used": 16, "wasted": 0}
    engine.submit(dataclasses.replace(text("o", length=60, max_tokens=1), cache_salt=b"o" * 32))
    run(engine)
    counts = _counts(engine)
    assert counts["used"] == 16
    assert 0 < counts["wasted"] <= 12
    engine.state.sequences.pool.check()


def _counts(engine: ByHand) -> dict[str, float]:
    counts = engine.state.snapshot().counters["prefetched_tokens"]
    assert isinstance(counts, dict)
    return counts


def test_a_step_that_fails_ends_the_prefetch_alone() -> None:
    engine = ByHand()
    results = prefetch(engine, text("p", length=30))
    engine.turn()
    engine.runner.faults.crash_steps = 1
    run(engine)
    assert results == [PrefetchResult(PrefetchOutcome.FAILED, 0, CHUNK)]
    assert engine.state.unhealthy_reason is None
    engine.submit(text("r", length=34))
    run(engine)
    alone = ByHand()
    alone.submit(text("r", length=34))
    run(alone)
    assert engine.tokens("r") == alone.tokens("r")


def test_a_prefetch_that_has_no_blocks_is_given_up() -> None:
    engine = ByHand(num_blocks=17)
    engine.state.sequences.pool.take(10)
    results = prefetch(engine, text("p", length=48))
    engine.turn()
    assert [result.outcome for result in results] == [PrefetchOutcome.NO_BLOCKS]
    assert engine.state.sequences.pool.num_used == 10


def test_draining_ends_a_prefetch_and_refuses_the_next() -> None:
    engine = ByHand()
    results = prefetch(engine, text("p", length=30))
    engine.turn()
    engine.state.drain()
    assert [result.outcome for result in results] == [PrefetchOutcome.YIELDED]
    with pytest.raises(DrainingError):
        prefetch(engine, text("q", length=30))


def test_a_prompt_beyond_the_context_is_refused_by_name() -> None:
    with pytest.raises(ContextTooLongError, match="64"):
        prefetch(ByHand(), text("p", length=70))


@given(before=st.integers(0, 20), after=st.integers(0, 20))
def test_whole_blocks_contain_each_image_whole_or_not_at_all(before: int, after: int) -> None:
    request = with_image(before=before, after=after)
    cut = whole_blocks(request, kinds=BlockKinds(BLOCK_SIZE))
    if cut is None:
        assert len(request.token_ids) < BLOCK_SIZE or before < BLOCK_SIZE
        return
    end = len(cut.token_ids)
    assert end % BLOCK_SIZE == 0
    assert cut.token_ids == request.token_ids[:end]
    assert [item.end <= end for item in cut.items] == [True] * len(cut.items)
    assert (IMAGE_TOKEN in cut.token_ids) == bool(cut.items)
    assert len(request.token_ids) - end < BLOCK_SIZE + 5


@pytest.mark.parametrize(
    "kinds",
    [
        BlockKinds(8),
        BlockKinds(8, Narrow.VISION, 2),
        BlockKinds(8, Narrow.TEXT, 2),
        BlockKinds(8, Narrow.VISION_KIVI4, 4),
    ],
    ids=lambda kinds: str(kinds.narrow),
)
@given(
    spans=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 110)), max_size=4),
    num_last=st.integers(1, 40),
)
@example(spans=[(8, 103), (0, 50)], num_last=3)
def test_a_beginning_cuts_no_image_and_ends_at_blocks_of_its_own(
    kinds: BlockKinds, spans: list[tuple[int, int]], num_last: int
) -> None:
    token_ids: list[int] = []
    items = []
    for number, (num_text, num_tokens) in enumerate(spans):
        token_ids += [5] * num_text
        image = make_image(number, num_tokens=num_tokens)
        items.append(ImageItem(image.image_key, len(token_ids), num_tokens, image.grid_thw))
        token_ids += [IMAGE_TOKEN] * num_tokens
    token_ids += [6] * num_last
    request = Request(
        RequestKey("r", 0),
        tuple(token_ids),
        len(token_ids),
        SamplingParams(max_tokens=1),
        tuple(items),
    )
    cut = whole_blocks(request, kinds=kinds)
    if cut is None:
        return
    end = len(cut.token_ids)
    assert cut.items == tuple(item for item in items if item.end <= end)
    assert all(item.end <= end or item.offset >= end for item in items)
    shape = kinds.of_items(cut.items)
    assert shape.num_tokens(shape.num_full(end)) == end
