"""From reports of pods to replicas in one: what holds at every tick, whatever pods say or do not.

pytest -m full tests/operator/autoscale/test_decide_laws.py -k fifty_thousand
"""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.random_services import OURS, QUICK, made_up_policy, start_of, within_budget
from support.samples import Reports
from support.sizing import TICK, World
from vlm_operator.api import ScalingMode
from vlm_operator.api.enums import AutoscalingPolicy
from vlm_operator.autoscale.decide import Memory, Outcome, decide
from vlm_operator.autoscale.memory import dump, load
from vlm_operator.autoscale.policy import ServicePolicy
from vlm_operator.autoscale.record import as_json
from vlm_operator.autoscale.view import View
from vlm_operator.names import Role

TICKS = 200  # of one service


@dataclasses.dataclass
class Seen:
    """What a run met, so that a law that was never put to the test shows."""

    ticks: int = 0
    dark: int = 0
    grown: int = 0
    shrunk: int = 0
    absurd: int = 0


def live_through(seed: int, ticks: int, seen: Seen) -> None:
    """Run one made-up service through made-up reports, restarts of the operator and its clock."""
    rng = random.Random(seed)
    policy = dataclasses.replace(
        made_up_policy(rng),
        ttft_seconds={"text": 1.0, "image": 2.0},
        apply=rng.choices(list(AutoscalingPolicy), [8, 1, 1])[0],
    )
    world = World(policy, start_of(policy), seed=seed)
    world.startup, world.drain = rng.choice([5.0, 20.0]), rng.choice([5.0, 60.0])
    if rng.random() < 0.5:
        world.nodes = {"a": rng.randint(4, 8), "b": rng.randint(0, 2)}
    reports, memory = Reports(rng), Memory()
    for _ in range(ticks):
        if rng.random() < 0.01:
            memory = load(dump(memory), now=world.now)
        if rng.random() < 0.002:
            world.now -= 30.0  # the clock is put back
        world.rolling = rng.random() < 0.02
        for role, rules in policy.pools.items():
            if rng.random() < (0.05 if rules.mode is ScalingMode.EXTERNAL else 0.002):
                world.write(role, rng.choice(["hpa", "kubectl"]), rng.randint(0, 12))
        view = reports.on(world.view())
        outcome = decide(policy, view, memory)
        if seen.ticks % 10 == 0:
            assert as_json(decide(policy, view, memory)) == as_json(outcome)
        lawful(policy, view, outcome, reports.strange, seen)
        memory = outcome.memory
        world.carry_out(outcome.decisions)
        within_budget(world)
        world.advance(TICK)
        within_budget(world)


def lawful(
    policy: ServicePolicy, view: View, outcome: Outcome, strange: set[str], seen: Seen
) -> None:
    """Within bounds, and no replica less where too few pods say something that can be."""
    seen.ticks += 1
    seen.absurd += len(strange)
    assert strange <= set(outcome.estimate.absurd) | {"ghost"}
    for role, decision in outcome.decisions.items():
        rules = policy.pools[role]
        assert rules.minimum <= decision.to <= rules.maximum, decision
        assert decision.to == sum(decision.variants.values())
        seen.grown += decision.to > decision.before
        seen.shrunk += decision.to < decision.before
        if rules.mode is ScalingMode.AUTO and view.pools[role].owner == OURS:
            in_the_dark(view, role, strange, seen, outcome)


def in_the_dark(view: View, role: Role, strange: set[str], seen: Seen, outcome: Outcome) -> None:
    """No scale-down on missing, stale or absurd data."""
    decision, pods = outcome.decisions[role], view.pools[role].of("ready")
    heard = [pod for pod in pods if pod.uid in view.samples and pod.uid not in strange]
    if len(heard) < QUICK.fresh_down_share * len(pods):
        seen.dark += 1
        # pods that never served may go: no node came for them
        least = min(decision.before, len(pods))
        assert decision.to >= least or decision.reason == "Bounds", decision
    if len(heard) < QUICK.fresh_share * len(pods):
        assert decision.to >= decision.before or decision.reason == "Bounds", decision


@given(st.integers(0, 2**32))
@settings(max_examples=12)
def test_bounds_and_budget_hold_and_nothing_shrinks_in_the_dark(seed):
    live_through(seed, 60, Seen())


def test_the_made_up_reports_put_every_law_to_the_test():
    seen = Seen()
    for seed in range(12):
        live_through(seed, 100, seen)
    assert min(dataclasses.astuple(seen)) > 10, seen


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("ticks", [50_000, 1_000_000], ids=["fifty_thousand", "a_million"])
def test_they_hold_over_many_ticks(ticks):
    seen = Seen()
    for seed in range(ticks // TICKS):
        live_through(seed, TICKS, seen)
    print(seen)
