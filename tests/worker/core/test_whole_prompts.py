"""Prompts whose tokens see each other both ways: one chunk, and hits for equal prompts alone."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from worker.core.simulation import BLOCK_SIZE, Simulation, Work, expected, works
from worker.core.test_prefix_hits import about

from vlm_worker.core.request_validation import validate_request
from vlm_worker.errors import ContextTooLongError

BUDGET, MAX_SEQS = 68, 4


def simulation(*, num_blocks: int = 60) -> Simulation:
    return Simulation(
        num_blocks=num_blocks, max_num_seqs=MAX_SEQS, budget=BUDGET, whole_images=True,
        whole_prompts=True,
    )  # fmt: skip


@given(works())
def test_answers_are_those_of_prompts_in_one_chunk(todo: list[Work]) -> None:
    """The runner raises if a chunk ends inside a prompt."""
    run = simulation()
    run.run(todo)
    assert run.answers == expected(todo)


def test_only_an_equal_prompt_hits_and_the_rest_of_it_runs_in_one_chunk() -> None:
    shape = {"num_before": 2 * BLOCK_SIZE, "num_visual": BLOCK_SIZE}
    todo = [
        about("first", **shape, after=[3, 4]),
        about("longer", **shape, after=[3, 4, 5], at=8),
        about("equal", **shape, after=[3, 4], at=16),
    ]
    run = simulation()
    run.run(todo)
    assert run.answers == expected(todo)
    assert run.cached == {"first": 0, "longer": 0, "equal": 3 * BLOCK_SIZE}


def test_a_continued_prompt_hits_what_its_first_part_left() -> None:
    first = about("first", num_before=9, num_visual=4, after=[3, 4], max_tokens=4)
    run = simulation()
    run.run([first])
    known = (*first.request.token_ids, *run.answers["first"][:2])
    request = dataclasses.replace(
        first.request, key=dataclasses.replace(first.request.key, attempt=1), token_ids=known
    )
    again = dataclasses.replace(first, request=request, at=0)
    run.run([again])
    assert run.cached["first"] == len(known) // BLOCK_SIZE * BLOCK_SIZE


def test_a_prompt_that_no_step_holds_is_refused_with_the_numbers() -> None:
    request = about("long", num_before=50, num_visual=10, after=[1]).request
    bounds = {"max_model_len": 100, "max_image_tokens": 60, "vocab_size": 1000}
    validate_request(request, **bounds, max_prompt_tokens=61)
    with pytest.raises(ContextTooLongError, match=r"61 tokens; .* one step, which holds 60"):
        validate_request(request, **bounds, max_prompt_tokens=60)
