"""Who distrusts a size can reckon it from what the explanation of its record shows."""

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.estimates import Service, busy, policy
from vlm_operator.autoscale.decide import Memory, decide
from vlm_operator.autoscale.explain import explain
from vlm_operator.autoscale.record import Record
from vlm_operator.names import Role

NUMBER = r"([\d.,e+-]+)"


def recorded(**changes) -> tuple[Record, str]:
    """The tenth tick of a service under a load, and what is said of it."""
    service = Service(policy(), prefill=changes.get("prefill", 2), decode=changes.get("decode", 1))
    memory = Memory()
    busy(service, Role.PREFILL, changes.get("rate", 0.0))
    for pod in service.of(Role.PREFILL):
        pod.queued = changes.get("queued", 0.0)
    for pod in service.of(Role.DECODE):
        pod.tokens, pod.queued_tokens = changes.get("tokens", 0), changes.get("waits", 0)
    for _ in range(10):
        service.now += service.policy.interval_seconds
        for pod in service.pods:
            pod.admitted += pod.rate * service.policy.interval_seconds
        for pod in service.of(Role.PREFILL):
            pod.work("prefill", seconds=1.0, calls=5, items=5, units=500)
        service.finish("text", 10, prefill_queue=1.5, prefill=0.2)
        view = service.view()
        outcome = decide(service.policy, view, memory)
        record = Record("ns/demo", service.policy, view, memory, outcome)
        memory = outcome.memory
    return record, explain(record)


def about(told: str, role: Role) -> str:
    return next(part for part in told.split("\n\n") if part.startswith(f"{role}:"))


def numbers(pattern: str, text: str) -> list[float]:
    found = re.search(pattern, text)
    assert found, (pattern, text)
    return [float(item.replace(",", "")) for item in found.groups()]


@given(st.integers(1, 4), st.floats(0, 2), st.floats(0, 20))
@settings(max_examples=10)
def test_use_and_backlog_of_prefill_can_be_reckoned(prefill, rate, queued):
    record, told = recorded(prefill=prefill, rate=rate, queued=queued)
    text = about(told, Role.PREFILL)
    came, waits, planned = numbers(
        rf"load +{NUMBER} s of work came each second, {NUMBER} s wait; {NUMBER} is planned", text
    )
    (use,) = numbers(r"rests on +(\d+)% use", text)
    replicas = {
        item.signal: item.replicas for item in record.outcome.decisions[Role.PREFILL].candidates
    }
    assert abs(replicas["utilization"] - math.ceil(planned / (use / 100) - 1e-6)) <= 1
    drain = min(30.0, 10 * 1.5)
    assert abs(replicas["backlog"] - math.ceil(came + waits / drain - 1e-6)) <= 1


@given(st.integers(1, 3), st.integers(0, 10_000), st.integers(0, 30_000))
@settings(max_examples=10)
def test_the_tokens_of_decode_can_be_reckoned(decode, tokens, waits):
    record, told = recorded(decode=decode, tokens=tokens, waits=waits)
    text = about(told, Role.DECODE)
    asked, queued, planned = numbers(
        rf"load +{NUMBER} KV tokens in use or asked for, {NUMBER} of them wait; {NUMBER} are", text
    )
    share, unit = numbers(rf"rests on (\d+)% occupancy; a unit has {NUMBER}", text)
    replicas = {
        item.signal: item.replicas for item in record.outcome.decisions[Role.DECODE].candidates
    }
    by_hand = math.ceil(max(planned, asked) / (share / 100 * unit) - 1e-3)
    assert abs(replicas["kvTokensWithQueue"] - by_hand) <= 1
    assert queued == pytest.approx(decode * waits, abs=1), "each pod told of as many"


def test_a_bottleneck_is_shown_with_the_share_that_makes_it_one():
    _, told = recorded(rate=0.9, queued=3.0)
    assert re.search(r"bottleneck share \d\d%, growth from 20%", about(told, Role.PREFILL))
    assert "text: TTFT p95" in told
