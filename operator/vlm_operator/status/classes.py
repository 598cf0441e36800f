"""Computes the status of a VLMNodeClass: its nodes, their capacity, how long pods take to start.

nodes ──────────────┐
pods of services ───┴▶ class_status        services ─▶ class_uses ─▶ replicas and starts by class
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from vlm_operator.api import VLMService, quantity
from vlm_operator.state import Manifest, Observed
from vlm_operator.status.conditions import with_times
from vlm_operator.status.inputs import ConditionState

STARTS_KEPT = 20  # starts per class, for the 90th percentile
_QUANTILE = 0.9
_STEP_SECONDS = 5  # rounding, so that small changes cause no write


@dataclasses.dataclass(frozen=True)
class Start:
    """One pod's start, from its creation until it accepts requests at `ready` (epoch seconds)."""

    uid: str
    ready: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class ClassUse:
    replicas: int = 0  # scheduled pods
    starts: tuple[Start, ...] = ()  # of pods that accept requests


def class_uses(service: VLMService, observed: Observed) -> dict[str, ClassUse]:
    uses: dict[str, ClassUse] = {}
    for role, pool in service.spec.pools.present.items():
        for variant in pool.variants:
            if variant.node_class_ref is None:
                continue
            pods = [pod for pod in observed.of(role) if pod.variant == variant.name]
            before = uses.get(variant.node_class_ref.name, ClassUse())
            starts = (
                Start(pod.uid, pod.accepting_since, pod.accepting_since - pod.created)
                for pod in pods
                if pod.accepting_since is not None
            )
            uses[variant.node_class_ref.name] = ClassUse(
                before.replicas + sum(pod.scheduled for pod in pods), (*before.starts, *starts)
            )
    return uses


def class_status(
    manifest: Manifest,
    nodes: Iterable[Manifest],
    *,
    operator: str,
    in_use: int,
    starts: Iterable[Start],
    now: float,
) -> Manifest:
    """Return the status of a VLMNodeClass, rounded so that an idle operator writes nothing.

    Each operator writes its own entry of `usage`. The other fields follow from the nodes and from
    all entries, so two operators write the same values.

    The class's measured start time stays until a newer one is known. `in_use` pods of this
    operator's services are on the class's nodes; `starts` are their latest.
    """
    spec, previous = manifest.get("spec", {}), manifest.get("status", {})
    selector = spec.get("nodeSelector", {})
    matching = [node for node in nodes if _matches(node, selector)]
    entry: Manifest = {"operator": operator, "replicas": in_use}
    measured = _p90([start.seconds for start in starts])
    if measured is not None:
        entry["startupP90Seconds"] = measured
    others = [item for item in previous.get("usage", []) if item["operator"] != operator]
    entries = [entry, *others]
    status: Manifest = {
        "nodes": len(matching),
        "inUse": sum(item.get("replicas", 0) for item in entries),
        "conditions": with_times([_nodes_found(len(matching), selector)], previous, now=now),
    }
    accelerator = spec.get("accelerator")
    if accelerator is not None:
        name, count = accelerator["resourceName"], int(accelerator.get("count", 1))
        status["allocatable"] = sum(_devices(node, name) // count for node in matching)
    if in_use or measured is not None:
        status["usage"] = [entry]
    longest = max((item.get("startupP90Seconds", 0) for item in entries), default=0)
    longest = longest or previous.get("measuredStartupP90Seconds", 0)
    if longest:
        status["measuredStartupP90Seconds"] = longest
    return status


def is_current(status: Manifest, wanted: Manifest, *, operator: str) -> bool:
    """Whether a class's status has the fields of `wanted`; other operators' entries are ignored."""
    own = [item for item in status.get("usage", []) if item["operator"] == operator]
    return {**{key: status.get(key) for key in wanted}, "usage": own} == {"usage": [], **wanted}


def latest(starts: Iterable[Start]) -> tuple[Start, ...]:
    """Return the latest `STARTS_KEPT` starts; of several for one pod, the first counts."""
    first: dict[str, Start] = {}
    for start in starts:
        first.setdefault(start.uid, start)
    return tuple(sorted(first.values(), key=lambda item: (item.ready, item.uid))[-STARTS_KEPT:])


def _matches(node: Manifest, selector: Mapping[str, str]) -> bool:
    labels = node["metadata"].get("labels", {})
    return all(labels.get(key) == value for key, value in selector.items())


def _devices(node: Manifest, resource: str) -> int:
    """Return the allocatable devices; 0 if the node is cordoned or not ready."""
    status = node.get("status", {})
    ready = any(
        item["type"] == "Ready" and item["status"] == "True"
        for item in status.get("conditions", [])
    )
    if not ready or node.get("spec", {}).get("unschedulable", False):
        return 0
    return int(quantity.parse(str(status.get("allocatable", {}).get(resource, "0"))))


def _p90(seconds: list[float]) -> int | None:
    if not seconds:
        return None
    ordered = sorted(seconds)
    rank = min(len(ordered) - 1, int(_QUANTILE * len(ordered)))
    return max(1, round(ordered[rank] / _STEP_SECONDS)) * _STEP_SECONDS


def _nodes_found(count: int, selector: Mapping[str, str]) -> ConditionState:
    labels = ", ".join(f"{key}={value}" for key, value in sorted(selector.items())) or "any label"
    if count:
        return ConditionState("NodesFound", True, "Found", f"{count} nodes have {labels}")
    return ConditionState("NodesFound", False, "NoNodes", f"no node has {labels}")
