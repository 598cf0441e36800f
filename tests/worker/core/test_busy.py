"""What is told of a worker's work adds up to its time, and a shared step is split as predicted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker.engine.by_hand import ByHand
from worker.engine.talk import IMAGE, about_image, text

from vlm_worker.core.measurements import BusyTime, BusyTimeCounter, StepWork, WorkKind


def step(num_decodes: int, *chunks: tuple[int, int], kv_tokens: int = 0) -> StepWork:
    sizes = np.array([size for size, _ in chunks], np.int64)
    before = np.array([start for _, start in chunks], np.int64)
    return StepWork(num_decodes, kv_tokens, sizes, before, num_prompts=len(chunks))


chunks = st.lists(st.tuples(st.integers(1, 500), st.integers(0, 500)), max_size=4)
steps = st.tuples(st.integers(0, 64), chunks, st.floats(1e-4, 1.0)).filter(lambda s: s[0] or s[1])


@given(st.lists(steps, max_size=30))
def test_no_second_is_lost_or_counted_twice_and_sums_only_grow(
    done: list[tuple[int, list[tuple[int, int]], float]],
) -> None:
    meter = BusyTimeCounter()
    before = meter.sums
    for num_decodes, prompts, seconds in done:
        meter.stepped(step(num_decodes, *prompts, kv_tokens=9 * num_decodes), seconds)
        for kind, sums in before.items():
            later = meter.sums[kind]
            assert later.seconds >= sums.seconds
            assert (later.calls, later.items, later.units) >= (sums.calls, sums.items, sums.units)
        before = meter.sums
    total = sum(seconds for _, _, seconds in done)
    assert sum(sums.seconds for sums in meter.sums.values()) == pytest.approx(total)


def test_each_kind_counts_what_its_cost_depends_on() -> None:
    meter = BusyTimeCounter()
    meter.encoded([100, 200], 0.5)
    meter.stepped(step(0, (10, 0), (20, 64)), 0.2)
    meter.stepped(step(3, kv_tokens=700), 0.1)
    assert meter.sums == {
        WorkKind.ENCODE: BusyTime(0.5, 1, 2, 300, 100**2 + 200**2),
        WorkKind.PREFILL: BusyTime(0.2, 2, 2, 30, 10 * 5 + 20 * 74),
        WorkKind.DECODE: BusyTime(0.1, 1, 3, 700, 700**2),
    }


def test_a_step_of_both_kinds_is_split_as_its_halves_are_predicted() -> None:
    meter = BusyTimeCounter()
    for _ in range(5):
        meter.stepped(step(0, (100, 0)), 0.3)
        meter.stepped(step(8, kv_tokens=80), 0.1)
    before = meter.sums
    meter.stepped(step(8, (100, 0), kv_tokens=80), 0.2)
    more = {kind: meter.sums[kind].seconds - before[kind].seconds for kind in before}
    assert more == {WorkKind.PREFILL: pytest.approx(0.15), WorkKind.DECODE: pytest.approx(0.05)}


def test_before_both_kinds_were_seen_alone_tokens_decide() -> None:
    meter = BusyTimeCounter()
    meter.stepped(step(10, (30, 0), kv_tokens=80), 0.4)
    seconds = {kind: sums.seconds for kind, sums in meter.sums.items()}
    assert seconds == {WorkKind.PREFILL: pytest.approx(0.3), WorkKind.DECODE: pytest.approx(0.1)}


def test_an_engine_tells_what_it_encoded_beside_what_it_prefilled_and_decoded() -> None:
    engine = ByHand()
    engine.encode("r", [IMAGE])
    engine.submit(about_image())  # 8 tokens, an answer of 4
    engine.submit(text("t", max_tokens=3))  # 10 tokens, an answer of 3
    while engine.turn():
        engine.now += 1.0
    engine.state.cancel(about_image().key)
    busy = engine.state.snapshot().busy
    patches = IMAGE.grid_thw[0] * IMAGE.grid_thw[1] * IMAGE.grid_thw[2]
    assert busy[WorkKind.ENCODE].units == patches
    assert (busy[WorkKind.ENCODE].calls, busy[WorkKind.ENCODE].items) == (1, 1)
    assert (busy[WorkKind.PREFILL].items, busy[WorkKind.PREFILL].units) == (2, 18)
    assert busy[WorkKind.DECODE].items == 3 + 2
