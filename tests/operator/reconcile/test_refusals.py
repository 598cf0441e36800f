"""What is refused waits for its own next try; what was accepted before goes on meanwhile."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.fakes import FakeCluster, run_controllers
from support.world import World, body, empty, external, pool
from vlm_operator import names
from vlm_operator.cluster import (
    CONFIG_MAP,
    DEPLOYMENT,
    SERVICE,
    VLM_NODE_CLASS,
    VLM_POOL,
    VLM_SERVICE,
    Kind,
    Manifest,
)
from vlm_operator.errors import ClusterError
from vlm_operator.reconcile.accepted_spec import AcceptedSpec
from vlm_operator.reconcile.retries import CHILD, Retries
from vlm_operator.state import NodeClassState
from vlm_operator.status.inputs import Failure

GPU = {"nodeSelector": {"type": "gpu"}}
REFUSED = {"decode": {"scaling": {"mode": "Manual", "replicas": 2}, "variants": [
    {"name": "v", "nodeClassRef": {"name": "none"}}
]}}  # fmt: skip


def on_class(minimum: int = 1) -> dict[str, Any]:
    return external(minimum, 8, variants=[{"name": "v", "nodeClassRef": {"name": "gpu"}}])


def plant_class(world: World) -> None:
    head = {"apiVersion": VLM_NODE_CLASS.api_version, "kind": VLM_NODE_CLASS.kind}
    world.cluster.hardware({**head, "metadata": {"name": "gpu"}, "spec": GPU})


def scale(world: World, replicas: int) -> None:
    def change(item: Manifest) -> None:
        item["spec"]["replicas"] = replicas

    world.cluster.edit(VLM_POOL, "ns", "demo-decode", change)


def turns(world: World, count: int = 8) -> None:
    for _ in range(count):
        world.turn(seconds=3.0)
        run_controllers(world.cluster, start=True)


def decode_replicas(world: World) -> int:
    return sum(
        item["spec"]["replicas"]
        for item in world.cluster.all(DEPLOYMENT)
        if item["metadata"]["name"].startswith("demo-decode")
    )


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("cause", ["class deleted", "spec refused"])
def test_scaling_and_repair_go_on_while_the_manifest_is_refused(cause: str, restarted: bool):
    world = World(body(decode=on_class()))
    plant_class(world)
    turns(world)
    assert decode_replicas(world) == 1
    if cause == "class deleted":
        world.cluster.remove(VLM_NODE_CLASS, "", "gpu")
    else:
        world.apply(body(**REFUSED))
    if restarted:
        world.loop = world.new_loop()
    scale(world, 3)
    world.cluster.remove(SERVICE, "ns", "demo-gateway")
    turns(world)
    assert decode_replicas(world) == 3
    assert "demo-gateway" in [item["metadata"]["name"] for item in world.cluster.all(SERVICE)]
    accepted = world.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "NodeClassInvalid")
    assert "spec.pools.decode.variants[v].nodeClassRef" in accepted["message"]
    generation = world.cluster.all(VLM_SERVICE)[0]["metadata"]["generation"]
    assert world.status["observedGeneration"] == generation


def test_a_manifest_that_is_right_again_is_acted_on():
    world = World(body(decode=on_class()))
    plant_class(world)
    turns(world)
    world.apply(body(**REFUSED))
    turns(world, 2)
    world.apply(body(decode=on_class(minimum=2)))
    turns(world)
    assert decode_replicas(world) == 2
    assert world.condition("Accepted")["status"] == "True"


class Refusing(FakeCluster):
    """An API server that takes no Deployment with a certain argument."""

    async def apply(
        self, manifest: Manifest, *, manager: str, subresource: str = "", dry_run: bool = False
    ) -> Manifest:
        if manifest["kind"] == DEPLOYMENT.kind and "--refused=1" in str(manifest):
            raise ClusterError(422, "Invalid", "spec.template: Invalid value")
        return await super().apply(
            manifest, manager=manager, subresource=subresource, dry_run=dry_run
        )


def test_a_template_that_the_api_server_refuses_does_not_stop_scaling():
    world = World()
    world.cluster = Refusing()
    world.apply(body(decode=external(1, 8)))
    world.loop = world.new_loop()
    turns(world)
    world.apply(body(decode=external(1, 8, engine={"extraArgs": ["--refused=1"]})))
    turns(world, 2)
    assert world.condition("Accepted")["reason"] == "PodTemplateRefused"
    scale(world, 3)
    turns(world)
    assert decode_replicas(world) == 3
    assert world.condition("Accepted")["reason"] == "PodTemplateRefused"


def test_an_accepted_manifest_is_kept_once():
    world = World(body(decode=pool(2)))
    world.converge()
    before = world.written()
    turns(world, 5)
    assert world.written() == before
    kept = [item["metadata"]["name"] for item in world.cluster.all(CONFIG_MAP)]
    assert "demo-state" in kept


def kept(world: World) -> dict[str, str]:
    found = world.cluster.all(CONFIG_MAP)
    (data,) = [item["data"] for item in found if item["metadata"]["name"] == "demo-state"]
    return data


@pytest.mark.parametrize("change", ["edited", "removed", "class", "spec"])
def test_a_kept_manifest_is_written_anew_once_it_is_another_one(change: str):
    world = World(body(decode=on_class()))
    plant_class(world)
    turns(world)
    before = kept(world)
    if change == "edited":
        data = {"accepted.json": "{}"}
        world.cluster.edit(CONFIG_MAP, "ns", "demo-state", lambda item: item.update(data=data))
    elif change == "removed":
        world.cluster.remove(CONFIG_MAP, "ns", "demo-state")
    elif change == "class":
        world.cluster.edit(VLM_NODE_CLASS, "", "gpu", lambda item: item["spec"].update(spot=True))
    else:
        world.apply(body(decode=on_class(minimum=2)))
    turns(world, 3)
    same = kept(world)["accepted.json"] == before["accepted.json"]
    assert same is (change in ("edited", "removed"))
    accepted = json.loads(kept(world)["accepted.json"])
    assert accepted["classes"]["gpu"]["spot"] is (change == "class")
    least = accepted["spec"]["pools"]["decode"]["scaling"]["minReplicas"]
    assert least == (2 if change == "spec" else 1)


class RefusingClaims(FakeCluster):
    """An API server whose webhook takes no number of a VLMPool; it counts the tries."""

    def __init__(self) -> None:
        super().__init__()
        self.tries = 0
        self.refuses = True

    async def apply(
        self, manifest: Manifest, *, manager: str, subresource: str = "", dry_run: bool = False
    ) -> Manifest:
        if self.refuses and manager == names.MANAGER_AUTOSCALER and manifest["kind"] == "VLMPool":
            self.tries += 1
            raise ClusterError(403, "Forbidden", "a webhook denied the request")
        return await super().apply(
            manifest, manager=manager, subresource=subresource, dry_run=dry_run
        )


def test_a_refused_number_of_a_pool_is_tried_ever_more_rarely_and_slows_nothing():
    world = World(body(decode=external(1, 8)))
    world.cluster = RefusingClaims()
    world.apply(body(decode=external(1, 8)))
    world.loop = world.new_loop()
    seconds = [world.turn(seconds=1.0) for _ in range(60)]
    assert max(seconds) < 60.0, "the loop keeps its own pace"
    assert 3 <= world.cluster.tries <= 8
    stalled = world.condition("Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "ChildRefused")
    assert "VLMPool demo-decode: Forbidden: a webhook denied the request" in stalled["message"]
    assert decode_replicas(world) == 1, "the rest of the plan is carried out"
    world.cluster.refuses = False
    for _ in range(90):
        world.turn(seconds=1.0)
    assert world.condition("Stalled")["status"] == "False"
    assert [item["metadata"]["name"] for item in world.cluster.all(VLM_POOL)] == ["demo-decode"]


def test_a_stored_manifest_that_cannot_be_read_is_ignored():
    world = World(body())
    world.converge()
    world.cluster.edit(CONFIG_MAP, "ns", "demo-state", lambda item: item.update(data={"x": "{"}))
    world.apply(body(**REFUSED))
    turns(world, 3)
    assert world.condition("Accepted")["reason"] == "NodeClassInvalid"


def test_node_classes_are_restored_unchanged():
    classes = {"gpu": NodeClassState("gpu", {"a": "b"}, ({"key": "k"},), "nvidia.com/gpu", 2, 1.5)}
    kept = AcceptedSpec({"model": {"uri": "pvc://x"}}, classes)
    world = World(body())
    world.converge()
    data = {"accepted.json": kept.dump()}
    world.cluster.edit(CONFIG_MAP, "ns", "demo-state", lambda item: item.update(data=data))
    found = {
        (item["kind"], item["metadata"]["name"]): item for item in world.cluster.all(CONFIG_MAP)
    }
    observed = dataclasses.replace(empty(), children=found)
    assert AcceptedSpec.stored(observed, "demo") == kept


class Counting(FakeCluster):
    """Counts reads of single objects."""

    def __init__(self) -> None:
        super().__init__()
        self.gets: Counter[str] = Counter()

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        self.gets[f"{kind.kind} {name}"] += 1
        return await super().get(kind, namespace, name)


def test_a_foreign_object_of_a_childs_name_slows_nothing_and_is_tried_ever_more_rarely():
    world = World(body(decode=external(1, 8)))
    world.cluster = Counting()
    world.apply(body(decode=external(1, 8)))
    world.cluster.hardware(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "demo-gateway", "namespace": "ns"},
            "spec": {},
        }
    )
    world.loop = world.new_loop()
    turns(world)
    world.cluster.gets.clear()
    pauses = []
    for _ in range(60):
        pauses.append(world.turn(seconds=1.0))
        run_controllers(world.cluster, start=True)
    assert max(pauses) < 60.0, "the loop keeps its own pace"
    assert 0 < world.cluster.gets["Service demo-gateway"] <= 8
    failures = [item["reason"] for item in world.status["conditions"]]
    assert "NameConflict" in failures
    scale(world, 3)
    turns(world)
    assert decode_replicas(world) == 3
    world.cluster.remove(SERVICE, "ns", "demo-gateway")
    for _ in range(100):
        world.turn(seconds=1.0)
    assert "NameConflict" not in [item["reason"] for item in world.status["conditions"]]


@given(st.lists(st.floats(0.1, 30.0), min_size=1, max_size=40))
def test_a_refusal_is_tried_again_in_bounded_time_and_another_wish_at_once(steps: list[float]):
    retries, now = Retries(), 0.0
    retries.begin(1)
    failure = Failure("Refused", "no")
    last = 0.0
    for step in steps:
        if retries.held("a", 1, now=now) is None:
            retries.failed("a", 1, failure, backoff=CHILD, now=now)
            last = now
        assert retries.held("a", 2, now=now) is None
        assert now - last <= CHILD.longest * 1.3
        now += step
    retries.begin(2)
    assert retries.held("a", 1, now=last) is None
