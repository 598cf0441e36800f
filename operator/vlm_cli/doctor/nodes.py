"""Checks that there are nodes for services and node classes. Pure.

For existing pods, services.py reports the scheduler's message, which is more exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlm_cli.doctor.facts import Facts, Finding, Level
from vlm_operator.api import Variant, VLMService, parse, quantity
from vlm_operator.cluster import NODE, VLM_NODE_CLASS, VLM_SERVICE, Manifest
from vlm_operator.errors import SpecError
from vlm_operator.observe import node_class
from vlm_operator.pods.worker import place
from vlm_operator.state import NodeClassState


def ready(facts: Facts) -> Iterator[Finding]:
    """Check that there are nodes, and that they accept pods."""
    if NODE in facts.unreadable:
        return
    nodes = facts.all(NODE)
    if not nodes:
        message = "the cluster has no node: every pod stays Pending"
        yield Finding("nodes", Level.FAIL, message, "add one")
        return
    accepting = [node for node in nodes if _accepts_pods(node)]
    names = ", ".join(sorted(_name(node) for node in nodes if not _accepts_pods(node))[:3])
    message = f"{len(accepting)} of {len(nodes)} nodes accept pods"
    if not accepting:
        yield Finding("nodes", Level.FAIL, message, f"kubectl describe node {names.split(',')[0]}")
    elif names:
        yield Finding("nodes", Level.WARN, f"{message}, not {names}", "kubectl get nodes")
    else:
        yield Finding("nodes", Level.OK, message)


def classes(facts: Facts) -> Iterator[Finding]:
    """Check that each VLMNodeClass has nodes with its devices."""
    if NODE in facts.unreadable:
        return
    used = {
        variant["nodeClassRef"]["name"]
        for service in facts.all(VLM_SERVICE)
        for pool in service["spec"].get("pools", {}).values()
        for variant in pool.get("variants", [])
        if variant.get("nodeClassRef")
    }
    for item in facts.all(VLM_NODE_CLASS):
        found = node_class(item)
        devices = {found.accelerator: found.accelerators} if found.accelerator else {}
        problem, remedy = problem_of(
            facts.all(NODE), found.node_selector, devices, found.tolerations
        )
        level = Level.OK if not problem else Level.FAIL if found.name in used else Level.WARN
        message = problem or f"{len(_selected(facts.all(NODE), found.node_selector))} nodes"
        note = "" if found.name in used else " (no service uses it)"
        yield Finding("node-classes", level, f"{found.name}: {message}{note}", remedy)


def variants(facts: Facts) -> Iterator[Finding]:
    """Check that each variant with its own placement has nodes, and that named classes exist."""
    if not facts.all(NODE) or VLM_NODE_CLASS in facts.unreadable:
        return
    node_classes = {_name(item): node_class(item) for item in facts.all(VLM_NODE_CLASS)}
    fine = 0
    for manifest in facts.all(VLM_SERVICE):
        meta = manifest["metadata"]
        where = f"{meta['namespace']}/{meta['name']}"
        try:
            problems = _problems(parse(manifest), node_classes, facts.all(NODE))
        except SpecError as error:
            problems = [
                (str(error), f"correct it: kubectl -n {meta['namespace']} edit vlm {meta['name']}")
            ]
        fine += not problems
        for problem, remedy in problems:
            yield Finding("placement", Level.FAIL, f"{where}: {problem}", remedy)
    if fine:
        count = len(facts.all(VLM_SERVICE))
        yield Finding("placement", Level.OK, f"{fine} of {count} services: each variant has nodes")


def _problems(
    service: VLMService, node_classes: Mapping[str, NodeClassState], nodes: Sequence[Manifest]
) -> list[tuple[str, str]]:
    problems = []
    for role, pool in place(service, node_classes).spec.pools.present.items():
        for variant in pool.variants:
            if variant.node_class_ref is None and variant.placement is not None:
                devices = _devices_of(variant)
                tolerations = [item.to_dict() for item in variant.placement.tolerations]
                selector = variant.placement.node_selector
                problem, remedy = problem_of(nodes, selector, devices, tolerations)
                if problem:
                    path = f"spec.pools.{role}.variants[{variant.name}]"
                    problems.append((f"{path}: {problem}", remedy))
    return problems


def problem_of(
    nodes: Sequence[Manifest],
    selector: Mapping[str, str],
    devices: Mapping[str, int],
    tolerations: Sequence[Mapping[str, Any]],
) -> tuple[str, str]:
    """Return why no node can run such a pod, and the remedy; both are "" if one can."""
    matching = _selected(nodes, selector)
    if not matching:
        pairs = " ".join(f"{key}={value}" for key, value in sorted(selector.items()))
        if not pairs:
            return "the cluster has no node", "add one"
        return f"no node has {pairs.replace(' ', ', ')}", f"kubectl label node NAME {pairs}"
    for resource, count in devices.items():
        largest = max(_allocatable(node, resource) for node in matching)
        if largest == 0:
            message = f"none of the {len(matching)} nodes has {resource}"
            return message, "is its device plugin running there?"
        if largest < count:
            message = f"a pod needs {count} {resource}, the largest of its nodes has {largest}"
            return message, "ask for fewer, or add larger nodes"
    if not any(_accepts_pods(node) for node in matching):
        return f"none of the {len(matching)} nodes is Ready and schedulable", "kubectl get nodes"
    able = [
        node
        for node in matching
        if _accepts_pods(node)
        and all(_allocatable(node, resource) >= count for resource, count in devices.items())
    ]
    if not able:
        return "no node that is Ready has the devices of a pod", "kubectl get nodes"
    taints = [_untolerated(node, tolerations, devices) for node in able]
    if all(taints):
        named = ", ".join(sorted(set().union(*taints)))
        return (
            f"each of its {len(able)} nodes has a taint that the pods do not tolerate: {named}",
            "add a toleration to the placement, or remove the taint",
        )
    return "", ""


def _untolerated(
    node: Manifest, tolerations: Sequence[Mapping[str, Any]], devices: Mapping[str, int]
) -> list[str]:
    """Return the taints of a node that keep the pods away, as KEY[=VALUE]:EFFECT.

    Many clusters taint nodes by the name of their device, and add the toleration to pods that ask
    for the device (admission plugin ExtendedResourceToleration). Such a taint does not count.
    """
    return [
        f"{taint['key']}{'=' + taint['value'] if taint.get('value') else ''}:{taint['effect']}"
        for taint in node.get("spec", {}).get("taints", ())
        if taint["effect"] != "PreferNoSchedule"
        and taint["key"] not in devices
        and not any(_tolerates(one, taint) for one in tolerations)
    ]


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    """Whether the scheduler ignores the taint; absent key and effect match all."""
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("key") not in (None, "", taint["key"]):
        return False
    if toleration.get("operator") == "Exists":
        return True
    return (toleration.get("value") or "") == (taint.get("value") or "")


def _selected(nodes: Sequence[Manifest], selector: Mapping[str, str]) -> list[Manifest]:
    return [
        node for node in nodes if selector.items() <= node["metadata"].get("labels", {}).items()
    ]


def _accepts_pods(node: Manifest) -> bool:
    conditions = node.get("status", {}).get("conditions", [])
    up = any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)
    return up and not node.get("spec", {}).get("unschedulable", False)


def _allocatable(node: Manifest, resource: str) -> int:
    return int(quantity.parse(str(node.get("status", {}).get("allocatable", {}).get(resource, 0))))


def _devices_of(variant: Variant) -> dict[str, int]:
    """Return the extended resources of one pod: their names contain a domain."""
    limits = variant.resources.limits.items()
    return {name: int(quantity.parse(value)) for name, value in limits if "/" in name}


def _name(item: Manifest) -> str:
    return str(item["metadata"]["name"])
