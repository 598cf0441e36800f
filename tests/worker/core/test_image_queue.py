"""The encoder's queue against a list that is sorted and summed whenever somebody asks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.encoder_cache import Entry
from vlm_worker.core.image_queue import EncodeTask, ImageQueue
from vlm_worker.testing import make_image
from vlm_worker.types import RequestKey

AGEING = 3.0

moves = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(-2, 2), st.integers(1, 9)),
        st.tuples(st.just("take"), st.just(0), st.just(0)),
        st.tuples(st.just("drop"), st.integers(0, 40), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 2), st.just(0)),
    ),
    max_size=60,
)


@given(moves)
def test_it_tells_and_gives_what_a_sorted_list_would(done: list[tuple[str, int, int]]) -> None:
    queue, naive, now = ImageQueue(ageing_seconds=AGEING), list[EncodeTask](), 0.0
    for number, (move, value, num_tokens) in enumerate(done):
        if move == "push":
            image = make_image(number, num_tokens=num_tokens)
            entry = Entry(number, image.image_key, num_tokens)
            fill = EncodeTask(entry, image, RequestKey(str(number), 0), value, number, now)
            queue.push(fill)
            naive.append(fill)
        elif move == "wait":
            now += value
        elif move == "drop" and naive:
            fill = naive.pop(value % len(naive))
            assert queue.remove(fill.entry) is fill
            assert queue.remove(fill.entry) is None
        elif move == "take" and naive:
            first = queue.first(now=now)
            assert first is not None
            queue.remove(first.entry)
            naive.remove(first)
        aged = [fill for fill in naive if now - fill.arrived_at >= AGEING]
        ranked = sorted(aged, key=lambda f: f.arrival) or sorted(
            naive, key=lambda f: (-f.priority, f.arrival)
        )
        assert queue.first(now=now) is (ranked[0] if ranked else None)
        assert len(queue) == len(naive)
        assert queue.num_tokens == sum(fill.image.num_tokens for fill in naive)
        assert queue.num_pixels == sum(fill.num_pixels for fill in naive)
