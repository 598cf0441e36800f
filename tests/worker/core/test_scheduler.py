"""The scheduler's promises, for every arrival order, pool size and budget.

Every law counts steps, so that a sequence that is never served fails instead of hanging.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker.answers import make_image
from worker.core.simulation import Simulation, Work, alone, expected, works

from vlm_worker.core.sequence import Status
from vlm_worker.core.step_values import StepPlan
from vlm_worker.testing import IMAGE_TOKEN, embed
from vlm_worker.types import (
    ImageItem,
    Request,
    RequestKey,
    SamplingParams,
)


@settings(max_examples=300)
@given(works(), st.integers(17, 40), st.integers(1, 6), st.integers(6, 64))
def test_together_is_alone(
    todo: list[Work], num_blocks: int, max_num_seqs: int, budget: int
) -> None:
    simulation = Simulation(num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=budget)
    simulation.run(todo)
    assert simulation.answers == expected(todo)


@settings(max_examples=60)
@given(works(), st.integers(1, 6))
def test_an_image_that_may_not_be_cut_runs_in_one_chunk(
    todo: list[Work], max_num_seqs: int
) -> None:
    # the runner raises where a chunk ends inside an image
    simulation = Simulation(
        num_blocks=40, max_num_seqs=max_num_seqs, budget=7 + max_num_seqs, whole_images=True
    )
    simulation.run(todo)
    assert simulation.answers == expected(todo)


def text(number: int, length: int, *, max_tokens: int = 4, at: int = 0, token: int = 1) -> Work:
    request = Request(
        RequestKey(str(number), 0),
        (token,) * length,
        length,
        SamplingParams(max_tokens=max_tokens, ignore_eos=True),
    )
    return Work(request, (), at)


def test_a_long_prompt_runs_in_chunks_beside_decodes() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=4, budget=8)
    todo = [text(0, 3, max_tokens=20), text(1, 40, at=2)]
    simulation.run(todo)
    assert simulation.answers == expected(todo)
    assert simulation.max_chunk == 7  # one of eight tokens belongs to the decoding sequence


def test_the_youngest_is_preempted_and_says_the_same() -> None:
    simulation = Simulation(num_blocks=17, max_num_seqs=4, budget=64)
    todo = [text(number, 14, max_tokens=40, token=number + 1) for number in range(3)]
    simulation.run(todo)
    assert simulation.scheduler.num_preemptions > 0
    assert simulation.answers == expected(todo)
    assert next(iter(simulation.reasons)) == "0"  # the oldest was never put back


def test_a_prefix_hit_says_the_same_and_leaves_one_token_to_compute() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=4, budget=64)
    todo = [text(0, 16), text(1, 16, at=20)]
    simulation.run(todo)
    assert simulation.cached == {"0": 0, "1": 12}
    assert simulation.answers == expected(todo)


def test_tenants_share_no_prefix() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=4, budget=64)
    other = text(1, 16, at=20)
    salted = dataclasses.replace(other.request, cache_salt=b"other")
    simulation.run([text(0, 16), Work(salted, (), 20)])
    assert simulation.cached["1"] == 0


def test_a_request_that_does_not_fit_is_bypassed_but_not_for_ever() -> None:
    simulation = Simulation(num_blocks=18, max_num_seqs=3, budget=64)
    big = text(0, 60, max_tokens=2, token=2)
    small = [text(n, 9, max_tokens=20, at=n // 40, token=3 + n % 50) for n in range(1, 150)]
    simulation.run([text(150, 9, max_tokens=20, token=1), big, *small])
    finished = list(simulation.reasons)
    assert finished.index("150") == 0
    assert 1 < finished.index("0") < len(finished) - 1  # passed by some, and not by all


def test_a_missing_embedding_blocks_one_sequence_and_no_other() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=4, budget=64)
    image = make_image(1, num_tokens=5)
    request = Request(
        RequestKey("stalled", 0),
        (1, 2, *[IMAGE_TOKEN] * 5, 3),
        8,
        SamplingParams(max_tokens=3, ignore_eos=True),
        (ImageItem(image.image_key, 2, 5, image.grid_thw),),
    )
    sequence = simulation.add(Work(request, (image,), 0))
    sequence.embeddings[0] = None
    other = text(1, 5)
    simulation.add(other)
    for _ in range(20):
        simulation.step()
    assert sequence.is_blocked
    assert sequence.row is not None
    assert simulation.batch.num_computed[sequence.row] == 2  # the text before the image ran
    assert simulation.pool.match(sequence.hashes) == []  # K3: nothing is known before it is written
    assert simulation.answers["1"] == alone(other)
    sequence.embeddings[0] = embed(image)
    sequence.unblock()
    while simulation.step():
        pass
    assert simulation.answers["stalled"] == alone(Work(request, (image,), 0))


def about_image(name: str, *, num_text_before: int) -> Work:
    """Text, an image, and one more token."""
    image = make_image(1, num_tokens=5)
    token_ids = (*range(30, 30 + num_text_before), *[IMAGE_TOKEN] * 5, 3)
    item = ImageItem(image.image_key, num_text_before, 5, image.grid_thw)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    request = Request(RequestKey(name, 0), token_ids, len(token_ids), sampling, (item,))
    return Work(request, (image,), 0)


def test_a_request_that_waits_for_an_embedding_takes_no_blocks_and_blocks_no_other() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=1, budget=64)
    waiting = simulation.add(about_image("stalled", num_text_before=0))
    waiting.embeddings[0] = None
    simulation.step()
    assert waiting.is_blocked
    other = text(1, 5)
    simulation.add(other)
    while simulation.step():
        pass
    assert waiting.status is Status.WAITING
    assert simulation.answers["1"] == alone(other)


def test_kv_that_a_peer_may_be_reading_is_not_preempted() -> None:
    simulation = Simulation(num_blocks=17, max_num_seqs=2, budget=64)
    old = simulation.add(text(0, 8, max_tokens=50))
    simulation.step()
    held = simulation.add(about_image("held", num_text_before=34), for_peer=True)
    held.embeddings[0] = None  # it runs, and waits in the middle of its prompt
    simulation.step()
    blocks = list(held.blocks)
    assert len(blocks) == 10
    for _ in range(60):
        simulation.step()
    assert simulation.scheduler.num_preemptions > 0
    assert old.status is Status.WAITING  # the older one gave way
    assert held.status is Status.RUNNING
    assert held.blocks == blocks
    simulation.scheduler.remove(held)
    while simulation.step():
        pass
    assert simulation.answers["0"] == alone(text(0, 8, max_tokens=50))


def test_the_halves_of_a_plan_are_the_plan() -> None:
    rows = np.array([4, 0, 2, 1, 3])
    counts = np.array([1, 1, 1, 5, 6])
    plan = StepPlan(rows, counts, np.array([True, True, True, False, True]), rows[:3])
    first, second = plan.halves()
    assert first.rows.tolist() + second.rows.tolist() == rows.tolist()
    assert first.counts.tolist() + second.counts.tolist() == counts.tolist()
    assert (first.num_decodes, second.num_decodes) == (2, 1)
    assert second.sampled_rows.tolist() == [2, 3]
    assert plan.without({0, 1}).rows.tolist() == [4, 2, 3]


def test_a_held_sequence_keeps_its_blocks_and_goes_on_where_it_stopped() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=1, budget=64)
    work = text(0, 10, max_tokens=9)
    sequence = simulation.add(work, for_peer=True)
    while simulation.step():
        if sequence.status is Status.HELD:
            break
    assert len(simulation.batch) == 0
    assert simulation.pool.num_used == 3
    simulation.held.remove(sequence)
    simulation.scheduler.resume(sequence)
    while simulation.step():
        pass
    assert simulation.answers["0"] == alone(work)
    assert simulation.pool.num_used == 0


def test_a_poisoned_sequence_fails_alone_and_its_kv_is_forgotten() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=4, budget=6)
    simulation.runner.faults.poison_token = 13
    todo = [text(0, 5, max_tokens=9), text(1, 12, token=2)]
    bad = todo[1].request
    poisoned = dataclasses.replace(bad, token_ids=(*bad.token_ids[:11], 13))
    simulation.add(todo[0])
    sequence = simulation.add(Work(poisoned, (), 0))
    while simulation.step():
        pass
    assert sequence.status is Status.FINISHED
    assert simulation.answers == {"0": alone(todo[0]), "1": []}
    assert simulation.pool.match(sequence.hashes) == []


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 8, 100])
def test_chunked_is_whole(budget: int) -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=1, budget=budget)
    image = make_image(2, num_tokens=9)
    token_ids = (1, 2, *[IMAGE_TOKEN] * 9, 3, 4, *[IMAGE_TOKEN] * 9)
    items = tuple(ImageItem(image.image_key, at, 9, image.grid_thw) for at in (2, 13))
    request = Request(RequestKey("0", 0), token_ids, 22, SamplingParams(max_tokens=5), items)
    work = Work(request, (image, image), 0)
    simulation.run([work])
    assert simulation.answers["0"] == alone(work)
