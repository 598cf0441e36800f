"""What the conditions say of sizes: in words that change only when something does."""

import dataclasses

import pytest

from support.load import FAST, auto, loaded_world, replicas, run, said, seen
from support.world import World
from vlm_operator.autoscale.outcome import Attribution, Decision
from vlm_operator.cluster import EVENT
from vlm_operator.metrics import REGISTRY
from vlm_operator.names import Role
from vlm_operator.status.build import build_status, decision_status, percents
from vlm_operator.status.events import events
from vlm_operator.status.inputs import StatusInputs

UNATTAINABLE = Attribution(
    modality="image",
    count=100,
    missed=90,
    p95_seconds=1.9,
    target_seconds=1.0,
    shares={"encode": 0.8, "prefill": 0.2},
    service_seconds={"encode": 1.204, "prefill": 0.3},
    attainable=False,
)


def view_of(world: World) -> StatusInputs:
    """What the last turn knew when it reported."""
    found = []
    inner = world.loop._status_inputs

    def kept(*arguments: object) -> StatusInputs:
        found.append(inner(*arguments))  # type: ignore[arg-type]
        return found[-1]

    world.loop._status_inputs = kept  # type: ignore[method-assign]
    world.turn()
    return found[-1]


def verdict(status: dict, kind: str) -> tuple[str, str, str]:
    found = next(item for item in status["conditions"] if item["type"] == kind)
    return found["status"], found["reason"], found["message"]


def test_a_goal_that_no_number_of_replicas_meets_names_stage_and_milliseconds_once():
    world = loaded_world()
    view = view_of(world)
    beyond = dataclasses.replace(view, slo=(UNATTAINABLE,))
    status = build_status(beyond, world.status, now=world.cluster.clock.now)
    turned, reason, message = verdict(status, "SLOAttainable")
    assert (turned, reason) == ("False", "Unattainable")
    assert message == (
        "image: without any waiting it takes 1500 ms, 500 ms more than the goal of 1000 ms, most "
        "of it encode with 1200 ms: more replicas do not help, a faster node type for the encoder "
        "would, or another goal"
    )
    assert [item.reason for item in events(world.status, status)] == ["SLOUnattainable"]
    assert events(status, status) == ()


def test_a_node_type_that_gives_no_pod_is_named_with_the_time_of_the_next_try():
    world = loaded_world()
    world.scraper.tokens = 1900
    run(world, turns=8, start=False)
    turned, reason, message = verdict(world.status, "CapacitySufficient")
    assert (turned, reason) == ("False", "Exhausted")
    assert message.startswith("decode: variant default got no node in time, ")
    assert message.endswith(" UTC")
    before = world.written()
    run(world, turns=4, start=False)
    assert world.cluster.writes[before:] == [], "the message does not count down"


def test_a_budget_that_cannot_be_computed_lets_nothing_grow_and_names_what_is_unknown():
    world = loaded_world({"budget": {"maxCostPerHour": "10"}})
    world.scraper.tokens = 1900
    run(world, turns=6)
    assert replicas(world) == 1
    turned, reason, message = verdict(world.status, "ScalingActive")
    assert (turned, reason) == ("True", "Limited")
    assert "the cost of decode variant default is unknown" in message


@pytest.mark.parametrize(("maximum", "bound"), [(2, "maxReplicas"), (6, None)])
def test_a_lasting_bound_stands_in_the_condition_and_pace_does_not(maximum, bound):
    world = loaded_world(decode=auto(1, maximum))
    world.scraper.tokens = 1900
    run(world, turns=8)
    message = verdict(world.status, "ScalingActive")[2]
    assert message == (f"decode is held at {maximum} by {bound}" if bound else "decode Auto")


def test_a_recommendation_is_shown_where_it_is_not_what_stands():
    world = loaded_world({"autoscaling": {**FAST, "policy": "Advisory"}})
    assert "recommendation" not in said(world)
    world.scraper.tokens = 1900
    run(world, turns=7)  # a measured figure is written at most every 30 s
    assert said(world)["recommendation"] == 3
    world.scraper.tokens = 0
    run(world, turns=7)
    assert "recommendation" not in said(world)


def test_a_decision_is_shown_in_steps_that_noise_does_not_cross():
    plain = Decision(1_800_000_000.4, 1, 2, 2, "ScaleUp", "why", shares={"a": 0.612, "b": 0.011})
    other = dataclasses.replace(plain, time=plain.time + 0.05, shares={"a": 0.605, "b": 0.02})
    first = decision_status(plain, {}, epoch=1)
    assert first == decision_status(other, {}, epoch=1)
    assert first["shares"] == {"a": 60}
    assert percents({}) == {}


def test_a_decision_keeps_the_epoch_under_which_it_was_made():
    made = Decision(1_800_000_000.0, 1, 2, 2, "ScaleUp", "why")
    first = decision_status(made, {}, epoch=3)
    assert first["epoch"] == 3
    assert decision_status(made, first, epoch=4) == first
    later = dataclasses.replace(made, time=made.time + 60, before=2, to=3)
    assert decision_status(later, first, epoch=4)["epoch"] == 4


def test_a_size_that_changes_is_one_event_with_its_reason():
    world = loaded_world()
    world.scraper.tokens = 1900
    run(world, turns=20)
    found = [item for item in world.cluster.all(EVENT) if item["reason"].startswith("Scale")]
    assert [(item["reason"], item["count"]) for item in found] == [("ScaledUp", 1)]


def test_a_pod_that_misses_one_tick_is_no_news_and_one_that_stays_silent_is():
    world = loaded_world()
    world.scraper.silent = {pod.name for pod in seen(world) if pod.role is Role.DECODE}
    run(world, turns=2)
    assert verdict(world.status, "MetricsAvailable")[0] == "True"
    run(world, turns=3)
    assert verdict(world.status, "MetricsAvailable")[1] == "PodsSilent"
    assert [i["reason"] for i in world.cluster.all(EVENT)].count("PodsSilent") == 1


def test_a_pod_whose_numbers_cannot_be_is_named_and_counted():
    world = loaded_world()
    plain, decode = world.scraper.scrape, [pod for pod in seen(world) if pod.role is Role.DECODE]

    async def scrape(pods):
        found = await plain(pods)
        strange = found[decode[0].uid]
        return found | {
            decode[0].uid: dataclasses.replace(
                strange, kv=dataclasses.replace(strange.kv, running=3 * strange.kv.capacity)
            ),
        }

    before = REGISTRY.get_sample_value("triptych_operator_bad_samples_total", {"reason": "absurd"})
    world.scraper.scrape = scrape
    run(world, turns=2)
    assert verdict(world.status, "MetricsAvailable")[0] == "True", "a moment is no news"
    run(world, turns=4)
    turned, reason, message = verdict(world.status, "MetricsAvailable")
    assert (turned, reason) == ("False", "ReportsInvalid")
    assert f"impossible numbers, first {decode[0].name}" in message
    after = REGISTRY.get_sample_value("triptych_operator_bad_samples_total", {"reason": "absurd"})
    assert after - (before or 0.0) == 6
