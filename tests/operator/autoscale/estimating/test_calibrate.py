"""Fits find the coefficients that made the rows, and believe nothing that they should not."""

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.estimates import NOW, PLAIN, Pod, Service, policy, rules
from vlm_operator.autoscale.constants import Constants
from vlm_operator.autoscale.estimating.calibrate import (
    MAX_ROWS,
    Fit,
    FitMemory,
    Row,
    fit_of,
    fitted,
    service_seconds,
)
from vlm_operator.names import Role

TUNING = Constants()


def rows(base, slope, curve, *, count=20, seed=1, noise=0.0, at=NOW) -> tuple[Row, ...]:
    """Rows of items of many sizes."""
    draw = random.Random(seed)
    found = []
    for index in range(count):
        weight, size = draw.randint(1, 20), draw.uniform(10, 1000)
        square = size * size * draw.uniform(0.5, 1.5)
        seconds = weight * (base + slope * size + curve * square)
        found.append(
            Row(
                at=at + 5 * index,
                weight=weight,
                items=weight,
                seconds=seconds * (1 + noise * draw.uniform(-1, 1)),
                units=weight * size,
                squares=weight * square,
            )
        )
    return tuple(found)


def fit(found: tuple[Row, ...], kind: str = "encode", before: Fit | None = None) -> Fit:
    memory = fitted(TUNING, FitMemory(found, before), kind, now=found[-1].at)
    assert memory.fit is not None
    return memory.fit


@given(st.floats(0, 0.5), st.floats(1e-5, 1e-2), st.floats(0, 1e-5))
def test_a_fit_finds_what_made_the_rows(base, slope, curve):
    found = fit(rows(base, slope, curve))
    assert found.confident
    scale = base + slope * 500 + curve * 250_000
    for size in (50, 500, 900):
        made = base + slope * size + curve * size * size
        said = found.base + found.slope * size + found.curve * size * size
        assert said == pytest.approx(made, rel=1e-3, abs=1e-3 * scale)


@given(st.integers(0, 200), st.floats(0, 0.2))
def test_noise_moves_a_prediction_by_no_more_than_itself(seed, noise):
    found = fit(rows(0.05, 1e-3, 0.0, seed=seed, noise=noise))
    assert min(found.base, found.slope, found.curve) >= 0
    made = 0.05 + 1e-3 * found.size
    assert found.seconds == pytest.approx(made, rel=noise + 1e-6)


def test_too_few_rows_and_too_narrow_a_spread_are_a_guess():
    assert not fit(rows(0.05, 1e-3, 0.0, count=TUNING.fit_points - 1)).confident
    alike = tuple(Row(NOW + index, 1.0, 1.0, 0.15, 100.0 + index % 5, 1e4) for index in range(20))
    assert not fit(alike, "decode").confident


def test_a_slope_that_would_be_negative_leaves_the_last_good_fit():
    good = fit(rows(0.05, 1e-3, 0.0), "decode")
    falling = tuple(
        Row(NOW + 5 * index, 1.0, 1.0, 1.0 - 9e-4 * size, float(size), 0.0)
        for index, size in enumerate(range(50, 1050, 50))
    )
    found = fit(falling, "decode", good)
    assert found.slope >= 0
    assert min(found.base, found.curve) >= 0


def test_rows_are_forgotten_and_a_new_shape_starts_afresh():
    memory = FitMemory(rows(0.05, 1e-3, 0.0))
    memory = fitted(TUNING, memory, "decode", now=NOW + 100)
    assert memory.fit is not None
    slower = rows(0.5, 1e-2, 0.0, at=NOW + 200, count=5)
    shifted = fitted(
        TUNING, FitMemory((*memory.rows, *slower), memory.fit), "decode", now=NOW + 230
    )
    assert shifted.rows == slower
    late = fitted(TUNING, memory, "decode", now=NOW + TUNING.fit_seconds + 1000)
    assert late.rows == ()
    assert late.fit == memory.fit, "the last good fit stays"


def test_the_same_shape_starts_nothing_afresh():
    memory = fitted(TUNING, FitMemory(rows(0.05, 1e-3, 0.0)), "decode", now=NOW + 100)
    more = rows(0.05, 1e-3, 0.0, at=NOW + 200, count=5, noise=0.1)
    again = fitted(TUNING, FitMemory((*memory.rows, *more), memory.fit), "decode", now=NOW + 230)
    assert len(again.rows) == 25


def test_a_variant_without_rows_is_seeded_by_the_speeds_of_node_types():
    asked = policy(
        encoder={"variants": (PLAIN, dataclasses.replace(PLAIN, name="slow", speed=0.5))}
    )
    known = {"encoder/plain/encode": FitMemory((), fit(rows(0.1, 1e-3, 0.0)))}
    guess = fit_of(asked, known, Role.ENCODER, "slow", "encode")
    assert guess is not None
    assert not guess.confident
    assert guess.slope == pytest.approx(2e-3)
    assert fit_of(asked, {}, Role.ENCODER, "slow", "encode") is None


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
    assert memory.fit.size_within(0.05) == pytest.approx(3000, rel=0.01)
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
