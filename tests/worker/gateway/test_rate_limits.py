"""Limits of tenants: no history of requests exceeds them, and `Retry-After` is the truth."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_worker.gateway.rate_limits import (
    Limit,
    RateLimitError,
    RateLimits,
    RequestCharge,
    TenantLimits,
    duration,
    limits_of,
)

GAPS = st.lists(st.sampled_from((0.0, 0.1, 1.0, 7.5, 61.0)), min_size=1, max_size=120)


def refusal(charge: RequestCharge, *, now: float) -> RateLimitError | None:
    """What refuses the start of a request; None if it starts, and ends at once."""
    try:
        charge.start(now=now)
    except RateLimitError as error:
        return error
    charge.end()
    return None


def started(rates: RateLimits, limits: TenantLimits, *, now: float) -> RequestCharge:
    charge = rates.charge("a", limits)
    charge.start(now=now)
    return charge


@given(GAPS, st.integers(1, 30), st.integers(1, 3))
def test_no_window_has_more_requests_than_one_burst_and_its_refill(
    gaps: list[float], per_minute: int, num_gateways: int
) -> None:
    rates, limits = RateLimits(), TenantLimits(requests_per_minute=per_minute)
    rates.num_gateways = num_gateways
    now, admitted = 0.0, list[float]()
    for gap in gaps:
        now += gap
        with contextlib.suppress(RateLimitError):
            started(rates, limits, now=now).end()
            admitted.append(now)
    part = per_minute / num_gateways
    for first, begin in enumerate(admitted):
        for last in range(first, len(admitted)):
            allowed = max(1.0, part) + (admitted[last] - begin) * part / 60
            assert last - first + 1 <= allowed + 1e-3


@given(GAPS, st.integers(1, 30))
def test_a_refused_request_is_admitted_after_its_retry_time_and_not_before(
    gaps: list[float], per_minute: int
) -> None:
    rates, limits = RateLimits(), TenantLimits(requests_per_minute=per_minute)
    now = 0.0
    for gap in gaps:
        now += gap
        refused = refusal(rates.charge("a", limits), now=now)
        if refused is not None:
            assert refused.limit is Limit.REQUESTS
            wait = refused.retry_after_seconds
            assert 0 < wait <= 60 / per_minute + 1e-3
            assert refusal(rates.charge("a", limits), now=now + wait / 2) is not None
            now += wait
            assert refusal(rates.charge("a", limits), now=now) is None


def test_concurrent_requests_are_counted_until_they_end() -> None:
    rates, limits = RateLimits(), TenantLimits(concurrent_requests=2)
    first, _ = (started(rates, limits, now=0.0) for _ in range(2))
    with pytest.raises(RateLimitError) as refused:
        started(rates, limits, now=0.0)
    assert refused.value.limit is Limit.CONCURRENT
    first.end()
    first.end()
    started(rates, limits, now=0.0)
    assert rates.accounts["a"].num_running == 2


def test_a_refusal_for_concurrency_takes_no_request_of_the_minute() -> None:
    rates = RateLimits()
    limits = TenantLimits(requests_per_minute=2, concurrent_requests=1)
    first = started(rates, limits, now=0.0)
    for _ in range(5):
        with pytest.raises(RateLimitError):
            started(rates, limits, now=0.0)
    first.end()
    started(rates, limits, now=0.0)


def test_the_end_of_a_refused_request_frees_nothing() -> None:
    rates, limits = RateLimits(), TenantLimits(concurrent_requests=1)
    started(rates, limits, now=0.0)
    refused = rates.charge("a", limits)
    with pytest.raises(RateLimitError):
        refused.start(now=0.0)
    refused.end()
    assert rates.accounts["a"].num_running == 1


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 400)), max_size=60))
def test_tokens_over_time_are_at_most_a_burst_the_refill_and_one_request(
    requests: list[tuple[int, int]],
) -> None:
    rates, limits = RateLimits(), TenantLimits(tokens_per_minute=300)
    now, taken = 0.0, 0
    for num_prompt, num_output in requests:
        charge = started(rates, limits, now=now)
        try:
            charge.prompt(num_prompt, now=now)
        except RateLimitError as error:
            now += error.retry_after_seconds
            charge.prompt(num_prompt, now=now)
        assert taken + min(num_prompt, 300) <= 300 + now * 300 / 60 + 1e-3
        for _ in range(num_output):
            charge.output(1)
        charge.end()
        taken += num_prompt + num_output
    if requests:
        account = rates.accounts["a"]
        assert account.num_prompt_tokens == sum(prompt for prompt, _ in requests)
        assert account.num_output_tokens == sum(output for _, output in requests)


def test_a_prompt_above_the_limit_is_admitted_by_a_full_bucket_alone() -> None:
    rates, limits = RateLimits(), TenantLimits(tokens_per_minute=60)
    started(rates, limits, now=0.0).prompt(100, now=0.0)
    charge = started(rates, limits, now=10.0)
    with pytest.raises(RateLimitError) as refused:
        charge.prompt(100, now=10.0)
    assert refused.value.limit is Limit.TOKENS
    assert refused.value.retry_after_seconds == pytest.approx(90)  # 40 in debt, to 60, less 10 s
    charge.prompt(100, now=100.0)


@pytest.mark.parametrize("num_gateways", [1, 2, 3, 7])
def test_all_gateways_together_admit_at_most_the_limit(num_gateways: int) -> None:
    limits = TenantLimits(requests_per_minute=21)
    num_admitted = num_running = 0
    for _ in range(num_gateways):
        rates = RateLimits()
        rates.num_gateways = num_gateways
        charges = [rates.charge("a", limits) for _ in range(100)]
        num_admitted += sum(refusal(charge, now=0.0) is None for charge in charges)
        for _ in range(100):
            with contextlib.suppress(RateLimitError):
                started(rates, TenantLimits(concurrent_requests=21), now=0.0)
        num_running += rates.accounts["a"].num_running
    assert 21 - num_gateways < num_admitted <= 21
    assert 21 - num_gateways < num_running <= 21


def test_a_gateway_admits_one_request_however_many_gateways_there_are() -> None:
    rates = RateLimits()
    rates.num_gateways = 100
    limits = TenantLimits(requests_per_minute=1, tokens_per_minute=1, concurrent_requests=1)
    started(rates, limits, now=0.0).prompt(5, now=0.0)


def test_a_changed_limit_applies_to_the_next_request() -> None:
    rates = RateLimits()
    for _ in range(10):
        started(rates, TenantLimits(requests_per_minute=10), now=0.0)
    low, high = TenantLimits(requests_per_minute=1), TenantLimits(requests_per_minute=600)
    with pytest.raises(RateLimitError) as refused:
        started(rates, low, now=0.0)
    assert refused.value.retry_after_seconds == pytest.approx(60)
    started(rates, high, now=0.1)
    started(rates, TenantLimits(weight=2), now=0.1)
    assert rates.accounts["a"].requests is None


def test_an_older_request_leaves_the_debt_of_its_tenant() -> None:
    rates = RateLimits()
    plain = TenantLimits(requests_per_minute=60)
    limited = TenantLimits(requests_per_minute=60, tokens_per_minute=600)
    older = started(rates, plain, now=0.0)
    newer = started(rates, limited, now=0.0)
    newer.prompt(600, now=0.0)
    newer.output(1000)
    with pytest.raises(RateLimitError) as refused:
        older.prompt(10, now=1.0)
    assert refused.value.retry_after_seconds == pytest.approx(100.0)
    assert older.headers(now=1.0)["x-ratelimit-remaining-tokens"] == "0"
    newer.prompt(10, now=101.0)


@given(st.permutations(range(4)))
def test_old_requests_and_new_ones_leave_the_same_level(order: list[int]) -> None:
    """Whichever limits and however many gateways there were when a request came."""
    rates = RateLimits()
    rates.num_gateways = 4
    charges = [started(rates, TenantLimits(tokens_per_minute=40), now=0.0)]
    charges.append(started(rates, TenantLimits(requests_per_minute=9), now=0.0))
    rates.num_gateways = 1
    limits = TenantLimits(tokens_per_minute=600)
    charges += [started(rates, limits, now=0.0) for _ in range(2)]
    for index in order:
        charges[index].prompt(100, now=0.0)
        charges[index].output(20)
    account = rates.accounts["a"]
    assert account.tokens is not None
    assert account.tokens.level == 600 - 4 * 120
    rates.num_gateways = 2
    assert charges[0].headers(now=0.0)["x-ratelimit-limit-tokens"] == "300"


def test_a_limit_that_comes_back_has_a_full_bucket() -> None:
    rates, limits = RateLimits(), TenantLimits(tokens_per_minute=60)
    older = started(rates, limits, now=0.0)
    older.output(1000)
    for without in (TenantLimits(weight=1), None):
        rates.charge("a", without).start(now=0.0)
        older.output(1)
        assert rates.accounts["a"].tokens is None
        started(rates, limits, now=0.0).prompt(60, now=0.0)


def test_without_an_entry_a_tenant_has_neither_account_nor_headers() -> None:
    rates = RateLimits()
    charge = rates.charge("a", None)
    charge.start(now=0.0)
    charge.prompt(10**9, now=0.0)
    charge.output(10**9)
    assert charge.headers(now=0.0) == {}
    charge.end()
    assert not rates.accounts


def test_the_headers_are_those_of_this_gateways_part() -> None:
    rates = RateLimits()
    rates.num_gateways = 2
    charge = started(rates, TenantLimits(requests_per_minute=20, tokens_per_minute=600), now=0.0)
    charge.prompt(30, now=0.0)
    assert charge.headers(now=0.0) == {
        "x-ratelimit-limit-requests": "10",
        "x-ratelimit-remaining-requests": "9",
        "x-ratelimit-reset-requests": "6s",
        "x-ratelimit-limit-tokens": "300",
        "x-ratelimit-remaining-tokens": "270",
        "x-ratelimit-reset-tokens": "6s",
    }
    charge.output(1000)
    assert charge.headers(now=1.0)["x-ratelimit-remaining-tokens"] == "0", "a debt shows as 0"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.12, "120ms"), (1, "1s"), (8.64, "8.64s"), (60, "1m0s"), (372.5, "6m12.5s")],
)
def test_a_duration_is_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.floats(0, 1e6))
def test_a_duration_is_never_shorter_than_the_time(seconds: float) -> None:
    text = duration(seconds)
    if text.endswith("ms"):
        assert int(text[:-2]) / 1000 >= seconds - 1e-9
    else:
        minutes, _, rest = text.rpartition("m")
        assert int(minutes or 0) * 60 + float(rest[:-1]) >= seconds - 1e-9


def test_a_field_that_a_tenant_does_not_set_is_that_of_the_others() -> None:
    tenants = {
        "*": TenantLimits(requests_per_minute=60, weight=1),
        "team-a": TenantLimits(weight=2),
    }
    assert limits_of("team-a", tenants) == TenantLimits(requests_per_minute=60, weight=2)
    assert limits_of("team-b", tenants) == tenants["*"]
    assert limits_of("", tenants) == tenants["*"]
    assert limits_of("team-b", {"team-a": TenantLimits(weight=2)}) is None


@pytest.mark.parametrize("field", TenantLimits.__struct_fields__)
def test_a_limit_of_zero_is_refused_with_its_name(field: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=field):
        msgspec.json.decode(f'{{"{field}": 0}}', type=TenantLimits)
