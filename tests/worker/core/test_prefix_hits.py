"""Prefix hits in the schedule: of what is written, never of the last token, inside images."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker.answers import make_image
from worker.core.simulation import BLOCK_SIZE, Simulation, Work, expected, works

from vlm_worker.testing import IMAGE_TOKEN
from vlm_worker.types import ImageItem, Request, RequestKey, SamplingParams


def about(
    name: str,
    *,
    num_before: int,
    num_visual: int,
    after: list[int],
    at: int = 0,
    max_tokens: int = 3,
) -> Work:
    """A prompt of text, an image, and text."""
    image = make_image(1, num_tokens=num_visual)
    token_ids = (*range(20, 20 + num_before), *[IMAGE_TOKEN] * num_visual, *after)
    place = ImageItem(image.image_key, num_before, num_visual, image.grid_thw)
    sampling = SamplingParams(max_tokens, ignore_eos=True)
    request = Request(RequestKey(name, 0), token_ids, len(token_ids), sampling, (place,))
    return Work(request, (image,), at)


def simulation(*, whole_images: bool = False, budget: int = 64) -> Simulation:
    return Simulation(num_blocks=40, max_num_seqs=4, budget=budget, whole_images=whole_images)


@pytest.mark.parametrize("whole_images", [False, True], ids=["causal", "both directions"])
@pytest.mark.parametrize("num_before", range(1, 2 * BLOCK_SIZE))
@pytest.mark.parametrize("num_visual", [2, 6, 11])
def test_a_hit_may_end_inside_an_image_and_the_rest_of_it_runs_in_one_chunk(
    num_before: int, num_visual: int, whole_images: bool
) -> None:
    shape = {"num_before": num_before, "num_visual": num_visual}
    todo = [
        about("first", **shape, after=[3, 4]),
        about("second", **shape, after=[5, 6], at=8),
    ]
    # the runner refuses chunks that end inside; the budget would have them do so
    run = simulation(whole_images=whole_images, budget=11 + 4)
    run.run(todo)
    assert run.answers == expected(todo)
    # all full blocks before the text that differs
    assert run.cached["second"] == (num_before + num_visual) // BLOCK_SIZE * BLOCK_SIZE


def test_a_hit_leaves_the_last_token_even_where_all_is_known() -> None:
    for num_before in range(1, 3 * BLOCK_SIZE):
        work = about("first", num_before=num_before, num_visual=5, after=[])
        again = dataclasses.replace(
            work, request=dataclasses.replace(work.request, key=RequestKey("again", 0)), at=8
        )
        run = simulation()
        run.run([work, again])
        num_tokens = work.request.num_prompt_tokens
        assert run.cached["again"] == (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert run.answers == expected([work, again])


def test_blocks_that_are_not_written_yet_are_no_hit() -> None:
    twins = [about(name, num_before=9, num_visual=6, after=[3]) for name in ("one", "two")]
    later = about("later", num_before=9, num_visual=6, after=[3], at=1)
    run = simulation()
    run.run([*twins, later])
    assert run.cached == {"one": 0, "two": 0, "later": 12}
    assert run.answers == expected([*twins, later])


def test_an_answer_is_known_when_it_has_ended() -> None:
    first = about("first", num_before=9, num_visual=6, after=[3], max_tokens=12)
    run = simulation()
    run.run([first])
    num_known = first.request.num_prompt_tokens + len(run.answers["first"])
    run.run([going_on(first, run.answers["first"], name="next")])
    # the answer's last token was never computed
    assert run.cached["next"] == (num_known - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert run.cached["next"] > first.request.num_prompt_tokens


def going_on(work: Work, answer: list[int], *, name: str) -> Work:
    """The conversation of a request whose answer ends here, or is cut short here."""
    known = (*work.request.token_ids[: work.request.num_prompt_tokens], *answer, 5)
    key = RequestKey(name, 0)
    request = dataclasses.replace(
        work.request, key=key, token_ids=known, num_prompt_tokens=len(known)
    )
    return dataclasses.replace(work, request=request)


@pytest.mark.parametrize("num_before", [1, 2, 9, 11])
@pytest.mark.parametrize("num_steps", [1, 2, 6, 11])
def test_a_prefix_of_a_running_answer_is_a_hit(num_before: int, num_steps: int) -> None:
    first = about("first", num_before=num_before, num_visual=2, after=[], max_tokens=12)
    run = simulation()
    run.add(first)
    for _ in range(num_steps):
        run.step()
    second = going_on(first, run.answers["first"], name="second")
    run.run([second])
    num_written = first.request.num_prompt_tokens + num_steps - 1
    assert run.cached["second"] == num_written // BLOCK_SIZE * BLOCK_SIZE
    assert run.answers == expected([first, second])


@settings(max_examples=60)
@given(works(), st.integers(1, 30))
def test_a_request_that_continues_a_running_answer_answers_as_alone(
    todo: list[Work], num_steps: int
) -> None:
    run = simulation()
    for work in todo:
        run.add(work)
    for _ in range(num_steps):
        run.step()
    running = {sequence.request.key.request_id for sequence in run.batch.running}
    more = [
        going_on(work, run.answers[name], name=f"after {name}")
        for work in todo
        if (name := work.request.key.request_id) in running
    ]
    run.run(more)
    assert run.answers == expected([*todo, *more])


def test_another_adapter_or_tenant_finds_nothing() -> None:
    works = []
    for at, (salt, adapter) in enumerate([(b"", b""), (b"t", b""), (b"", b"t"), (b"", b"")]):
        work = about(str(at), num_before=9, num_visual=6, after=[3], at=8 * at)
        request = dataclasses.replace(work.request, cache_salt=salt, adapter=adapter)
        works.append(dataclasses.replace(work, request=request))
    run = simulation()
    run.run(works)
    assert run.cached == {"0": 0, "1": 0, "2": 0, "3": 12}
