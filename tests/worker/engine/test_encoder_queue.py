"""The encoder's queue counts what it has, whatever is pushed, abandoned or encoded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from worker.answers import make_image

from vlm_worker.core.encoder_cache import EncoderCache, Entry
from vlm_worker.core.fair_order import Rank
from vlm_worker.engine.attempts import EngineContext
from vlm_worker.engine.encoder_batches import EncoderQueue, num_pixels
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.testing import ChecksumRunner
from vlm_worker.types import PreparedImage, RequestKey

moves = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(-2, 2), st.integers(1, 9)),
        st.tuples(st.just("abandon"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("turn"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(moves)
def test_the_totals_are_those_of_the_queued_images(done: list[tuple[str, int, int]]) -> None:
    runner = ChecksumRunner()
    cache = EncoderCache(runner, max_bytes=1 << 20, ttl_seconds=60.0)
    settings = EngineSettings(max_model_len=64, max_encode_tokens=12)
    queue = EncoderQueue(EngineContext(runner, settings, clock=lambda: 0.0), cache)
    waiting: dict[Entry, PreparedImage] = {}
    for number, (move, value, num_tokens) in enumerate(done):
        if move == "push":
            image = make_image(number, num_tokens=num_tokens)
            entry = cache.begin(image.image_key, "owner", num_tokens=num_tokens)
            queue.push(
                entry,
                image,
                RequestKey(str(number), 0),
                rank=Rank(value, bytes(value % 2), float(value % 3)),
            )
            waiting[entry] = image
        elif move == "abandon" and waiting:
            entry = list(waiting)[value % len(waiting)]
            del waiting[entry]
            queue.abandon(entry)
            queue.abandon(entry)
        elif move == "turn":
            queue.turn(decoding=False)
            waiting = {entry: image for entry, image in waiting.items() if not entry.ready}
        assert len(queue) == len(waiting)
        assert queue.waiting_tokens == sum(image.num_tokens for image in waiting.values())
        assert queue.waiting_pixels == sum(map(num_pixels, waiting.values()))
    assert queue.drain(RuntimeError("ended")) == len(waiting)
    assert queue.waiting_tokens == queue.waiting_pixels == 0
