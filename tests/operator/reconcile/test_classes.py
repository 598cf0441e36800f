"""What VLMNodeClasses are told of themselves, and what a service on them does and says."""

import asyncio
from typing import Any

from support.fakes import FakeCluster, run_controllers
from support.world import World, body, external, pool
from vlm_operator.cluster import DEPLOYMENT, NODE, POD, VLM_NODE_CLASS
from vlm_operator.reconcile.class_and_pool_status import NodeClassReconciler, NodeClassUsage
from vlm_operator.reconcile.service import ServiceReconciler
from vlm_operator.status.classes import ClassUse, Start

SPEC: dict[str, Any] = {
    "nodeSelector": {"type": "gpu"},
    "accelerator": {"resourceName": "nvidia.com/gpu", "count": 2},
    "cost": {"perHour": "1.50"},
}


def node_class(name: str = "gpu", **spec: Any) -> dict[str, Any]:
    head = {"apiVersion": VLM_NODE_CLASS.api_version, "kind": VLM_NODE_CLASS.kind}
    return {**head, "metadata": {"name": name}, "spec": {**SPEC, **spec}}


def plant_node(cluster: FakeCluster, name: str, *, ready: bool = True, **labels: str) -> None:
    cluster.hardware(
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
    )

    def change(item: dict[str, Any]) -> None:
        condition = {"type": "Ready", "status": "True" if ready else "False"}
        item["status"] = {"allocatable": {"nvidia.com/gpu": "4"}, "conditions": [condition]}

    cluster.edit(NODE, "", name, change)


class Classes:
    """A world with the loop of its node classes beside the service's."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.book = NodeClassUsage()
        self.changes = 0
        world.loop = ServiceReconciler(
            "ns",
            "demo",
            cluster=world.cluster,
            scraper=world.scraper,
            options=world.options,
            clock=world.cluster.clock,
            book=self.book,
        )
        self.loop = NodeClassReconciler(
            world.cluster, self.book, clock=world.cluster.clock, changed=self._changed
        )

    def _changed(self) -> None:
        self.changes += 1

    def turn(self) -> dict[str, Any]:
        asyncio.run(self.loop.turn())
        found: dict[str, Any] = self.world.cluster.all(VLM_NODE_CLASS)[0].get("status", {})
        return found


def on_class(name: str = "gpu", **more: Any) -> dict[str, Any]:
    return pool(variants=[{"name": "fast", "nodeClassRef": {"name": name}}], **more)


def test_a_class_counts_its_nodes_their_capacity_and_their_pods():
    world = World(body(decode=on_class()))
    world.cluster.hardware(node_class())
    plant_node(world.cluster, "a", type="gpu")
    plant_node(world.cluster, "b", type="gpu", ready=False)
    plant_node(world.cluster, "c", type="cpu")
    classes = Classes(world)
    world.turn()
    for _ in range(3):
        run_controllers(world.cluster)
        world.turn(seconds=20)
    status = classes.turn()
    assert (status["nodes"], status["allocatable"], status["inUse"]) == (2, 2, 1)
    assert status["measuredStartupP90Seconds"] == 20
    assert status["conditions"][0]["status"] == "True"


def test_a_class_that_did_not_change_is_not_written():
    world = World(body(decode=on_class()))
    world.cluster.hardware(node_class())
    classes = Classes(world)
    world.converge()
    classes.turn()
    world.turn()  # the service tells how long starts were measured to take
    before = world.written()
    for _ in range(5):
        world.turn(seconds=5)
        classes.turn()
    assert world.written() == before


def test_two_operators_each_write_their_own_use_and_then_are_still():
    """Scoped ones, of different namespaces: the class is the cluster's, the numbers are theirs."""
    cluster = FakeCluster()
    cluster.hardware(node_class())
    plant_node(cluster, "a", type="gpu")
    books = {name: NodeClassUsage() for name in ("red/op", "blue/op")}
    loops = [
        NodeClassReconciler(cluster, book, clock=cluster.clock, changed=lambda: None, operator=name)
        for name, book in books.items()
    ]

    def turn(times: int = 1) -> dict[str, Any]:
        for _ in range(times):
            for loop in loops:
                asyncio.run(loop.turn())
        found: dict[str, Any] = cluster.all(VLM_NODE_CLASS)[0]["status"]
        return found

    start = Start("pod", 0.0, 40.0)
    books["red/op"].note(("red", "a"), {"gpu": ClassUse(1, (start,))})
    books["blue/op"].note(("blue", "b"), {"gpu": ClassUse(2)})
    status = turn(2)
    assert {item["operator"]: item["replicas"] for item in status["usage"]} == {
        "red/op": 1,
        "blue/op": 2,
    }
    assert (status["inUse"], status["measuredStartupP90Seconds"]) == (3, 40)
    before = len(cluster.writes)
    turn(5)
    assert len(cluster.writes) == before, "neither writes over the other"
    books["blue/op"].forget(("blue", "b"))
    status = turn(2)
    assert [item["operator"] for item in status["usage"]] == ["red/op"]
    assert status["inUse"] == 1


