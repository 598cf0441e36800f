"""Any spec at all through a turn of the loop: no exception, one answer, no trace of a mistake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.specs import NODE_CLASSES, broken, drawn
from support.world import World, body
from vlm_operator.cluster import VLM_NODE_CLASS

# long specs, drawn from some hundred fields
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example]


def many(count: int) -> Callable[[Any], Any]:
    # a spec of some hundred fields takes longer to shrink than to read
    phases = (Phase.explicit, Phase.reuse, Phase.generate)
    return settings(max_examples=count, deadline=None, suppress_health_check=SLOW, phases=phases)


def world(spec: dict[str, Any]) -> World:
    found = World({**body(), "spec": spec})
    for name in NODE_CLASSES:
        head = {"apiVersion": VLM_NODE_CLASS.api_version, "kind": VLM_NODE_CLASS.kind}
        accelerator = {"resourceName": "nvidia.com/gpu", "count": 1}
        cost = {"perHour": "1.20"}
        found.cluster.hardware(
            {**head, "metadata": {"name": name}, "spec": {"accelerator": accelerator, "cost": cost}}
        )
    return found


def answered(found: World) -> bool:
    """One turn ends, and says of this generation either that it is taken or why not."""
    asyncio.run(found.loop.turn())
    accepted = found.condition("Accepted")
    assert found.status["observedGeneration"] == 1
    assert accepted["status"] in ("True", "False")
    assert accepted["message"] or accepted["status"] == "True"
    return accepted["status"] == "True"


def never_raises(spec: dict[str, Any]) -> None:
    answered(world(spec))


def leaves_no_trace(bad: dict[str, Any], good: dict[str, Any]) -> None:
    """A wrong spec, corrected, is as if it had never been wrong."""
    corrected, right = world(bad), world(good)
    assert not answered(corrected)
    corrected.apply({**body(), "spec": good})
    for found in (corrected, right):
        until_quiet(found)
    assert corrected.snapshot(keys=False) == right.snapshot(keys=False)


def until_quiet(found: World) -> None:
    """Turn until a turn writes nothing; no pod starts, which would be a test of pods."""
    for _ in range(8):
        before = found.cluster.version
        found.turn()
        if found.cluster.version == before:
            return
    raise AssertionError(f"still writing: {found.cluster.writes[-5:]}")


ANY = st.one_of(drawn(right=True), drawn(right=True), drawn(right=False))
BAD = broken(twice=False).map(lambda found: found[0])


@given(ANY)
@many(100)
def test_no_spec_makes_a_turn_raise(spec: dict[str, Any]) -> None:
    never_raises(spec)


@given(BAD, drawn(right=True))
@many(12)
def test_bad_then_good_is_good(bad: dict[str, Any], good: dict[str, Any]) -> None:
    leaves_no_trace(bad, good)


@pytest.mark.full
@pytest.mark.timeout(7200)
@given(ANY)
@many(10_000)
def test_no_spec_of_ten_thousand_makes_a_turn_raise(spec: dict[str, Any]) -> None:
    never_raises(spec)


@pytest.mark.full
@pytest.mark.timeout(7200)
@given(BAD, drawn(right=True))
@many(1_000)
def test_bad_then_good_is_good_a_thousand_times(bad: dict[str, Any], good: dict[str, Any]) -> None:
    leaves_no_trace(bad, good)
