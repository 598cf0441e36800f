"""Fits find the coefficients that made the rows, and believe nothing that they should not."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.estimates import NOW, PLAIN, Pod, Service, policy, rules
from vlm_operator.autoscale.calibrate import (
    MAX_ROWS,
    Fit,
    FitMemory,
    Row,
    service_seconds,
    with_row,
)
from vlm_operator.autoscale.constants import Constants
from vlm_operator.names import Role

CONSTANTS = Constants()


def rows(base, slope, *, count=20, seed=1, noise=0.0, at=NOW) -> list[Row]:
    """Rows of steps with many numbers of KV tokens."""
    draw = random.Random(seed)
    found = []
    for index in range(count):
        calls, size = draw.randint(1, 20), draw.uniform(10, 1000)
        seconds = calls * (base + slope * size) * (1 + noise * draw.uniform(-1, 1))
        found.append(Row(at + 5 * index, calls, calls, seconds, calls * size))
    return found


def added(found: list[Row], memory: FitMemory | None = None) -> FitMemory:
    memory = memory or FitMemory()
    for row in found:
        memory = with_row(CONSTANTS, memory, row, decode=True)
    return memory


def fit(found: list[Row], memory: FitMemory | None = None) -> Fit:
    found_fit = added(found, memory).fit
    assert found_fit is not None
    return found_fit


@given(st.floats(0, 0.5), st.floats(1e-5, 1e-2))
def test_a_fit_finds_what_made_the_rows(base, slope):
    found = fit(rows(base, slope))
    assert found.confident
    for size in (50, 500, 900):
        assert found.base + found.slope * size == pytest.approx(base + slope * size, rel=1e-3)


@given(st.integers(0, 200), st.floats(0, 0.2))
def test_noise_moves_a_prediction_by_no_more_than_itself(seed, noise):
    made = rows(0.05, 1e-3, seed=seed, noise=noise)
    found = fit(made)
    assert min(found.base, found.slope) >= 0
    calls = sum(row.calls for row in made)
    size = sum(row.units for row in made) / calls
    mean = found.base + found.slope * size
    assert mean == pytest.approx(0.05 + 1e-3 * size, rel=noise + 1e-6)


def test_too_few_rows_and_too_narrow_a_spread_are_a_guess():
    assert not fit(rows(0.05, 1e-3, count=CONSTANTS.fit_points - 1)).confident
    alike = [
        Row(NOW + index, 1.0, 1.0, 0.15 + index % 5 * 1e-3, 100.0 + index % 5)
        for index in range(20)
    ]
    assert not fit(alike).confident


def test_a_slope_that_would_be_negative_leaves_the_last_good_fit():
    good = added(rows(0.05, 1e-3))
    falling = [
        Row(NOW + 105 + 5 * index, 1.0, 1.0, 1.0 - 9e-4 * size, float(size))
        for index, size in enumerate(range(50, 1050, 50))
    ]
    found = fit(falling, good)
    assert found.slope >= 0
    assert found.base >= 0


def test_rows_are_forgotten_and_a_new_shape_starts_afresh():
    memory = added(rows(0.05, 1e-3))
    slower = added(rows(0.5, 1e-2, at=NOW + 200), memory)
    assert len(slower.rows) < 30, "the older rows went"
    assert slower.fit is not None
    assert slower.fit.confident
    assert slower.fit.slope == pytest.approx(1e-2, rel=0.01)
    (late,) = added(rows(0.05, 1e-3, at=NOW + CONSTANTS.fit_seconds + 1000, count=1), memory).rows
    assert late.at > NOW + CONSTANTS.fit_seconds


def test_the_same_shape_starts_nothing_afresh():
    memory = added(rows(0.05, 1e-3))
    assert len(added(rows(0.05, 1e-3, at=NOW + 200, count=5, noise=0.1), memory).rows) == 25


def decode_step(pod: Pod, tokens: int, *, base: float, slope: float) -> None:
    calls = 50
    seconds = calls * (base + slope * tokens)
    pod.work("decode", seconds=seconds, calls=calls, items=calls * 4, units=calls * tokens)


def test_busy_counters_become_a_fit_and_the_fit_a_cap_on_kv_tokens():
    asked = policy(itl_seconds=0.05)
    service = Service(asked, decode=2)
    draw = random.Random(3)
    for _ in range(40):
        for pod in service.of(Role.DECODE):
            pod.tokens = 3000
            decode_step(pod, draw.randint(500, 4000), base=0.02, slope=1e-5)
        found = service.tick()
    # ITL(k) = 20 ms + k / 100 ms: 50 ms at 3000 tokens, of which each has 3000
    memory = service.memory.fits["decode/plain/decode"]
    assert memory.fit is not None
    assert memory.fit.tokens_within(0.05) == pytest.approx(3000, rel=0.01)
    assert found.fits == {"decode/plain/decode": memory.fit}
    replicas = {item.signal: item.replicas for item in found.needs[Role.DECODE].candidates}
    assert replicas["kvTokens"] == 1
    assert replicas["itl"] in (2, 3)
    assert len(memory.rows) <= MAX_ROWS


def test_an_itl_that_an_empty_replica_misses_asks_for_nothing():
    service = Service(policy(itl_seconds=0.01), decode=1)
    draw = random.Random(3)
    for _ in range(40):
        (pod,) = service.of(Role.DECODE)
        pod.tokens = 3000
        decode_step(pod, draw.randint(500, 4000), base=0.02, slope=1e-5)
        found = service.tick()
    assert "itl" not in {item.signal for item in found.needs[Role.DECODE].candidates}
    assert found.needs[Role.DECODE].units <= 1


def test_mean_service_seconds_are_those_of_items():
    service = Service(policy(), prefill=1)
    (pod,) = service.of(Role.PREFILL)
    for _ in range(3):
        pod.work("prefill", seconds=3.0, calls=20, items=10, units=5000, squares=1e6)
        service.tick()
    assert service_seconds(service.memory.fits, Role.PREFILL, "prefill") == pytest.approx(0.3)
    assert service_seconds(service.memory.fits, Role.ENCODER, "encode") is None


def test_a_variant_that_the_manifest_dropped_is_forgotten():
    service = Service(policy(), prefill=1)
    (pod,) = service.of(Role.PREFILL)
    pod.variant = "gone"
    for _ in range(2):
        pod.work("prefill", seconds=3.0, calls=20, items=10, units=5000, squares=1e6)
        service.tick()
    assert service.memory.fits == {}
    assert rules(Role.PREFILL).variants == (PLAIN,)
