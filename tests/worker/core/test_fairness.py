"""Who goes first, who gives way, and that everybody's turn comes, whatever arrives."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker.core.simulation import Simulation, Work, alone, expected, works

from vlm_worker.core.entrance import MAX_IDLE_SECONDS, MAX_OVERTAKEN
from vlm_worker.core.plan import Schedule
from vlm_worker.core.sequence import Lane, Sequence, Status
from vlm_worker.core.waves import AdmissionPolicy, AdmissionReason, AdmissionRules
from vlm_worker.testing import embed
from vlm_worker.types import Request, RequestKey, SamplingParams

AGEING = 12.0
FCFS = AdmissionRules(ageing_seconds=AGEING)
DUAL = AdmissionRules(AdmissionPolicy.DUAL_QUEUE, max_text=4, max_vision=2, ageing_seconds=AGEING)
MAX_WAITING = 12


@dataclasses.dataclass(frozen=True)
class Arrival:
    """Text of some length and importance."""

    length: int
    max_tokens: int
    priority: int
    lane: Lane

    def work(self, name: str) -> Work:
        token = 20 + sum(name.encode()) % 70
        sampling = SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)
        key, tokens = RequestKey(name, 0), (token,) * self.length
        return Work(Request(key, tokens, self.length, sampling, priority=self.priority), (), 0)


arrivals = st.builds(
    Arrival, st.integers(1, 50), st.integers(1, 12), st.integers(-1, 2), st.sampled_from(Lane)
)
patterns = st.lists(st.lists(arrivals, max_size=3), min_size=1, max_size=5)


def text(name: str, length: int = 4, *, max_tokens: int = 4, priority: int = 0) -> Work:
    return Arrival(length, max_tokens, priority, Lane.TEXT).work(name)


# ---- everybody's turn comes ----------------------------------------------------------------------


class Crowd(Simulation):
    """Arrivals for ever, in a pattern, as far as the queue's bound lets them in."""

    def __init__(self, pattern: list[list[Arrival]], **kwargs: object) -> None:
        super().__init__(**kwargs)  # type: ignore[arg-type]
        self.pattern = itertools.cycle(pattern)
        self.numbers = itertools.count()
        self.admitted: list[Sequence] = []

    def schedule(self) -> Schedule:
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
def test_nobody_starves_whatever_arrives(drawn: tuple[Any, ...]) -> None:
    everybody_is_served(*drawn)


@pytest.mark.full
@pytest.mark.timeout(1800)
@settings(max_examples=5_000)
@given(crowds)
def test_nobody_starves_in_thousands_of_crowds(drawn: tuple[Any, ...]) -> None:
    everybody_is_served(*drawn)


def everybody_is_served(
    pattern: list[list[Arrival]],
    arrival: Arrival,
    rules: AdmissionRules,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
) -> None:
    crowd = Crowd(
        pattern, rules=rules, num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=budget
    )
    for _ in range(10):
        crowd.step()
    victim = crowd.add(arrival.work("victim"), lane=arrival.lane)
    num_younger = 0
    for _ in range(1_500):
        before = len(crowd.admitted)
        crowd.step()
        waits = victim not in crowd.admitted
        if waits and crowd.now - victim.arrived_at > AGEING and rules is FCFS:
            num_younger += sum(s.arrival > victim.arrival for s in crowd.admitted[before:])
        if victim.status is Status.FINISHED:
            break
    assert victim.status is Status.FINISHED, "it was never served"
    assert num_younger <= MAX_OVERTAKEN
    assert crowd.answers["victim"] == alone(arrival.work("victim"))


def test_the_low_priority_of_a_preempted_sequence_does_not_hold_it_down_for_ever() -> None:
    pattern = [[Arrival(14, 40, 2, Lane.TEXT)], [], []]
    crowd = Crowd(pattern, rules=FCFS, num_blocks=17, max_num_seqs=3, budget=64)
    victim = crowd.add(text("victim", 14, max_tokens=40, priority=-1))
    while victim.status is not Status.FINISHED:
        crowd.step()
        assert crowd.now < 500
    assert victim.raised_priority == 2
    assert crowd.scheduler.num_preemptions > 0
    assert crowd.scheduler.waiting.num_admitted[AdmissionReason.AGED] > 0


# ---- a plan is a function ------------------------------------------------------------------------


