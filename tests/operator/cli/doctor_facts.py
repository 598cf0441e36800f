"""A healthy cluster as facts, and its objects one by one, for the checks of `vlm doctor`."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import pathlib
from typing import Any

import yaml

from support.world import body, pool
from vlm_cli.definitions import KINDS, crd
from vlm_cli.doctor.command import examine
from vlm_cli.doctor.facts import (
    AUTOSCALER,
    CLAIM,
    CRD,
    ENDPOINT_SLICE,
    GLOBAL,
    LOCAL,
    NAMESPACE,
    Facts,
    Finding,
    Installation,
    Level,
)
from vlm_cli.doctor.rights import OF_CLUSTER, OF_NAMESPACES, OF_USERS, of_lease
from vlm_operator import names
from vlm_operator.cluster import (
    DEPLOYMENT,
    LEASE,
    NETWORK_POLICY,
    NODE,
    POD,
    ROLE,
    VLM_NODE_CLASS,
    VLM_POOL,
    VLM_SERVICE,
)

ROOT = pathlib.Path(__file__).parents[3]
INSTALLED = [item for item in yaml.safe_load_all((ROOT / "install.yaml").read_text()) if item]
DEFINITIONS = [crd(kind) for kind in KINDS]
NOW = 1_800_000_000.0
GPU = "nvidia.com/gpu"

Objects = dict[str, list[dict[str, Any]]]


def installed(kind: str, name: str) -> dict[str, Any]:
    found = [i for i in INSTALLED if (i["kind"], i["metadata"]["name"]) == (kind, name)]
    return copy.deepcopy(found[0])


def deployment() -> dict[str, Any]:
    return {**installed("Deployment", "triptych-operator"), "status": {"readyReplicas": 1}}


def lease(holder: str = "pod-1", ago: float = 3.0) -> dict[str, Any]:
    renewed = datetime.datetime.fromtimestamp(NOW - ago, datetime.UTC)
    return {
        "metadata": {"name": "triptych-operator", "namespace": "triptych-system"},
        "spec": {
            "holderIdentity": holder,
            "leaseDurationSeconds": 15,
            "renewTime": renewed.isoformat(),
        },
    }


def node(name: str = "n1", **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "allocatable": {GPU: "2"},
        },
    }


def service(*conditions: tuple[str, str, str, str]) -> dict[str, Any]:
    place = {"nodeClassRef": {"name": "fast"}}
    manifest = body(
        encoder=pool(),
        decode=pool(variants=[{"name": "v", **place}]),
    )
    said = conditions or (("Ready", "True", "Serving", "demo is served"),)
    manifest["status"] = {
        "observedGeneration": 1,
        "conditions": [
            dict(zip(("type", "status", "reason", "message"), item, strict=True)) for item in said
        ],
    }
    manifest["metadata"] |= {"namespace": "ns", "generation": 1, "uid": "u-1"}
    return manifest


def node_class(count: int = 1) -> dict[str, Any]:
    return {
        "metadata": {"name": "fast"},
        "spec": {
            "nodeSelector": {"type": "fast"},
            "accelerator": {"resourceName": GPU, "count": count},
        },
    }


def blocked_pod(reason: str) -> dict[str, Any]:
    waiting = {"state": {"waiting": {"reason": reason, "message": "no"}}}
    unscheduled = {
        "type": "PodScheduled",
        "status": "False",
        "message": "0/1 nodes are available: x",
    }
    return {
        "metadata": {
            "name": "p",
            "namespace": "ns",
            "uid": "p",
            "creationTimestamp": "2026-11-21T10:00:00Z",
            "labels": {names.LABEL_ROLE: "decode", names.LABEL_SERVICE: "demo"},
            "ownerReferences": [
                {"kind": "ReplicaSet", "name": "demo-decode-1", "controller": True}
            ],
        },
        "spec": {},
        "status": {"conditions": [unscheduled]}
        if reason == "Pending"
        else {"containerStatuses": [waiting]},
    }


def vlm_pool(mode: str = "Manual", manager: str = names.MANAGER_AUTOSCALER) -> dict[str, Any]:
    fields = {"f:spec": {"f:replicas": {}}}
    return {
        "metadata": {
            "name": "demo-decode",
            "namespace": "ns",
            "managedFields": [{"manager": manager, "fieldsV1": fields}],
            "ownerReferences": [{"kind": "VLMService", "name": "demo", "controller": True}],
        },
        "spec": {"mode": mode, "replicas": 1},
    }


def gateway_role(*verbs: str, service: str = "demo") -> dict[str, Any]:
    return {
        "metadata": {"name": f"{service}-gateway", "namespace": "ns"},
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": list(verbs)}],
    }


def gateway_policy(*ports: int) -> dict[str, Any]:
    """The NetworkPolicy of a gateway, which may reach these ports anywhere, and 9000 of pods."""
    peers = {"to": [{"podSelector": {}}], "ports": [{"protocol": "TCP", "port": 9000}]}
    anywhere = {"ports": [{"protocol": "TCP", "port": port} for port in ports]}
    labels = {names.LABEL_SERVICE: "demo", names.LABEL_ROLE: "gateway"}
    return {
        "metadata": {"name": "demo-gateway", "namespace": "ns"},
        "spec": {"podSelector": {"matchLabels": labels}, "egress": [peers, anywhere]},
    }


def endpoints(port: int) -> dict[str, Any]:
    """The EndpointSlice of the API server."""
    metadata = {"name": "kubernetes", "namespace": "default"}
    return {"metadata": metadata, "ports": [{"name": "https", "port": port}]}


def scaler(name: str) -> dict[str, Any]:
    target = {"kind": "VLMPool", "name": "demo-decode"}
    return {"metadata": {"name": name, "namespace": "ns"}, "spec": {"scaleTargetRef": target}}


def claim(phase: str = "Bound", mode: str = "ReadOnlyMany") -> dict[str, Any]:
    return {
        "metadata": {"name": "shapes", "namespace": "ns"},
        "spec": {"accessModes": [mode]},
        "status": {"phase": phase},
    }


def healthy() -> Facts:
    found = Installation.of(deployment())
    rights = dict.fromkeys(OF_NAMESPACES + OF_CLUSTER, True)
    return Facts(
        now=NOW,
        version="v1.34.2",
        objects={
            CRD: DEFINITIONS,
            DEPLOYMENT: [deployment()],
            LEASE: [lease()],
            ROLE: [gateway_role("get", "list", "watch")],
            NODE: [node(type="fast")],
            VLM_NODE_CLASS: [node_class()],
            NAMESPACE: [{"metadata": {"name": "ns"}}],
            VLM_SERVICE: [service()],
            VLM_POOL: [vlm_pool()],
            CLAIM: [claim()],
            POD: [],
            AUTOSCALER: [],
            NETWORK_POLICY: [gateway_policy(443, 6443)],
            ENDPOINT_SLICE: [endpoints(6443)],
        },
        user_rights=dict.fromkeys(OF_USERS, True),
        operators={
            (found.name, ""): rights,
            (found.name, found.namespace): dict.fromkeys(of_lease(found.lease), True),
        },
    )


def with_objects(**changed: list[dict[str, Any]]) -> Facts:
    """The healthy cluster with all objects of some kinds replaced; kinds by their plural."""
    facts = healthy()
    by_plural = {kind.plural: kind for kind in (*GLOBAL, *LOCAL, DEPLOYMENT, ENDPOINT_SLICE, LEASE)}
    return dataclasses.replace(
        facts, objects={**facts.objects, **{by_plural[key]: of for key, of in changed.items()}}
    )


def wrong(facts: Facts) -> list[Finding]:
    return [item for item in examine(facts) if item.level is not Level.OK]
