"""A chunk's laws, for all prompts and budgets."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.chunks import Chunk, TokenBudget, next_chunk
from vlm_worker.core.sequence import Sequence
from vlm_worker.types import ImageItem, Request, RequestKey, SamplingParams

Prompt = tuple[int, tuple[ImageItem, ...], list[object | None]]


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Length, items, and which of them are on hand."""
    length, items, embeddings = 0, [], []
    for _ in range(draw(st.integers(0, 3))):
        length += draw(st.integers(0, 4))
        size = draw(st.integers(1, 6))
        items.append(ImageItem(b"", length, size, (1, 1, 1)))
        embeddings.append(draw(st.sampled_from([None, "rows"])))
        length += size
    return length + draw(st.integers(1, 4)), tuple(items), embeddings


@given(prompts(), st.integers(0, 30), st.integers(1, 20), st.booleans())
def test_a_chunk_fits_and_touches_only_images_on_hand(
    prompt: Prompt,
    start: int,
    budget: int,
    whole_images: bool,
) -> None:
    length, items, embeddings = prompt
    start = min(start, length - 1)
    chunk = next_chunk(
        start,
        length - start,
        budget=budget,
        items=items,
        embeddings=embeddings,
        whole_images=whole_images,
    )
    end = start + chunk.size
    assert 0 <= chunk.size <= min(budget, length - start)
    for number, item in enumerate(items):
        touched = item.offset < end and item.end > start
        if touched and chunk.size:
            assert embeddings[number] is not None
            assert not whole_images or item.end <= end
    if chunk.missing is not None:
        assert embeddings[chunk.missing] is None
        assert end == max(items[chunk.missing].offset, start)
    elif not whole_images:
        assert chunk.size == min(budget, length - start)


def test_a_chunk_may_cut_through_an_image() -> None:
    items = (ImageItem(b"", 2, 10, (1, 1, 1)),)
    chunk = next_chunk(0, 14, budget=5, items=items, embeddings=["rows"], whole_images=False)
    assert chunk == Chunk(5)


def test_what_is_left_of_an_image_after_a_prefix_hit_runs_whole() -> None:
    items = (ImageItem(b"", 2, 10, (1, 1, 1)),)
    for budget, size in ((5, 0), (8, 8), (9, 9)):
        chunk = next_chunk(
            4, 10, budget=budget, items=items, embeddings=["rows"], whole_images=True
        )
        assert chunk == Chunk(size)


@given(
    st.lists(st.tuples(prompts(), st.integers(0, 10)), max_size=5),
    st.integers(1, 40),
    st.none() | st.integers(1, 12),
    st.booleans(),
)
def test_shares_fit_into_the_budget_and_leave_no_usable_rest(
    todo: list[tuple[Prompt, int]], budget: int, cap: int | None, whole_images: bool
) -> None:
    token_budget = TokenBudget(budget, cap=cap, whole_images=whole_images)
    starts = {}
    for number, ((length, items, embeddings), at) in enumerate(todo):
        request = Request(RequestKey(str(number), 0), (), length, SamplingParams(1), items)
        tokens, positions = np.zeros(length, np.int32), np.zeros((1, length), np.int64)
        sequence = Sequence(request, number, tokens, positions, 0, embeddings=list(embeddings))
        start = min(at, length - 1)
        count = token_budget.next_chunk(sequence, start)
        if count:
            starts[sequence] = start
            token_budget.take(sequence, start, count)
    early = dict(token_budget.chunks)
    token_budget.distribute_rest()
    assert token_budget.remaining + sum(count for _, count in token_budget.chunks) == budget
    assert token_budget.remaining >= 0
    for sequence, count in token_budget.chunks:
        assert early[sequence] <= count <= sequence.num_tokens - starts[sequence]
        chunk = next_chunk(
            starts[sequence] + count,
            sequence.num_tokens - starts[sequence] - count,
            budget=token_budget.remaining,
            items=sequence.items,
            embeddings=sequence.embeddings,
            whole_images=whole_images,
        )
        assert whole_images or not chunk.size
    for sequence, _ in token_budget.blocked_on_embedding:
        assert sequence.is_blocked
        assert sequence not in early
