"""What is not known well enough yet: no size rests on it; and what is kept warm for growth."""

import dataclasses

import pytest
from estimating_support import NOW, Service, busy, policy, signals
from hypothesis import given
from hypothesis import strategies as st

from vlm_operator.autoscale.estimating.horizon import GrowthMemory, warm_load, with_minute
from vlm_operator.autoscale.tuning import Tuning
from vlm_operator.names import Role

WARM = Tuning(warm_share=1.0)


def prompts(service: Service, ticks: int, *, size: int = 500) -> None:
    """Prompts of one size, ten a tick."""
    for _ in range(ticks):
        for pod in service.of(Role.PREFILL):
            pod.work("prefill", seconds=2.0, calls=10, items=10, units=10 * size)
        found = service.tick()
    service.last = found


def test_a_pool_is_credible_once_enough_of_its_work_was_seen_however_alike_it_is():
    service = Service(policy())
    busy(service, Role.PREFILL, 0.4)
    for ticks, credible in ((10, False), (3, True)):
        prompts(service, ticks)
        assert service.last.needs[Role.PREFILL].credible is credible
    assert service.last.needs[Role.DECODE].credible, "tokens are counted, not timed"
    assert not service.last.needs[Role.ENCODER].credible, "nobody sent a picture"


def test_what_was_known_well_is_still_known_by_the_next_process():
    service = Service(policy())
    for size in (100, 900, 300, 700) * 5:
        prompts(service, 1, size=size)
    service.memory = service.memory.lasting
    prompts(service, 1)
    assert service.last.needs[Role.PREFILL].credible


def test_waiting_is_not_computed_from_times_that_are_not_credible():
    service = Service(policy())
    busy(service, Role.PREFILL, 0.9)
    prompts(service, 5)
    assert signals(service.last.needs[Role.PREFILL])["waiting"] == 0
    prompts(service, 8)
    assert signals(service.last.needs[Role.PREFILL])["waiting"] > 0


def hours(loads: list[float]) -> GrowthMemory:
    memory = GrowthMemory()
    for minute, load in enumerate(loads):
        for second in (0, 30):
            memory = with_minute(memory, load, now=NOW + 60 * minute + second)
    return memory


@given(st.lists(st.floats(0, 9), min_size=30, max_size=150), st.floats(20, 900))
def test_what_is_kept_warm_is_no_more_than_load_ever_grew_by(loads, startup):
    memory = hours(loads)
    assert len(memory.loads) <= 120
    kept = warm_load(dataclasses.replace(policy(), tuning=WARM), memory, startup=startup)
    assert 0 <= kept <= max(loads) - min(loads)


@pytest.mark.parametrize(
    ("loads", "startup", "share", "kept"),
    [
        ([1.0, 1.0, 1.0, 4.0, 1.0] * 10, 60.0, 1.0, 3.0),
        ([1.0, 1.0, 1.0, 4.0, 1.0] * 10, 30.0, 1.0, 1.5),
        ([1.0, 1.0, 1.0, 4.0, 1.0] * 10, 60.0, 0.5, 1.5),
        ([1.0, 1.0, 1.0, 4.0, 1.0] * 10, 60.0, 0.0, 0.0),
        ([1.0, 1.0, 1.0, 4.0, 1.0] * 10, 15.0, 1.0, 0.0),
        ([1.0, 1.0, 1.0, 4.0, 1.0] * 3, 60.0, 1.0, 0.0),
        ([2.0] * 100, 600.0, 1.0, 0.0),
        ([3.0 - 0.01 * minute for minute in range(100)], 60.0, 1.0, 0.0),
    ],
    ids=[
        "bursts", "half a minute of them", "half of them", "not asked for",
        "a start that the target forgives", "too little known", "steady", "falling",
    ],
)  # fmt: skip
def test_what_a_start_usually_sees_of_growth_is_kept_warm(loads, startup, share, kept):
    asked = dataclasses.replace(policy(), tuning=Tuning(warm_share=share))
    assert warm_load(asked, hours(loads), startup=startup) == pytest.approx(kept)


def test_a_warm_pool_needs_more_and_its_cost_is_told_apart():
    needs = []
    for share in (0.0, 1.0):
        service = Service(policy(Tuning(warm_share=share)), prefill=4)
        for minute in range(40):
            busy(service, Role.PREFILL, 0.6 if minute % 4 == 3 else 0.1)
            needs.append(service.tick(12).needs[Role.PREFILL])
    cold, warm = needs[38], needs[78]
    assert (cold.warm_units, warm.warm_units > 1.0) == (0.0, True)
    assert warm.least_units >= cold.least_units + warm.warm_units * 0.9


def test_a_clock_that_is_put_back_forgets_minutes_and_a_gap_has_the_load_before_it():
    memory = hours([1.0, 2.0])
    assert with_minute(memory, 5.0, now=NOW - 600).loads == (5.0,)
    assert with_minute(memory, 5.0, now=NOW + 240).loads == (1.0, 2.0, 2.0, 2.0, 5.0)
    assert len(with_minute(memory, 5.0, now=NOW + 1e9).loads) == 120
