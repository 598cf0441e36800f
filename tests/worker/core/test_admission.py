"""Who enters first and who gives way: priorities, caps, limits and lanes, example by example."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker.answers import make_image
from worker.core.arrivals import DUAL, FCFS, text
from worker.core.simulation import Simulation, Work, alone

from vlm_worker.core.admission import MAX_BYPASSED
from vlm_worker.core.admission_policy import AdmissionReason
from vlm_worker.core.sequence import Lane, Status
from vlm_worker.settings import AdmissionSettings
from vlm_worker.testing import IMAGE_TOKEN
from vlm_worker.types import ImageItem, Request, RequestKey, SamplingParams


def test_a_higher_priority_enters_first_and_arrival_decides_among_equals() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=1, budget=64, settings=FCFS)
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
    admission = simulation.scheduler.admission
    held = simulation.add(text("held"), for_peer=True)
    while held.status is not Status.HELD:
        simulation.step()
    simulation.held.remove(held)
    admission.max_running = limit
    simulation.scheduler.resume(held)
    for number in range(5):
        simulation.add(text(str(number)))
    most = 0
    while simulation.step():
        most = max(most, len(simulation.batch))
        assert len(simulation.batch) <= limit
    assert len(simulation.reasons) == 6
    assert most <= limit


def test_one_of_many_long_answers_ends_soon() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=4, budget=64)
    assert simulation.batch.min_steps_to_finish == 0
    for number, max_tokens in enumerate((10, 20, 30)):
        simulation.add(text(str(number), max_tokens=max_tokens))
    simulation.step()
    assert simulation.batch.min_steps_to_finish == (9 + 19 + 29) / 3 / 3


def test_a_long_prompt_leaves_room_for_a_short_one_and_takes_what_is_left() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=4, budget=16, long_prefill_tokens=8)
    long = simulation.add(text("long", 48))
    simulation.step()
    assert simulation.batch.num_computed[long.row] == 16  # nobody else: all of it
    short = simulation.add(text("short", 5))
    simulation.step()
    assert simulation.batch.num_computed[long.row] == 16 + 11
    assert short.num_tokens == 5
    assert len(simulation.answers["short"]) == 1
    simulation.run([])
    assert simulation.answers["long"] == alone(text("long", 48))


def test_of_two_running_prompts_the_more_important_one_is_computed_first() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=4, budget=12, long_prefill_tokens=8)
    low = simulation.add(text("low", 60))
    simulation.step()
    high = simulation.add(text("high", 60, priority=1))
    simulation.step()
    before = [int(simulation.batch.num_computed[sequence.row]) for sequence in (low, high)]
    assert before == [12 + 8, 4]
    simulation.step()
    after = [int(simulation.batch.num_computed[sequence.row]) for sequence in (low, high)]
    assert after == [20 + 4, 4 + 8]


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.booleans(), st.sampled_from(Lane)), max_size=12),
    st.sampled_from([FCFS, DUAL]),
)
def test_reserved_blocks_never_stop_requests_without_them_for_ever(
    arrivals: list[tuple[int, bool, Lane]], settings: AdmissionSettings
) -> None:
    simulation = Simulation(num_blocks=21, max_num_seqs=2, budget=64, settings=settings)
    for number, (length, reserved, lane) in enumerate(arrivals):
        simulation.add(text(str(number), length, max_tokens=3), lane=lane, reserved=reserved)
    simulation.run([])
    assert len(simulation.reasons) == len(arrivals)


@pytest.mark.parametrize("num_before", [1, 4, 6])
def test_a_request_with_reserved_blocks_bypasses_requests_without(num_before: int) -> None:
    simulation = Simulation(num_blocks=21, max_num_seqs=2, budget=64, settings=FCFS)
    large = [simulation.add(text(f"large {n}", 60)) for n in range(num_before)]
    for sequence in large:
        sequence.num_bypassed = MAX_BYPASSED
    reserved = simulation.add(text("reserved", 40), reserved=True)
    assert simulation.pool.num_available == 10
    simulation.step()
    assert reserved.status is Status.RUNNING
    assert simulation.scheduler.waiting.num_admitted == {AdmissionReason.RESERVED: 1}
    simulation.run([])


def test_a_watermark_does_not_hold_back_a_request_with_reserved_blocks() -> None:
    simulation = Simulation(num_blocks=21, max_num_seqs=2, budget=64)
    runs = simulation.add(text("runs", 57))
    simulation.step()
    late = simulation.add(text("late", 16), reserved=True)
    assert simulation.pool.reserve(simulation.pool.num_available)  # nothing is left to keep
    simulation.step()
    assert (runs.status, late.status) == (Status.RUNNING, Status.RUNNING)


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


def test_an_image_that_is_not_here_yet_has_its_blocks_already() -> None:
    simulation = Simulation(num_blocks=65, max_num_seqs=2, budget=64)
    image = make_image(1, num_tokens=30)
    item = ImageItem(image.image_key, 2, 30, image.grid_thw)
    tokens = (1, 2, *[IMAGE_TOKEN] * 30, 5)
    request = Request(RequestKey("0", 0), tokens, 33, SamplingParams(3), (item,))
    sequence = simulation.add(Work(request, (image,), 0))
    sequence.embeddings = [None]
    simulation.step()
    assert sequence.status is Status.RUNNING
    assert len(sequence.blocks) == 9  # of 33 tokens, not of the two before the image


def test_a_backed_up_lane_that_does_not_fit_leaves_the_step_to_the_other() -> None:
    simulation = Simulation(num_blocks=19, max_num_seqs=4, budget=64, settings=DUAL)
    simulation.add(text("runs", 30, max_tokens=20))
    simulation.step()
    large = [simulation.add(text(f"large {n}", 60), lane=Lane.VISION) for n in range(6)]
    small = simulation.add(text("small"))
    simulation.step()
    assert {sequence.status for sequence in large} == {Status.WAITING}
    assert small.status is Status.RUNNING
    assert simulation.scheduler.waiting.num_admitted[AdmissionReason.FILLING] == 1


def test_reservations_leave_blocks_for_a_request_that_was_bypassed_too_often() -> None:
    simulation = Simulation(num_blocks=17, max_num_seqs=2, budget=64)
    simulation.add(text("runs", 14, max_tokens=20))
    simulation.step()
    big = simulation.add(text("big", 60))
    big.num_bypassed = MAX_BYPASSED
    simulation.step()
    assert simulation.scheduler.admission.withheld_blocks == 1 + 15  # the watermark, and its own
    simulation.run([])
    assert simulation.scheduler.admission.withheld_blocks == 0