class Twice(Simulation):
    """Plans every step a second time, on a copy, and holds each wave to its bounds."""

    def schedule(self) -> Schedule:
        twin = copy.deepcopy(self.scheduler).schedule(now=self.now)
        schedule = super().schedule()
        assert told(twin) == told(schedule)
        for lane in Lane:
            rules = self.scheduler.waiting.rules
            entered = sum(sequence.lane is lane for sequence in schedule.admitted)
            assert rules.policy is AdmissionPolicy.FCFS or entered <= rules.bound(lane)
        return schedule


def told(schedule: Schedule) -> object:
    plan = schedule.plan
    return (
        plan and (plan.rows.tolist(), plan.counts.tolist(), plan.samples.tolist()),
        [s.request.key for s in schedule.admitted],
        [s.request.key for s in schedule.preempted],
        [(s.request.key, start) for s, start in schedule.stalled],
    )


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
    rules: AdmissionRules,
    long_prefill_tokens: int | None,
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
) -> None:
    simulation = Twice(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        budget=budget,
        rules=rules,
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


# ---- whoever leaves, whenever --------------------------------------------------------------------


departures = st.tuples(
    works(),
    st.lists(st.tuples(st.integers(0, 30), st.none() | st.integers(0, 30)), min_size=9, max_size=9),
    st.sampled_from([FCFS, DUAL]),
    st.integers(17, 40),
    st.integers(1, 4),
)


@settings(max_examples=80)
@given(departures)
def test_pictures_come_late_and_requests_are_cancelled_and_every_block_comes_back(
    drawn: tuple[Any, ...],
) -> None:
    every_block_comes_back(*drawn)


class Anew(Simulation):
    """Plans every step a second time, as one would for whom it is too long since the last try."""

    step_seconds = MAX_IDLE_SECONDS / 50

    def schedule(self) -> Schedule:
        twin = copy.deepcopy(self.scheduler).schedule(now=self.now + MAX_IDLE_SECONDS)
        schedule = super().schedule()
        assert told(twin) == told(schedule)
        return schedule


@settings(max_examples=40)
@given(departures)
def test_whoever_is_not_tried_again_would_not_have_entered(drawn: tuple[Any, ...]) -> None:
    todo, fates, rules, *bounds = drawn
    ageless = dataclasses.replace(rules, ageing_seconds=1e9)
    every_block_comes_back(todo, fates, ageless, *bounds, kind=Anew)


def test_blocks_that_come_back_let_one_enter_at_once() -> None:
    run = Anew(num_blocks=17, max_num_seqs=4, budget=64)
    assert run.pool.promise(10)
    waiting = run.add(text("waiting", 40))
    for _ in range(3):
        run.step()
    assert waiting.status is Status.WAITING
    run.pool.unpromise(10)
    run.step()
    assert waiting.status is Status.RUNNING


@pytest.mark.full
@pytest.mark.timeout(1800)
@settings(max_examples=5_000)
@given(departures)
def test_every_block_comes_back_in_thousands_of_runs(drawn: tuple[Any, ...]) -> None:
    every_block_comes_back(*drawn)


def every_block_comes_back(
    todo: list[Work],
    fates: list[tuple[int, int | None]],
    rules: AdmissionRules,
    num_blocks: int,
    max_num_seqs: int,
    kind: type[Simulation] = Simulation,
) -> None:
    simulation = kind(num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=24, rules=rules)
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
                sequence.wake()
        simulation.step()
    assert simulation.pool.num_used == simulation.pool.num_promised == 0
    assert not simulation.scheduler.waiting
    assert simulation.scheduler.waiting.num_tokens == 0
    for work, _, _, goes in live.values():
        answer = simulation.answers[work.request.key.request_id]
        whole = alone(work)
        assert answer == whole if goes is None else answer == whole[: len(answer)]


def test_whoever_lacks_blocks_is_passed_by_so_often_and_no_more() -> None:
    patient = dataclasses.replace(FCFS, ageing_seconds=1e9)
    pattern = [[Arrival(9, 20, 0, Lane.TEXT)]]
    crowd = Crowd(pattern, rules=patient, num_blocks=18, max_num_seqs=3, budget=64)
    for _ in range(20):
        crowd.step()
    big = crowd.add(text("big", 60, max_tokens=2, priority=1))
    before = len(crowd.admitted)
    while big.status is Status.WAITING:
        crowd.step()
    assert crowd.admitted[-1] is big
    assert len(crowd.admitted) - before == MAX_OVERTAKEN + 1
