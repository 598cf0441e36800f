"""Planning twice plans the same, whoever comes and leaves, and every block comes back."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker.core.arrivals import DUAL, FCFS, text
from worker.core.simulation import Simulation, Work, alone, expected, told, works

from vlm_worker.core.admission import MAX_IDLE_SECONDS
from vlm_worker.core.admission_policy import lane_bound
from vlm_worker.core.sequence import Lane, Status
from vlm_worker.core.step_values import SchedulerOutput
from vlm_worker.settings import AdmissionPolicy, AdmissionSettings
from vlm_worker.testing import embed


class Twice(Simulation):
    """Plans every step a second time, on a copy, and holds each wave to its bounds."""

    def schedule(self) -> SchedulerOutput:
        twin = copy.deepcopy(self.scheduler).schedule(now=self.now)
        schedule = super().schedule()
        assert told(twin) == told(schedule)
        for lane in Lane:
            settings = self.scheduler.waiting.settings
            entered = sum(sequence.lane is lane for sequence in schedule.admitted)
            assert settings.policy is AdmissionPolicy.FCFS or entered <= lane_bound(settings, lane)
        return schedule


@settings(max_examples=40)
@given(
    works(),
    st.lists(st.tuples(st.integers(-1, 1), st.sampled_from(Lane)), min_size=9, max_size=9),
    st.sampled_from([FCFS, DUAL]),
    st.sampled_from([None, 3, 9]),
    st.integers(17, 40),
    st.integers(2, 6),
    st.integers(6, 64),
)
def test_planning_twice_plans_the_same_and_together_is_alone(
    todo: list[Work],
    kinds: list[tuple[int, Lane]],
    settings: AdmissionSettings,
    long_prefill_tokens: int | None,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
) -> None:
    simulation = Twice(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        budget=budget,
        settings=settings,
        long_prefill_tokens=long_prefill_tokens,
    )
    todo = [
        dataclasses.replace(work, request=dataclasses.replace(work.request, priority=priority))
        for work, (priority, _) in zip(todo, kinds, strict=False)
    ]
    for work, (_, lane) in zip(todo, kinds, strict=False):
        simulation.add(work, lane=lane)
    simulation.run([])
    assert simulation.answers == expected(todo)


departures = st.tuples(
    works(),
    st.lists(st.tuples(st.integers(0, 30), st.none() | st.integers(0, 30)), min_size=9, max_size=9),
    st.sampled_from([FCFS, DUAL]),
    st.integers(17, 40),
    st.integers(1, 4),
)


@settings(max_examples=80)
@given(departures)
def test_every_block_is_freed_despite_late_images_and_cancellations(
    drawn: tuple[Any, ...],
) -> None:
    every_block_comes_back(*drawn)


class Anew(Simulation):
    """Plans every step a second time, as one would for whom it is too long since the last try."""

    step_seconds = MAX_IDLE_SECONDS / 50

    def schedule(self) -> SchedulerOutput:
        twin = copy.deepcopy(self.scheduler).schedule(now=self.now + MAX_IDLE_SECONDS)
        schedule = super().schedule()
        assert told(twin) == told(schedule)
        return schedule


@settings(max_examples=40)
@given(departures)
def test_a_request_that_is_not_retried_would_not_have_been_admitted(drawn: tuple[Any, ...]) -> None:
    todo, fates, settings, *bounds = drawn
    ageless = dataclasses.replace(settings, ageing_seconds=1e9)
    every_block_comes_back(todo, fates, ageless, *bounds, kind=Anew)


def test_freed_blocks_admit_a_request_at_once() -> None:
    run = Anew(num_blocks=17, max_num_seqs=4, budget=64)
    assert run.pool.reserve(10)
    waiting = run.add(text("waiting", 40))
    for _ in range(3):
        run.step()
    assert waiting.status is Status.WAITING
    run.pool.unreserve(10)
    run.step()
    assert waiting.status is Status.RUNNING


@pytest.mark.full
@pytest.mark.timeout(1800)
@settings(max_examples=5_000)
@given(departures)
def test_every_block_is_freed_in_thousands_of_runs(drawn: tuple[Any, ...]) -> None:
    every_block_comes_back(*drawn)


def every_block_comes_back(
    todo: list[Work],
    fates: list[tuple[int, int | None]],
    settings: AdmissionSettings,
    num_blocks: int,
    max_num_seqs: int,
    kind: type[Simulation] = Simulation,
) -> None:
    simulation = kind(
        num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=24, settings=settings
    )
    live = {}
    for work, (comes, goes) in zip(todo, fates, strict=False):
        sequence = simulation.add(work)
        if comes:
            sequence.embeddings = [None] * len(work.images)
        live[work.request.key] = (work, sequence, comes, goes)
    for number in range(400):
        if all(sequence.status is Status.FINISHED for _, sequence, _, _ in live.values()):
            break
        for work, sequence, comes, goes in live.values():
            if sequence.status is Status.FINISHED:
                continue
            if number == goes:
                simulation.scheduler.remove(sequence)
            elif number == comes:
                sequence.embeddings = [embed(image) for image in work.images]
                sequence.unblock()
        simulation.step()
    assert simulation.pool.num_used == simulation.pool.num_reserved == 0
    assert not simulation.scheduler.waiting
    assert simulation.scheduler.waiting.num_tokens == 0
    for work, _, _, goes in live.values():
        answer = simulation.answers[work.request.key.request_id]
        whole = alone(work)
        assert answer == whole if goes is None else answer == whole[: len(answer)]
