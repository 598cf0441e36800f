"""Nodes offer the resources of their type; status-only nodes have pods without processes."""

import asyncio
from pathlib import Path

import pytest

from vlm_local.agent.nodes import NodeType, is_ready
from vlm_local.client import STRATEGIC, Client
from vlm_local.cluster import NodeAgent
from vlm_local.controlplane import ControlPlane
from vlm_local.waiting import until

from .pods import Pods, condition, pod

pytestmark = pytest.mark.cluster
FOREVER = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit(0)); signal.pause()"
TAINT = {"key": "dedicated", "value": "test", "effect": "NoSchedule"}
TOLERATION = {"key": "dedicated", "operator": "Exists"}


async def test_a_node_offers_simulated_gpus_and_says_so(api: Client):
    node = await api.get("/api/v1/nodes/gpu-compute")
    assert node["status"]["allocatable"]["nvidia.com/gpu"] == "4"
    assert node["metadata"]["labels"]["triptych.dev/simulated"] == "true"
    assert node["metadata"]["labels"]["triptych.dev/node-type"] == "gpu-compute"
    assert node["metadata"]["labels"]["nvidia.com/gpu.present"] == "true"
    plain = await api.get("/api/v1/nodes/cpu-large")
    assert "nvidia.com/gpu.present" not in plain["metadata"]["labels"]
    assert "simulated" in condition(node, "Ready")["message"]


async def test_a_node_that_was_given_up_is_ready_again_by_itself(api: Client):
    node = "/api/v1/nodes/gpu-memory"
    given_up = {"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}
    status = {"status": {"conditions": [given_up]}}
    assert not is_ready(await api.patch(f"{node}/status", status, kind=STRATEGIC))

    async def takes_pods() -> bool:
        seen = await api.get(node)
        return is_ready(seen) and not seen["spec"].get("taints")

    await until(takes_pods, seconds=30, awaited="gpu-memory to be ready again")


async def test_extended_resources_are_counted(pods: Pods):
    for number in range(2):
        limits = {"limits": {"nvidia.com/gpu": "3"}}
        spec = {"nodeSelector": {"triptych.dev/node-type": "gpu-memory"}}
        await pods.create(pod(f"p{number}", FOREVER, resources=limits, spec=spec))

    async def one_waits() -> bool:
        listed = (await pods.api.get(pods.path))["items"]
        states = [condition(one, "PodScheduled").get("status") for one in listed]
        return sorted(map(str, states)) == ["False", "True"]

    await until(one_waits, seconds=10, awaited="one of two pods to find no GPU")


async def test_a_thousand_pods_can_be_played_without_a_process(
    cluster: ControlPlane, pods: Pods, tmp_path: Path
):
    kinds = [NodeType("played", status_only=True, count=2, taints=(TAINT,))]
    async with NodeAgent(cluster, node_types=kinds, name="played"):
        nodes = await pods.api.get("/api/v1/nodes", labelSelector="triptych.dev/node-type=played")
        assert len(nodes["items"]) == 2
        template = pod("ignored", "")["spec"] | {
            "tolerations": [TOLERATION],
            "nodeSelector": {"triptych.dev/simulated": "status-only"},
        }
        labels = {"app": "played"}
        deployment = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": {"name": "played"},
            "spec": {
                "replicas": 100,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": _plain(template)},
            },
        }
        space = pods.path.removeprefix("/api/v1").removesuffix("pods")
        path = f"/apis/apps/v1{space}replicasets"
        await pods.api.create(path, deployment)

        async def all_ready() -> bool:
            return (await pods.api.get(f"{path}/played"))["status"].get("readyReplicas") == 100

        await until(all_ready, seconds=30, awaited="100 pods to be played")
        await pods.api.delete(f"{path}/played", {"propagationPolicy": "Background"})

        async def none() -> bool:
            return not (await pods.api.get(pods.path))["items"]

        await until(none, seconds=30, awaited="them to end")
    for node in nodes["items"]:
        await pods.api.delete(f"/api/v1/nodes/{node['metadata']['name']}")


async def test_a_played_pod_takes_its_time_and_may_fail(cluster: ControlPlane, pods: Pods):
    kinds = [NodeType("slow", status_only=True, taints=(TAINT,))]
    async with NodeAgent(cluster, node_types=kinds, name="slow"):
        for name, annotations in (
            ("late", {"triptych.dev/simulated-start-seconds": "1"}),
            ("failing", {"triptych.dev/simulated-exit-code": "3"}),
        ):
            spec = {"tolerations": [TOLERATION], "nodeName": "slow", "restartPolicy": "Never"}
            body = pod(name, "", spec=spec)
            body["metadata"]["annotations"] = annotations
            await pods.create(body)
        failed = await pods.until_phase("failing", "Failed")
        state = failed["status"]["containerStatuses"][0]["state"]
        assert state["terminated"]["exitCode"] == 3
        late = await pods.until_condition("late", "Ready", "True")
        started = late["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]
        assert started > late["status"]["startTime"]
        for name in ("late", "failing"):
            await pods.delete(name)
            await pods.until_gone(name)
    await pods.api.delete("/api/v1/nodes/slow")


async def test_the_agent_uses_no_right_that_a_node_does_not_have(cluster: ControlPlane):
    entries, _ = await asyncio.to_thread(cluster.audited)
    refused = [
        (entry["verb"], entry["requestURI"])
        for entry in entries
        if entry["user"].get("username", "").startswith("system:node:")
        and entry["annotations"].get("authorization.k8s.io/decision") == "forbid"
        # the authorizer learns of a pod moments after the node does
        and entry["objectRef"]["resource"] not in ("secrets", "configmaps", "serviceaccounts")
        and entry["objectRef"]["resource"] not in ("persistentvolumeclaims", "persistentvolumes")
    ]
    assert refused == []


def _plain(spec: dict) -> dict:
    """A template's spec: what a ReplicaSet does not take is left out."""
    return {name: value for name, value in spec.items() if name != "restartPolicy"}
