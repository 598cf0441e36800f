"""Shares of missed TTFT add up to 1, percentiles lie in their bucket, counters do anything."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.estimates import (
    BOUNDS,
    NOW,
    TICK,
    Service,
    cumulative,
    gateway,
    policy,
    ttft,
)
from vlm_operator.autoscale.attribute import REMEDIES, attribute, bottleneck_share, owner
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.window import Tally, Window, percentile
from vlm_operator.names import POOL_ROLES, Role
from vlm_operator.state import Ttft

STAGES = sorted(REMEDIES)
WINDOW = 300.0
seconds = st.floats(0, 20)
request = st.dictionaries(st.sampled_from(STAGES), seconds, min_size=1, max_size=9)


def after(*readings: dict[str, Ttft], boot: str = "a", step: float = TICK) -> tuple[Window, float]:
    """The window after a gateway said these, one a tick."""
    window, now = Window(), NOW
    for found in readings:
        now += step
        window = window.advance([gateway(boot=boot, **found)], now=now, window=WINDOW)
    return window, now


def said(asked: ServicePolicy, window: Window, now: float, **alone: float):
    totals = window.total(now=now, window=WINDOW)
    return {item.modality: item for item in attribute(asked, window, totals, alone, now=now)}


@given(st.lists(request, min_size=1, max_size=60), st.floats(0.1, 10))
def test_shares_add_up_to_one_or_there_are_none(requests, target):
    asked = policy(ttft_seconds={"text": target})
    window, now = after({"text": ttft([], target)}, {"text": ttft(requests, target)})
    found = said(asked, window, now)["text"]
    spent = sum(sum(item.values()) for item in requests)
    assert found.count == len(requests)
    if spent > 0:
        assert sum(found.shares.values()) == pytest.approx(1)
    assert all(0 <= share <= 1 + 1e-9 for share in found.shares.values())
    assert 0 <= found.p95_seconds <= 10


@given(st.lists(st.floats(0.01, 20), min_size=1, max_size=200))
def test_a_percentile_lies_in_the_bucket_of_the_true_one(values):
    buckets = cumulative(values)
    single = {
        bound: buckets[bound] - buckets[BOUNDS[index - 1]] if index else buckets[bound]
        for index, bound in enumerate(BOUNDS)
    }
    true = sorted(values)[math.ceil(0.95 * len(values)) - 1]
    upper = next(bound for bound in BOUNDS if true <= bound)
    lower = max([0.0, *(bound for bound in BOUNDS if bound < upper)])
    found = percentile(single)
    assert found is not None
    assert lower <= found <= (upper if upper < math.inf else 10)


def test_missed_requests_alone_say_where_the_time_went():
    slow = {"prefill_queue": 3.0, "prefill": 1.0}
    fast = {"gateway": 0.5}
    window, now = after({"text": ttft([], 1.5)}, {"text": ttft([slow] * 30 + [fast] * 200, 1.5)})
    found = said(policy(), window, now)["text"]
    assert found.missed == 30
    assert found.shares == {"prefill": 0.25, "prefill_queue": 0.75}
    assert found.overrun_seconds > 0


def test_if_no_request_missed_the_shares_are_those_of_all():
    requests = [{"prefill": 0.9, "gateway": 0.1}] * 200
    window, now = after({"text": ttft([], 1.5)}, {"text": ttft(requests, 1.5)})
    found = said(policy(), window, now)["text"]
    assert found.missed == 0
    assert found.shares == pytest.approx({"prefill": 0.9, "gateway": 0.1})


def test_requests_leave_with_the_window():
    asked = policy()
    window, now = after({"text": ttft([], 1.5)}, {"text": ttft([{"prefill": 1.0}] * 60, 1.5)})
    assert said(asked, window, now)["text"].count == 60
    assert said(asked, window, now + 2 * WINDOW) == {}, "no traffic is no percentile"


def test_a_gateway_that_restarts_counts_from_zero_and_one_that_vanishes_keeps_its_part():
    one = {"text": ttft([{"prefill": 1.0}] * 100, 1.5)}
    two = {"text": ttft([{"prefill": 1.0}] * 107, 1.5)}
    window, now = after({"text": ttft([{"prefill": 1.0}] * 40, 1.5)}, one)
    reborn = {"text": ttft([{"prefill": 1.0}] * 7, 1.5)}
    window = window.advance([gateway(boot="b", **reborn)], now=now + TICK, window=WINDOW)
    assert window.total(now=now + TICK, window=WINDOW)["text"].count == 67
    back = window.advance([gateway(boot="a", **two)], now=now + 2 * TICK, window=WINDOW)
    assert back.total(now=now, window=WINDOW)["text"].count == 74


def test_a_counter_that_falls_starts_anew():
    many = {"text": ttft([{"prefill": 1.0}] * 500, 1.5)}
    few = {"text": ttft([{"prefill": 1.0}] * 10, 1.5)}
    more = {"text": ttft([{"prefill": 1.0}] * 15, 1.5)}
    window, now = after(many, few, more)
    assert window.total(now=now, window=WINDOW)["text"].count == 5


def test_bounds_that_moved_with_the_target_say_nothing_of_the_window():
    """All that a gateway ever counted lies below a bound that is new: it was no growth."""
    old = Ttft(1000, 0, 100.0, {0.1: 990, 0.8: 1000, 5.0: 1000, math.inf: 1000}, {})
    new = Ttft(1100, 0, 400.0, {0.1: 990, 0.6: 1000, 5.0: 1100, math.inf: 1100}, {})
    window, now = after({"text": old}, {"text": new})
    found = said(policy(), window, now)["text"]
    assert found.count == 100
    assert found.p95_seconds > 4


@given(st.lists(st.integers(0, 30), min_size=2, max_size=12), st.floats(1, 400))
def test_the_window_is_the_sum_of_its_growth(counts, step):
    total, now, window, grown = 0, NOW, Window(), []
    for count in counts:
        total, now = total + count, now + step
        found = {"text": ttft([{"prefill": 1.0}] * total, 1.5)}
        window = window.advance([gateway(**found)], now=now, window=WINDOW)
        grown.append((now, count))
    slot = WINDOW / 12
    got = window.total(now=now, window=WINDOW).get("text", Tally()).count
    within = sum(count for at, count in grown[1:] if at > now - WINDOW + slot)
    around = sum(count for at, count in grown[1:] if at > now - WINDOW - slot)
    assert within <= got <= around
    assert len(window.slots) <= 12


def test_the_remedy_of_waiting_for_a_promise_is_decode():
    everybody = frozenset(POOL_ROLES)
    assert owner("decode_reserve", everybody) is Role.DECODE
    assert owner("prefill_queue", everybody) is Role.PREFILL
    assert owner("encoder_queue", everybody) is Role.ENCODER
    assert owner("encoder_queue", everybody - {Role.ENCODER}) is Role.PREFILL
    assert owner("embed_transfer", everybody) is None
    assert "decode" in REMEDIES["decode_reserve"]


def test_only_the_pool_that_owns_the_queue_is_the_bottleneck():
    slow = {"decode_reserve": 3.0, "prefill": 0.3}
    window, now = after({"text": ttft([], 1.5)}, {"text": ttft([slow] * 60, 1.5)})
    found = tuple(said(policy(), window, now).values())
    share = {role: bottleneck_share(found, {}, frozenset(POOL_ROLES), role) for role in POOL_ROLES}
    assert share[Role.DECODE] == pytest.approx(3.0 / 3.3)
    assert share[Role.PREFILL] == share[Role.ENCODER] == 0


def test_work_that_slows_other_work_down_is_waiting_too():
    slow = {"prefill": 4.0}
    window, now = after({"text": ttft([], 1.5)}, {"text": ttft([slow] * 60, 1.5)})
    alone = {"prefill": 0.1}
    found = tuple(said(policy(), window, now, **alone).values())
    assert bottleneck_share(found, alone, frozenset(POOL_ROLES), Role.PREFILL) == pytest.approx(0.9)
    (one,) = found
    assert one.attainable, "a prompt alone takes 0.4 s"


def test_a_target_below_the_service_time_is_unattainable_and_says_what_is_missing():
    slow = {"prefill": 2.0, "gateway": 0.2}
    window, now = after({"text": ttft([], 1.5)}, {"text": ttft([slow] * 60, 1.5)})
    found = said(policy(), window, now)["text"]
    assert not found.attainable
    assert found.blocking_stage == "prefill"
    assert found.lacking_seconds > 0.4
    assert bottleneck_share((found,), {}, frozenset(POOL_ROLES), Role.PREFILL) == 0


def test_attributions_reach_the_estimate_and_disappear_with_the_traffic():
    service = Service(policy())
    service.tick()
    service.finish("image", 40, encode=0.2, prefill=0.1)
    found = service.tick()
    (one,) = found.attributions
    assert (one.modality, one.count, one.missed, one.attainable) == ("image", 40, 0, True)
    service.now += 4 * WINDOW
    assert service.tick().attributions == ()


def test_the_gaps_between_tokens_have_a_percentile():
    service = Service(policy())
    assert service.tick().itl_p95_seconds is None
    service.gaps = [0.05] * 90 + [0.3] * 10
    found = service.tick().itl_p95_seconds
    assert found is not None
    assert 0.25 < found <= 0.5


def test_a_cumulative_count_that_fell_is_not_believed():
    good = ttft([{"prefill": 1.0}] * 10, 1.5)
    torn = dataclasses.replace(ttft([{"prefill": 1.0}] * 20, 1.5), buckets=dict.fromkeys(BOUNDS, 3))
    window, now = after({"text": good}, {"text": torn})
    assert window.total(now=now, window=WINDOW) == {}