def test_a_class_without_nodes_says_so_and_keeps_what_was_measured():
    world = World()
    world.cluster.hardware(node_class())
    world.cluster.edit(
        VLM_NODE_CLASS,
        "",
        "gpu",
        lambda item: item.update(status={"measuredStartupP90Seconds": 40}),
    )
    status = Classes(world).turn()
    assert status["conditions"][0]["message"] == "no node has type=gpu"
    assert status["measuredStartupP90Seconds"] == 40


def test_services_are_woken_when_a_class_says_something_else():
    world = World()
    classes = Classes(world)
    asyncio.run(classes.loop.turn())
    world.cluster.hardware(node_class())
    classes.turn()
    assert classes.changes == 1
    classes.turn()
    assert classes.changes == 1, "its own status wakes nobody"


def test_pods_run_where_the_class_says_and_the_status_knows_their_cost():
    world = World(body(decode=on_class()))
    world.cluster.hardware(node_class(tolerations=[{"key": "gpu", "operator": "Exists"}]))
    world.converge()
    spec = next(
        item["spec"]["template"]["spec"]
        for item in world.cluster.all(DEPLOYMENT)
        if "-decode-" in item["metadata"]["name"]
    )
    assert spec["nodeSelector"] == {"type": "gpu"}
    assert spec["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert spec["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    (variant,) = world.status["pools"]["decode"]["variants"]
    assert (variant["nodeClass"], variant["costPerHour"]) == ("gpu", "1.50")
    assert world.status["accelerators"] == {"inUse": 2}


def test_a_class_that_is_missing_refuses_the_manifest_until_it_is_there():
    world = World(body(decode=on_class("h100")))
    world.turn()
    accepted = world.condition("Accepted")
    assert accepted["status"] == "False"
    assert "VLMNodeClass h100 does not exist: create it" in accepted["message"]
    assert world.cluster.all(DEPLOYMENT) == []
    world.cluster.hardware(node_class("h100"))
    world.converge()
    assert world.condition("Accepted")["status"] == "True"
    assert world.condition("Ready")["status"] == "True"


def test_a_missing_class_needs_a_person_after_a_minute_though_other_classes_appear():
    world = World(body(decode=on_class("h100")))
    for number in range(6):
        world.turn(seconds=10)
        assert world.condition("Stalled")["status"] == "False"
        world.cluster.hardware(node_class(f"other-{number}"))
    world.turn(seconds=10)
    assert world.condition("Stalled")["status"] == "True"
    assert world.condition("Stalled")["reason"] == "NodeClassInvalid"


def test_what_serves_goes_on_while_its_class_is_gone_and_a_new_pod_still_takes_work():
    world = World(body(decode=external(1, 4, variants=on_class()["variants"])))
    world.cluster.hardware(node_class())
    world.converge()
    world.cluster.remove(VLM_NODE_CLASS, "", "gpu")
    pods = [
        item["metadata"]["name"]
        for item in world.cluster.all(POD)
        if item["metadata"]["labels"]["triptych.dev/role"] == "decode"
    ]
    world.turn()
    assert world.condition("Accepted")["status"] == "False"
    world.cluster.remove(POD, "ns", pods[0])
    for _ in range(3):
        run_controllers(world.cluster)
        world.turn()
    ready = [
        condition["status"]
        for item in world.cluster.all(POD)
        if item["metadata"]["labels"]["triptych.dev/role"] == "decode"
        for condition in item["status"]["conditions"]
        if condition["type"] == "Ready"
    ]
    assert ready == ["True"]
