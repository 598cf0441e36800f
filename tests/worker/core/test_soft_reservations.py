"""Who may ask for images: never more than could run at once, everybody at last, and in any order.

Images come late, or never; requests are cancelled; text passes by.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker.answers import make_image
from worker.core.arrivals import DUAL, FCFS, text
from worker.core.simulation import Simulation, Work, alone, told

from vlm_worker.core.admission import MAX_BYPASSED
from vlm_worker.core.sequence import Lane, Sequence, Status
from vlm_worker.core.step_values import SchedulerOutput
from vlm_worker.settings import AdmissionSettings
from vlm_worker.testing import IMAGE_TOKEN, embed
from vlm_worker.types import ImageItem, Request, RequestKey, SamplingParams


def about(name: str, number: int, num_tokens: int, *, priority: int = 0) -> Work:
    """A prompt that begins with an image."""
    image = make_image(number, num_tokens=num_tokens)
    item = ImageItem(image.image_key, 0, num_tokens, image.grid_thw)
    tokens = (*[IMAGE_TOKEN] * num_tokens, 5)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    request = Request(
        RequestKey(name, 0), tokens, len(tokens), sampling, (item,), priority=priority
    )
    return Work(request, (image,), 0)


class Asking(Simulation):
    """Does what the engine does for images: asks for some, lets go of some.

    Attributes:
        twice: plan every step a second time, on a copy.
        asked: who asked and has not got it, and since when.
        order: the names of those who asked.
    """

    def __init__(self, *, delay: int = 1, twice: bool = False, **kwargs: Any) -> None:
        super().__init__(budget=64, **kwargs)
        self.twice = twice
        self.delay = delay
        self.works: dict[Sequence, Work] = {}
        self.asked: dict[Sequence, float] = {}
        self.order: list[str] = []

    def come(self, work: Work, **kwargs: Any) -> Sequence:
        """Let a request wait; its images are not here."""
        sequence = self.add(work, **kwargs)
        sequence.arrival = len(self.works)
        sequence.embeddings = [None] * len(work.images)
        self.works[sequence] = work
        return sequence

    def leave(self, sequence: Sequence) -> None:
        """A request is cancelled."""
        self.asked.pop(sequence, None)
        self.scheduler.remove(sequence)

    def schedule(self) -> SchedulerOutput:
        self._deliver()
        twin = copy.deepcopy(self.scheduler) if self.twice else None
        schedule = super().schedule()
        assert twin is None or told(twin.schedule(now=self.now)) == told(schedule)
        for sequence, _ in schedule.blocked_on_embedding:
            self.asked[sequence] = self.now
            self.order.append(sequence.request.key.request_id)
        for sequence in (*schedule.blocked_on_kv, *schedule.preempted):
            sequence.embeddings = [None] * len(sequence.embeddings)
            self.asked.pop(sequence, None)
        self._check_claims()
        return schedule

    def step(self) -> bool:
        super().step()
        return bool(self.scheduler.waiting or len(self.batch))

    def _deliver(self) -> None:
        for sequence, since in list(self.asked.items()):
            if self.now - since >= self.delay:
                del self.asked[sequence]
                sequence.embeddings = [embed(image) for image in self.works[sequence].images]
                sequence.unblock()

    def _check_claims(self) -> None:
        waiting = [s for s in self.works if s.status is Status.WAITING]
        reserved = sum(s.soft_reserved_blocks or 0 for s in waiting)
        assert reserved == self.scheduler.admission.soft_reservations.num_blocks
        assert reserved <= self.pool.num_available, "more blocks are reserved than available"
        for sequence in waiting:
            pins = sequence in self.asked or any(e is not None for e in sequence.embeddings)
            assert not pins or sequence.can_pin_embeddings, "it pins an image without blocks"


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request about an image, or text alone (`num_tokens` of 0), and what becomes of it."""

    at: int
    num_tokens: int
    priority: int
    lane: Lane
    reserved: bool
    goes: int | None


arrivals = st.lists(
    st.builds(
        Arrival,
        st.integers(0, 25),
        st.integers(0, 40),
        st.integers(-1, 1),
        st.sampled_from(Lane),
        st.integers(0, 5).map(lambda n: n == 0),
        st.none() | st.integers(0, 40),
    ),
    max_size=14,
)
runs = st.tuples(
    arrivals,
    st.sampled_from([FCFS, DUAL]),
    st.integers(17, 40),
    st.integers(1, 6),
    st.integers(1, 9),
)
"""Arrivals, settings, number of blocks and rows, and the steps that an image takes."""


@settings(max_examples=100)
@given(runs)
def test_no_more_is_pinned_than_could_run_and_everybody_is_served(drawn: tuple[Any, ...]) -> None:
    everybody_is_served(*drawn)


