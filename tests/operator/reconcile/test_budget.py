"""State in, state out: what turns make of a budget and of node types."""

from typing import Any

from support.load import FAST, SLO, Loaded, auto, loaded_world, replicas, run, said
from support.world import World, body
from vlm_operator.cluster import VLM_NODE_CLASS


def gpu(count: int = 2) -> dict[str, Any]:
    return {
        "name": "gpu",
        "placement": {},
        "resources": {"limits": {"nvidia.com/gpu": str(count)}},
    }


def test_a_budget_below_the_least_replicas_refuses_the_manifest():
    world = World(
        body(
            {"slo": SLO, "budget": {"maxAccelerators": 3}},
            decode=auto(2, variants=[gpu()]),
        )
    )
    world.turn()
    accepted = world.condition("Accepted")
    assert accepted["status"] == "False"
    assert accepted["message"].startswith("spec.budget.maxAccelerators: 3 is less than the 4")


def test_a_budget_is_never_exceeded_and_the_status_says_what_it_allows():
    world = loaded_world({"budget": {"maxAccelerators": 4}}, decode=auto(variants=[gpu()]))
    world.scraper.tokens = 4000
    for _ in range(20):
        run(world, turns=1)
        assert world.status["accelerators"]["inUse"] <= 4
    assert replicas(world) == 2
    assert world.status["accelerators"] == {"inUse": 4, "limit": 4}
    assert world.condition("ScalingActive")["message"] == "decode is held at 2 by the budget"


def test_the_cheapest_node_type_is_taken_first_and_the_service_costs_what_its_pods_do():
    def variant(name: str) -> dict[str, Any]:
        return {"name": name, "nodeClassRef": {"name": name}, "maxReplicas": 2}

    world = World(
        body(
            {"slo": SLO, "autoscaling": FAST, "budget": {"currency": "EUR"}},
            decode=auto(variants=[variant("dear"), variant("cheap")]),
        )
    )
    for name, cost in (("dear", "3"), ("cheap", "1.5")):
        world.cluster.hardware(
            {
                "apiVersion": VLM_NODE_CLASS.api_version,
                "kind": VLM_NODE_CLASS.kind,
                "metadata": {"name": name},
                "spec": {"cost": {"perHour": cost}, "expectedStartupSeconds": 5},
            }
        )
    world.scraper = Loaded()
    world.loop = world.new_loop()
    world.converge()
    run(world, turns=8)  # a quiet minute, after which a step is no slope
    world.scraper.tokens = 2100
    run(world, turns=6)
    counts = {item["name"]: item["replicas"] for item in said(world)["variants"]}
    assert counts == {"cheap": 2, "dear": 1}
    assert world.status["cost"] == {"perHour": "6.00", "currency": "EUR"}
    assert world.status["summary"]["costPerHour"] == "6.00"
