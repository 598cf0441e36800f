"""A service's metrics follow its pods, its node classes, its targets and its decisions."""

from typing import Any

from support.fakes import run_controllers
from support.load import FAST, SLO, auto, loaded_world, run
from support.world import World, body, pool
from vlm_operator.cluster import VLM_NODE_CLASS
from vlm_operator.metrics import REGISTRY, forget

CLASS: dict[str, Any] = {
    "apiVersion": VLM_NODE_CLASS.api_version,
    "kind": VLM_NODE_CLASS.kind,
    "metadata": {"name": "gpu"},
    "spec": {
        "nodeSelector": {"type": "gpu"},
        "accelerator": {"resourceName": "nvidia.com/gpu", "count": 2},
        "cost": {"perHour": "1.50"},
    },
}


def sample(name: str, **labels: str) -> float | None:
    """The value of one series of the service; None if there is none."""
    service = {"namespace": "ns", "service": "demo"}
    return REGISTRY.get_sample_value(f"triptych_{name}", {**service, **labels})


def test_cost_and_accelerators_are_those_of_the_pools_pods():
    variants = [
        {
            "name": "fast",
            "nodeClassRef": {"name": "gpu"},
            "resources": {"limits": {"nvidia.com/gpu": "2"}},
        }
    ]
    world = World(body(encoder=pool(), decode=pool(2, variants=variants)))
    world.cluster.hardware(CLASS)
    for _ in range(4):
        world.turn(seconds=20)
        run_controllers(world.cluster)
    world.turn()
    assert sample("cost_per_hour", role="decode") == 3.0
    assert sample("accelerators", role="decode") == 4
    assert sample("accelerators", role="encoder") == 0
    assert sample("cost_per_hour", role="encoder") is None, "no node class, no known cost"


def test_the_targets_are_those_of_the_manifest_and_end_with_it():
    video = {"modality": "Video", "ttftP95Milliseconds": 4000}
    world = World(body({"slo": {**SLO, "itlP95Milliseconds": 40, "overrides": [video]}}))
    world.turn()
    assert sample("itl_target_seconds") == 0.04
    assert sample("ttft_target_seconds", modality="image") == 1.0
    assert sample("ttft_target_seconds", modality="video") == 4.0
    world.apply(body({"slo": SLO}))
    world.turn()
    assert sample("ttft_target_seconds", modality="text") == 1.0
    assert sample("ttft_target_seconds", modality="video") is None
    assert sample("itl_target_seconds") is None


def test_the_bound_of_the_last_decision_is_the_only_one_shown():
    world = loaded_world({"autoscaling": FAST}, decode=auto(1, 2))
    world.scraper.tokens = 1900
    run(world, turns=8)
    assert sample("scale_limited", role="decode", bound="Max") == 1
    world.scraper.tokens = 0
    run(world, turns=40)
    assert sample("scale_limited", role="decode", bound="Max") is None


def test_a_pool_that_is_removed_leaves_no_series():
    world = World(body(encoder=pool(), decode=pool()))
    world.turn()
    assert sample("desired_replicas", role="encoder") == 1
    world.apply(body(decode=pool()))
    world.turn()
    labels = [
        series.labels
        for metric in REGISTRY.collect()
        for series in metric.samples
        if series.labels.get("service") == "demo"
    ]
    assert [found for found in labels if found.get("role") == "encoder"] == []
    assert sample("desired_replicas", role="decode") == 1


def test_a_deleted_service_leaves_no_series():
    World(body({"slo": SLO})).turn()
    forget("ns", "demo")
    text = [one for family in REGISTRY.collect() for one in family.samples]
    assert not [one for one in text if one.labels.get("service") == "demo"]


def test_a_stalled_service_is_counted_until_it_goes_on():
    world = World(body(decode=pool()))
    world.converge()
    assert sample("stalled") == 0
    world.apply(body({"slo": {"itlP95Milliseconds": 0}}, decode=pool()))  # as an older CRD let in
    world.turn()
    assert world.condition("Stalled")["status"] == "True"
    assert sample("stalled") == 1
    world.apply(body(decode=pool()))
    world.converge()
    assert sample("stalled") == 0
    forget("ns", "demo")
    assert sample("stalled") is None