@settings(max_examples=30)
@given(runs)
def test_planning_claims_twice_plans_the_same(drawn: tuple[Any, ...]) -> None:
    everybody_is_served(*drawn, twice=True)


@pytest.mark.full
@pytest.mark.timeout(1800)
@settings(max_examples=5_000)
@given(runs)
def test_claims_add_up_in_thousands_of_runs(drawn: tuple[Any, ...]) -> None:
    everybody_is_served(*drawn)


def everybody_is_served(
    todo: list[Arrival],
    settings: AdmissionSettings,
    num_blocks: int,
    max_num_seqs: int,
    delay: int,
    *,
    twice: bool = False,
) -> None:
    simulation = Asking(
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        settings=settings,
        delay=delay,
        twice=twice,
    )
    live: dict[Sequence, Arrival] = {}
    for step in range(1_500):
        for number, arrival in enumerate(todo):
            if arrival.at == step:
                work = text(str(number), 9, priority=arrival.priority)
                if arrival.num_tokens:
                    work = about(str(number), number, arrival.num_tokens, priority=arrival.priority)
                kind = {"lane": arrival.lane, "reserved": arrival.reserved}
                live[simulation.come(work, **kind)] = arrival
        for sequence, arrival in live.items():
            if step == arrival.goes and sequence.status is not Status.FINISHED:
                simulation.leave(sequence)
        if not simulation.step() and step > 25:
            break
    assert all(sequence.status is Status.FINISHED for sequence in live), "somebody was not served"
    assert simulation.scheduler.admission.soft_reservations.num_blocks == 0
    assert simulation.pool.num_used == simulation.pool.num_reserved == 0
    for sequence, arrival in live.items():
        if arrival.goes is None:
            name = sequence.request.key.request_id
            assert simulation.answers[name] == alone(simulation.works[sequence])


def test_a_request_that_does_not_fit_beside_reservations_waits_until_one_ends() -> None:
    simulation = Asking(num_blocks=17, max_num_seqs=8, settings=FCFS, delay=10**6)
    first = [simulation.come(about(str(number), number, 27)) for number in range(2)]
    late = simulation.come(about("late", 7, 27))
    simulation.step()
    assert [s.soft_reserved_blocks for s in first] == [7, 7]  # with one to spare for the watermark
    assert late.is_blocked_on_encoder
    simulation.step()
    assert simulation.order == ["0", "1"]
    simulation.leave(first[0])
    simulation.step()
    assert simulation.order == ["0", "1", "late"]


def test_a_claim_that_text_made_void_is_taken_back_and_granted_again() -> None:
    simulation = Asking(num_blocks=17, max_num_seqs=8, settings=FCFS, delay=6)
    patient = simulation.come(about("patient", 1, 40))
    simulation.step()
    assert patient.soft_reserved_blocks == 11
    simulation.come(text("text", 30, max_tokens=3))
    simulation.step()
    assert patient.soft_reserved_blocks is None
    assert patient.is_blocked_on_encoder
    while patient.status is not Status.FINISHED:
        simulation.step()
        assert simulation.now < 40
    assert simulation.order == ["patient", "patient"]


@pytest.mark.parametrize("settings", [FCFS, DUAL])
def test_small_images_pass_a_large_one_so_often_and_no_more(settings: AdmissionSettings) -> None:
    settings = dataclasses.replace(settings, ageing_seconds=1e9)
    simulation = Asking(num_blocks=17, max_num_seqs=8, settings=settings, delay=3)
    for number in range(3):
        simulation.come(about(f"before {number}", number, 9), lane=Lane.VISION)
    simulation.step()
    large = simulation.come(about("large", 99, 50), lane=Lane.VISION)
    for number in range(1_000):
        simulation.come(about(f"{number}", 100 + number, 9), lane=Lane.VISION)
        simulation.step()
        if large.status is Status.FINISHED:
            break
    assert large.status is Status.FINISHED
    assert simulation.order.index("large") <= 4 + 2 * MAX_BYPASSED


def test_blocked_requests_are_tried_once() -> None:
    simulation = Asking(num_blocks=17, max_num_seqs=8, settings=FCFS, delay=10**6)
    for number in range(300):
        simulation.come(about(str(number), number, 27))
    simulation.step()
    looked_at: list[Sequence] = []
    admission = simulation.scheduler.admission
    match = admission.match
    admission.match = lambda s: (looked_at.append(s), match(s))[1]  # type: ignore[method-assign]
    for _ in range(20):
        simulation.scheduler.schedule(now=simulation.now)
    assert looked_at == []
