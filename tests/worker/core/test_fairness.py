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

from vlm_worker.core.entrance import MAX_OVERTAKEN
from vlm_worker.core.plan import Schedule
from vlm_worker.core.sequence import Lane, Sequence, Status
from vlm_worker.core.waves import AdmissionPolicy, AdmissionReason, AdmissionRules
from vlm_worker.testing import IMAGE_TOKEN, embed, make_image
from vlm_worker.types import ImageItem, Request, RequestKey, SamplingParams

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
) -> None:
    simulation = Simulation(
        num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=24, rules=rules
    )
    live = {}
    for work, (comes, goes) in zip(todo, fates, strict=False):
        sequence = simulation.add(work)
        if comes:
            sequence.embeddings = [None] * len(work.images)
        live[work.request.key] = (work, sequence, comes, goes)
    for number in range(400):
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


# ---- who goes first, who gives way ---------------------------------------------------------------


def test_a_higher_priority_enters_first_and_arrival_decides_among_equals() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=1, budget=64, rules=FCFS)
    for name, priority in (("low", -1), ("first", 0), ("second", 0), ("high", 1)):
        simulation.add(text(name, priority=priority, max_tokens=2))
    simulation.run([])
    assert list(simulation.reasons) == ["high", "first", "second", "low"]


def test_the_lowest_priority_is_preempted_though_it_is_older() -> None:
    simulation = Simulation(num_blocks=17, max_num_seqs=2, budget=64)
    low = simulation.add(text("low", 14, max_tokens=40))
    simulation.step()
    simulation.add(text("high", 14, max_tokens=40, priority=1))
    while simulation.scheduler.num_preemptions == 0:
        simulation.step()
    assert low.status is Status.WAITING
    simulation.run([])
    assert list(simulation.reasons) == ["high", "low"]
    assert simulation.answers["low"] == alone(text("low", 14, max_tokens=40))


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_more_run_than_the_limit_says_received_ones_included(limit: int) -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=4, budget=64)
    entrance = simulation.scheduler.entrance
    held = simulation.add(text("held"), hold=True)
    while held.status is not Status.HELD:
        simulation.step()
    simulation.held.remove(held)
    entrance.max_running = limit
    simulation.scheduler.resume(held)
    for number in range(5):
        simulation.add(text(str(number)))
    most = 0
    while simulation.step():
        most = max(most, len(simulation.table))
        assert len(simulation.table) <= limit
    assert len(simulation.reasons) == 6
    assert most <= limit


def test_one_of_many_long_answers_ends_soon() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=4, budget=64)
    assert simulation.table.steps_until_one_ends == 0
    for number, max_tokens in enumerate((10, 20, 30)):
        simulation.add(text(str(number), max_tokens=max_tokens))
    simulation.step()
    assert simulation.table.steps_until_one_ends == (9 + 19 + 29) / 3 / 3


def test_a_long_prompt_leaves_room_for_a_short_one_and_takes_what_is_left() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=4, budget=16, long_prefill_tokens=8)
    long = simulation.add(text("long", 48))
    simulation.step()
    assert simulation.table.num_computed[long.row] == 16  # nobody else: all of it
    short = simulation.add(text("short", 5))
    simulation.step()
    assert simulation.table.num_computed[long.row] == 16 + 11
    assert short.num_tokens == 5
    assert len(simulation.answers["short"]) == 1
    simulation.run([])
    assert simulation.answers["long"] == alone(text("long", 48))


def test_an_image_that_may_not_be_cut_goes_beyond_the_cap() -> None:
    simulation = Simulation(
        num_blocks=65, max_num_seqs=2, budget=16, whole_images=True, long_prefill_tokens=4
    )
    image = make_image(1, num_tokens=9)
    item = ImageItem(image.image_key, 0, 9, image.grid_thw)
    tokens = (*[IMAGE_TOKEN] * 9, 5)
    work = Work(Request(RequestKey("0", 0), tokens, 10, SamplingParams(3), (item,)), (image,), 0)
    simulation.run([work])
    assert simulation.answers["0"] == alone(work)


def test_a_picture_that_is_not_here_yet_has_its_blocks_already() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=2, budget=64)
    image = make_image(1, num_tokens=30)
    item = ImageItem(image.image_key, 2, 30, image.grid_thw)
    tokens = (1, 2, *[IMAGE_TOKEN] * 30, 5)
    request = Request(RequestKey("0", 0), tokens, 33, SamplingParams(3), (item,))
    sequence = simulation.add(Work(request, (image,), 0))
    sequence.embeddings = [None]
    simulation.step()
    assert sequence.status is Status.RUNNING
    assert len(sequence.blocks) == 9  # of 33 tokens, not of the two before the picture


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


def test_a_backed_up_lane_that_does_not_fit_leaves_the_step_to_the_other() -> None:
    simulation = Simulation(num_blocks=19, max_num_seqs=4, budget=64, rules=DUAL)
    simulation.add(text("runs", 30, max_tokens=20))
    simulation.step()
    large = [simulation.add(text(f"large {n}", 60), lane=Lane.VISION) for n in range(6)]
    small = simulation.add(text("small"))
    simulation.step()
    assert {sequence.status for sequence in large} == {Status.WAITING}
    assert small.status is Status.RUNNING
    assert simulation.scheduler.waiting.num_admitted[AdmissionReason.FILLING] == 1


def test_whoever_was_passed_by_too_often_is_left_room_by_reservations() -> None:
    simulation = Simulation(num_blocks=17, max_num_seqs=2, budget=64)
    simulation.add(text("runs", 14, max_tokens=20))
    simulation.step()
    big = simulation.add(text("big", 60))
    big.overtaken = MAX_OVERTAKEN
    simulation.step()
    assert simulation.scheduler.kept_blocks == 1 + 15  # the watermark, and its own
    simulation.run([])
    assert simulation.scheduler.kept_blocks == 0
