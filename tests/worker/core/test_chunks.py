"""A chunk's laws, for all prompts and budgets."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.core.block_kinds import BlockKinds
from vlm_worker.core.chunks import TokenBudget, chunk_of
from vlm_worker.core.sequence import Sequence
from vlm_worker.types import ImageItem, Narrow, Request, RequestKey, SamplingParams

Prompt = tuple[int, tuple[ImageItem, ...], list[object | None]]


def sequence_of(prompt: Prompt, number: int = 0) -> Sequence:
    length, items, embeddings = prompt
    request = Request(RequestKey(str(number), 0), (), length, SamplingParams(1), items)
    tokens, positions = np.zeros(length, np.int32), np.zeros((1, length), np.int64)
    return Sequence(request, number, tokens, positions, 0, embeddings=list(embeddings))


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
    size, is_missing = chunk_of(
        sequence_of(prompt), start, budget=budget, whole_images=whole_images
    )
    end = start + size
    assert 0 <= size <= min(budget, length - start)
    for number, item in enumerate(items):
        touched = item.offset < end and item.end > start
        if touched and size:
            assert embeddings[number] is not None
            assert not whole_images or item.end <= end
    missing = [
        item.offset
        for item, embedding in zip(items, embeddings, strict=True)
        if embedding is None and item.end > start
    ]
    if is_missing:
        assert end == max(missing[0], start)
    elif not whole_images:
        assert size == min(budget, length - start)


def test_a_chunk_may_cut_through_an_image() -> None:
    sequence = sequence_of((14, (ImageItem(b"", 2, 10, (1, 1, 1)),), ["rows"]))
    assert chunk_of(sequence, 0, budget=5, whole_images=False) == (5, False)


def test_what_is_left_of_an_image_after_a_prefix_hit_runs_whole() -> None:
    sequence = sequence_of((14, (ImageItem(b"", 2, 10, (1, 1, 1)),), ["rows"]))
    for budget, size in ((5, 0), (8, 8), (9, 9)):
        assert chunk_of(sequence, 4, budget=budget, whole_images=True) == (size, False)


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
    for number, (prompt, at) in enumerate(todo):
        sequence = sequence_of(prompt, number)
        start = min(at, sequence.num_tokens - 1)
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
        size, _ = chunk_of(
            sequence,
            starts[sequence] + count,
            budget=token_budget.remaining,
            whole_images=whole_images,
        )
        assert whole_images or not size
    for sequence, _ in token_budget.blocked_on_embedding:
        assert sequence.is_blocked
        assert sequence not in early


# ---- blocks in 4 bits --------------------------------------------------------------------------


@given(prompts(), st.integers(1, 5), st.integers(1, 40))
def test_no_chunk_ends_inside_a_block_in_4_bits_and_all_are_computed(
    prompt: Prompt, block_size: int, spare: int
) -> None:
    length, items, _ = prompt
    kinds = BlockKinds(block_size, Narrow.VISION_KIVI4, 2)
    sequence = sequence_of((length, items, ["rows"] * len(items)))
    shape, at = kinds.of(sequence), 0
    inside = {
        token
        for index, is_narrow in enumerate(shape.is_narrow)
        if is_narrow
        for token in range(shape.num_tokens(index) + 1, shape.num_tokens(index + 1))
    }
    for _ in range(length):
        budget = kinds.min_chunk + spare
        size, is_missing = chunk_of(sequence, at, budget=budget, whole_images=False, kinds=kinds)
        assert not is_missing
        assert 0 < size <= budget
        at += size
        assert at not in inside
        if at == length:
            break
    assert at == length


def test_a_chunk_ends_before_a_block_in_4_bits_that_does_not_fit() -> None:
    kinds = BlockKinds(4, Narrow.VISION_KIVI4, 2)
    sequence = sequence_of((30, (ImageItem(b"", 3, 20, (1, 1, 1)),), ["rows"]))
    # a wide block, narrow ones of the tokens 4 to 12 and 12 to 20, and wide ones
    for budget, size in ((3, 3), (5, 4), (11, 4), (12, 12), (19, 12), (20, 20), (22, 22)):
        assert chunk_of(sequence, 0, budget=budget, whole_images=False, kinds=kinds) == (
            size,
            False,
        )
    budget = TokenBudget(9, cap=2, whole_images=False, kinds=kinds)
    assert budget.next_chunk(sequence, 4) == 8, "the cap stops a prompt for ever"
