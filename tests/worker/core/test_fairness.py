"""Who goes first, who gives way, and that everybody's turn comes, whatever arrives."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker.core.arrivals import AGEING, DUAL, FCFS, Arrival, arrivals, patterns, text
from worker.core.simulation import Simulation, alone

from vlm_worker.core.admission import MAX_BYPASSED
from vlm_worker.core.admission_policy import AdmissionReason
from vlm_worker.core.sequence import Lane, Sequence, Status
from vlm_worker.core.step_values import SchedulerOutput
from vlm_worker.settings import AdmissionSettings

MAX_WAITING = 12


class Crowd(Simulation):
    """Arrivals for ever, in a pattern, as far as the queue's bound lets them in."""

    def __init__(self, pattern: list[list[Arrival]], **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.pattern = itertools.cycle(pattern)
        self.numbers = itertools.count()
        self.admitted: list[Sequence] = []

    def schedule(self) -> SchedulerOutput:
        for arrival in next(self.pattern):
            if len(self.scheduler.waiting) < MAX_WAITING:
                self.add(arrival.work(f"crowd {next(self.numbers)}"), lane=arrival.lane)
        schedule = super().schedule()
        self.admitted += schedule.admitted
        return schedule


crowds = st.tuples(
    patterns,
    arrivals,
    st.sampled_from([FCFS, DUAL]),
    st.integers(17, 30),
    st.integers(1, 4),
    st.integers(6, 40),
)


@settings(max_examples=60)
@given(crowds)
def test_no_request_starves_whatever_arrives(drawn: tuple[Any, ...]) -> None:
    everybody_is_served(*drawn)


@pytest.mark.full
@pytest.mark.timeout(1800)
@settings(max_examples=5_000)
@given(crowds)
def test_no_request_starves_in_thousands_of_crowds(drawn: tuple[Any, ...]) -> None:
    everybody_is_served(*drawn)


def everybody_is_served(
    pattern: list[list[Arrival]],
    arrival: Arrival,
    settings: AdmissionSettings,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
) -> None:
    crowd = Crowd(
        pattern, settings=settings, num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=budget
    )
    for _ in range(10):
        crowd.step()
    victim = crowd.add(arrival.work("victim"), lane=arrival.lane)
    num_younger = 0
    for _ in range(1_500):
        before = len(crowd.admitted)
        crowd.step()
        waits = victim not in crowd.admitted
        if waits and crowd.now - victim.arrived_at > AGEING and settings is FCFS:
            num_younger += sum(s.arrival > victim.arrival for s in crowd.admitted[before:])
        if victim.status is Status.FINISHED:
            break
    assert victim.status is Status.FINISHED, "it was never served"
    assert num_younger <= MAX_BYPASSED
    assert crowd.answers["victim"] == alone(arrival.work("victim"))


def test_the_low_priority_of_a_preempted_sequence_does_not_hold_it_down_for_ever() -> None:
    pattern = [[Arrival(14, 40, 2, Lane.TEXT)], [], []]
    crowd = Crowd(pattern, settings=FCFS, num_blocks=17, max_num_seqs=3, budget=64)
    victim = crowd.add(text("victim", 14, max_tokens=40, priority=-1))
    while victim.status is not Status.FINISHED:
        crowd.step()
        assert crowd.now < 500
    assert victim.aged_priority == 2
    assert crowd.scheduler.num_preemptions > 0
    assert crowd.scheduler.waiting.num_admitted[AdmissionReason.AGED] > 0


def test_a_request_without_blocks_is_bypassed_a_bounded_number_of_times() -> None:
    patient = dataclasses.replace(FCFS, ageing_seconds=1e9)
    pattern = [[Arrival(9, 20, 0, Lane.TEXT)]]
    crowd = Crowd(pattern, settings=patient, num_blocks=18, max_num_seqs=3, budget=64)
    for _ in range(20):
        crowd.step()
    big = crowd.add(text("big", 60, max_tokens=2, priority=1))
    before = len(crowd.admitted)
    while big.status is Status.WAITING:
        crowd.step()
    assert crowd.admitted[-1] is big
    assert len(crowd.admitted) - before == MAX_BYPASSED + 1
