"""Types of simulated nodes, and their Node objects."""

import dataclasses
import platform
from collections.abc import Mapping
from typing import Any

from vlm_operator import names

SIMULATED = "true"
STATUS_ONLY = "status-only"


@dataclasses.dataclass(frozen=True)
class NodeType:
    """A type of node and the number of its nodes.

    Attributes:
        name: of the type; the nodes are `<name>-0`, `<name>-1`, …, a single one is `<name>`.
        labels: additional labels of each node.
        extended: extended resources, such as `{"nvidia.com/gpu": 4}`; no device exists.
        status_only: whether a script writes the status of its pods, and no process runs.
    """

    name: str
    cpu: str = "64"
    memory: str = "256Gi"
    count: int = 1
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)
    taints: tuple[Mapping[str, str], ...] = ()
    extended: Mapping[str, int] = dataclasses.field(default_factory=dict)
    status_only: bool = False

    @property
    def nodes(self) -> list[str]:
        if self.count == 1:
            return [self.name]
        return [f"{self.name}-{index}" for index in range(self.count)]


# The numbers are large: only the scheduler uses them. The real limit is this machine.
DEMO_NODE_TYPES = (
    NodeType("cpu-large"),
    NodeType("gpu-compute", extended={"nvidia.com/gpu": 4}),
    NodeType("gpu-memory", extended={"nvidia.com/gpu": 4}),
)


def node_object(node_type: NodeType, name: str, version: str) -> dict[str, Any]:
    """Return the Node to register."""
    labels = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": _architecture(),
        names.LABEL_NODE_TYPE: node_type.name,
        names.LABEL_SIMULATED: STATUS_ONLY if node_type.status_only else SIMULATED,
        # as NVIDIA's GPU feature discovery labels a node
        **({"nvidia.com/gpu.present": "true"} if "nvidia.com/gpu" in node_type.extended else {}),
        **node_type.labels,
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels},
        "spec": {"taints": [dict(taint) for taint in node_type.taints]},
        "status": {"nodeInfo": _node_info(version)},
    }


def node_status(
    node_type: NodeType, *, address: str, port: int, now: str, transition: str, version: str
) -> dict[str, Any]:
    """Return the status of a healthy node, with its resources.

    `address` and `port` are those of its kubelet API. `now`, the heartbeat, and `transition`, the
    last change, are times of RFC 3339.
    """
    resources = {
        "cpu": node_type.cpu,
        "memory": node_type.memory,
        "ephemeral-storage": "100Gi",
        "pods": "10000" if node_type.status_only else "110",
        **{name: str(count) for name, count in node_type.extended.items()},
    }
    return {
        "capacity": resources,
        "allocatable": resources,
        "addresses": [{"type": "InternalIP", "address": address}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": port}},
        "nodeInfo": _node_info(version),
        "conditions": [
            _condition("Ready", "True", "KubeletReady", now, transition),
            _condition("MemoryPressure", "False", "KubeletHasSufficientMemory", now, transition),
            _condition("DiskPressure", "False", "KubeletHasNoDiskPressure", now, transition),
            _condition("PIDPressure", "False", "KubeletHasSufficientPID", now, transition),
        ],
    }


def is_ready(node: Mapping[str, Any]) -> bool:
    """Whether the condition Ready of a Node is True."""
    conditions = node.get("status", {}).get("conditions") or []
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def _condition(kind: str, status: str, reason: str, now: str, transition: str) -> dict[str, str]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": "simulated node: its pods are processes of this machine",
        "lastHeartbeatTime": now,
        "lastTransitionTime": transition,
    }


def _architecture() -> str:
    """Return this machine's architecture, as Go and Kubernetes name it."""
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)


def _node_info(version: str) -> dict[str, str]:
    return {
        "architecture": _architecture(),
        "operatingSystem": "linux",
        "osImage": "simulated",
        "kernelVersion": "simulated",
        "machineID": "simulated",
        "systemUUID": "simulated",
        "bootID": "simulated",
        "containerRuntimeVersion": "process://1",
        "kubeletVersion": version,
        "kubeProxyVersion": "",
    }
