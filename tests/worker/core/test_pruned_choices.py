"""Choices of one request: they share the blocks of their pruned prompt."""

from __future__ import annotations

import dataclasses

import pytest
from worker.core.simulation import BLOCK_SIZE, Simulation, Work, expected
from worker.core.test_pruning import conversation

from vlm_worker.core.sequence import Status
from vlm_worker.types import RequestKey


def choices(count: int, **options: int) -> list[Work]:
    """The choices of one request: the same prompt, and seeds of their own."""
    todo = []
    for number in range(count):
        request = conversation(number, **options).request
        sampling = dataclasses.replace(request.sampling, temperature=0.7, seed=number)
        todo.append(Work(dataclasses.replace(request, sampling=sampling), (), 0))
    return todo


@pytest.mark.parametrize("delivered", [0, 3])
@pytest.mark.parametrize("last", range(4, 8))
def test_choices_share_the_full_blocks_of_their_pruned_prompt(last: int, delivered: int) -> None:
    todo = choices(3, history=40, last=last, delivered=delivered)
    run = Simulation(num_blocks=81, max_num_seqs=3, budget=64, permille=500)
    first, *others = sequences = [run.add(work) for work in todo]
    while not all(sequence.num_dropped for sequence in sequences):
        assert run.step()
    num_shared = (40 + last - first.num_dropped) // BLOCK_SIZE
    for other in others:
        assert other.blocks[:num_shared] == first.blocks[:num_shared]
        assert not set(other.blocks[num_shared:]) & set(first.blocks)
    while run.step():
        pass
    assert run.answers == expected(todo, permille=500)
    assert run.pool.num_used == 0


def test_a_prompt_of_another_tenant_or_history_is_no_twin() -> None:
    work = conversation(0, history=40)
    todo = [work]
    for number, change in enumerate(
        ({"cache_salt": b"tenant"}, {"num_history_tokens": 39}, {"adapter": bytes(32)}), start=1
    ):
        key = RequestKey(str(number), 0)
        todo.append(Work(dataclasses.replace(work.request, key=key, **change), (), 0))
    run = Simulation(num_blocks=81, max_num_seqs=4, budget=64, permille=500)
    run.run(todo)
    assert run.num_observed == len(todo)
    assert run.answers == expected(todo, permille=500)


def test_a_twin_that_is_preempted_for_another_choice_leaves_it_its_rows() -> None:
    todo = choices(3, history=40, last=6, max_tokens=16)
    for number in (1, 2):
        request = dataclasses.replace(todo[number].request, priority=1)
        todo[number] = dataclasses.replace(todo[number], request=request)
    run = Simulation(num_blocks=41, max_num_seqs=3, budget=64, permille=900)
    twin = run.add(todo[0])
    while len(run.answers["0"]) < 5:
        run.step()
    others = [run.add(work) for work in todo[1:]]
    while len(run.scheduler.pruner.ready) < 2:
        run.step()
    assert run.pool.is_shared(others[0].blocks[10])
    num_reserved = run.pool.num_available
    assert run.pool.reserve(num_reserved)
    run.prune()
    assert twin.status is Status.WAITING
    assert all(other.num_dropped for other in others)
    assert others[0].blocks[:10] == others[1].blocks[:10]
    run.pool.unreserve(num_reserved)
    while run.step():
        pass
    assert run.answers == expected(todo, permille=900)
    assert run.pool.num_used == 0
