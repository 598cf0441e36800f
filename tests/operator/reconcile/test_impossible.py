"""What only the cluster knows is impossible: one condition, one sentence, what to do; no clamp."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from support.load import SLO, auto, loaded_world, replicas, run
from support.world import World, body, pool
from vlm_operator.cluster import DEPLOYMENT, VLM_NODE_CLASS, VLM_POOL, Manifest


@dataclasses.dataclass(frozen=True)
class Case:
    """A service, a node class (None for none), and what the operator answers."""

    manifest: Manifest
    node_class: dict[str, Any] | None
    field: str
    do: str


def on(name: str, **scaling: Any) -> dict[str, Any]:
    return {**pool(2), **scaling, "variants": [{"name": "v", "nodeClassRef": {"name": name}}]}


GPU = {"accelerator": {"resourceName": "nvidia.com/gpu", "count": 2}, "cost": {"perHour": "3"}}
CASES = {
    "a node class that is missing": Case(
        body(decode=on("none")), GPU, "spec.pools.decode.variants[v].nodeClassRef", "create it"
    ),
    "a role that the class does not take": Case(
        body(decode=on("gpu")),
        {**GPU, "roles": ["encoder"]},
        "spec.pools.decode.variants[v].nodeClassRef",
        "choose another class",
    ),
    "fewer devices than the least replicas hold": Case(
        body({"budget": {"maxAccelerators": 3}}, decode=on("gpu")),
        GPU,
        "spec.budget.maxAccelerators",
        "raise it, or lower minReplicas",
    ),
    "less money than the least replicas cost": Case(
        body({"budget": {"maxCostPerHour": "5.99"}}, decode=on("gpu")),
        GPU,
        "spec.budget.maxCostPerHour",
        "raise it, or lower minReplicas",
    ),
}


def world(case: Case) -> World:
    found = World(case.manifest)
    if case.node_class is not None:
        hardware(found, case.node_class)
    return found


def hardware(found: World, spec: dict[str, Any]) -> None:
    head = {"apiVersion": VLM_NODE_CLASS.api_version, "kind": VLM_NODE_CLASS.kind}
    found.cluster.hardware({**head, "metadata": {"name": "gpu"}, "spec": spec})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_is_one_sentence_with_the_field_and_the_fix_and_nothing_is_made(case: Case):
    found = world(case)
    found.turn()
    accepted = found.condition("Accepted")
    reason = "NodeClassInvalid" if case.field.endswith("nodeClassRef") else "SpecInvalid"
    assert (accepted["status"], accepted["reason"]) == ("False", reason)
    assert accepted["message"].startswith(f"{case.field}: ")
    assert accepted["message"].endswith(case.do)
    assert "\n" not in accepted["message"]
    # not clamped to what would be possible: nothing at all
    assert found.cluster.all(DEPLOYMENT) == found.cluster.all(VLM_POOL) == []


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_already_runs_goes_on_and_a_refusal_is_written_once(case: Case):
    found = World(body(decode=pool(2)))
    found.converge()
    before = found.deployments()
    if case.node_class is not None:
        hardware(found, case.node_class)
    found.apply(case.manifest)
    found.turn()
    assert found.condition("Accepted")["status"] == "False"
    assert found.deployments() == before
    assert found.condition("Ready")["status"] == "True", "what served before serves on"
    found.turn(seconds=61)
    assert found.condition("Stalled")["status"] == "True"
    written = found.written()
    for _ in range(3):
        found.turn(seconds=60)
    assert found.written() == written


def test_a_cost_that_nobody_said_holds_growth_and_says_which():
    found = loaded_world(
        {"slo": SLO, "budget": {"maxCostPerHour": "24"}},
        decode=auto(variants=[{"name": "v", "nodeClassRef": {"name": "gpu"}}]),
    )
    hardware(found, {"accelerator": GPU["accelerator"]})
    found.scraper.tokens = 4000
    run(found, turns=20)
    assert replicas(found) == 1
    message = found.condition("ScalingActive")["message"]
    assert "nothing grows, the budget cannot be kept: the cost of decode variant v is unknown" in (
        message
    )
    found.cluster.edit(VLM_NODE_CLASS, "", "gpu", lambda item: item.update(spec=GPU))
    run(found, turns=20)
    assert replicas(found) > 1, "the same load grows the pool once the cost is known"
