"""Checks the API server, the CRDs, the operators and their Leases. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from vlm_cli.access import is_ready
from vlm_cli.definitions import KINDS, crd
from vlm_cli.doctor.facts import CRD, ENDPOINT_SLICE, Facts, Finding, Installation, Level
from vlm_operator import names
from vlm_operator.cluster import (
    DEPLOYMENT,
    LEASE,
    NETWORK_POLICY,
    ROLE,
    VLM_SERVICE,
    Manifest,
    epoch_seconds,
)
from vlm_operator.names import Role

OLDEST = (1, 30)  # the chart's kubeVersion
INSTALL = "kubectl apply --server-side -f install.yaml, or helm upgrade --install"
_SKEW_SECONDS = 5.0  # renewTime may be this far ahead of this machine's clock
_GATEWAY_VERBS = {"get", "list", "watch"}


def installations(facts: Facts) -> list[Installation]:
    """Return every operator of the cluster; if there is no Deployment, one with default names."""
    return [Installation.of(item) for item in facts.all(DEPLOYMENT)] or [Installation()]


def version(facts: Facts) -> Iterator[Finding]:
    """Check that the API server answers and is not too old."""
    found = re.match(r"v?(\d+)\.(\d+)", facts.version)
    oldest = ".".join(map(str, OLDEST))
    if found is None:
        yield Finding("api", Level.WARN, f"the API server calls itself {facts.version!r}")
    elif (int(found[1]), int(found[2])) < OLDEST:
        message = f"the API server is {facts.version}, too old"
        yield Finding("api", Level.FAIL, message, f"upgrade the cluster to {oldest} or newer")
    else:
        yield Finding("api", Level.OK, f"the API server answers, {facts.version}")


def definitions(facts: Facts) -> Iterator[Finding]:
    """Check that each CRD exists, is served in our version, and has our fields."""
    if CRD in facts.unreadable:
        return
    for kind in KINDS:
        wanted = crd(kind)
        name = wanted["metadata"]["name"]
        found = facts.one(CRD, name)
        level, message = (
            (Level.FAIL, "is not installed") if found is None else _definition(found, wanted)
        )
        remedy = (
            "" if level is Level.OK else f"kubectl apply --server-side -f crds/{kind.file_name}"
        )
        yield Finding("crds", level, f"{name} {message}", remedy)


def operator(facts: Facts) -> Iterator[Finding]:
    """Check that each operator's pods are ready, and that its Lease is held and renewed."""
    for found in installations(facts):
        leads, lease = _lease(facts, found)
        yield from _deployment(facts, found, leads=leads)
        yield lease


def exclusive(facts: Facts) -> Iterator[Finding]:
    """Check that no namespace has two operators, unless they share a Lease."""
    for first, second in combinations(installations(facts), 2):
        if (first.namespace, first.lease) == (second.namespace, second.lease):
            continue
        both = set(first.watched) & set(second.watched) if first.watched else set(second.watched)
        both = both if second.watched else set(first.watched)
        if both or not (first.watched or second.watched):
            where = ", ".join(sorted(both)) or "every namespace"
            message = f"{first.name} and {second.name} both watch {where}"
            yield Finding("operator", Level.FAIL, message, "remove one, or set watchNamespaces")


def gateway_role(facts: Facts) -> Iterator[Finding]:
    """Check that each service's Role exists and lets its gateways watch pods."""
    services = facts.all(VLM_SERVICE)
    if ROLE in facts.unreadable or not services:
        return
    fine = True
    for service in services:
        namespace = service["metadata"]["namespace"]
        name = names.child(service["metadata"]["name"], Role.GATEWAY)
        found = facts.one(ROLE, name, namespace)
        verbs = {
            verb
            for rule in (found or {}).get("rules") or []
            if {"pods", "*"} & set(rule.get("resources", []))
            for verb in rule.get("verbs", [])
        }
        missing = set() if "*" in verbs else _GATEWAY_VERBS - verbs
        if not missing:
            continue
        fine = False
        message = f"Role {namespace}/{name} does not allow {' and '.join(sorted(missing))} of pods"
        if found is None:
            message = f"Role {namespace}/{name} is missing: gateways cannot find their workers"
        yield Finding("gateway", Level.FAIL, message, "an operator restores it: is one the leader?")
    if fine:
        yield Finding("gateway", Level.OK, "every gateway's Role lets it watch its workers")


def gateway_network(facts: Facts) -> Iterator[Finding]:
    """Check that the gateways' NetworkPolicies allow the ports of the API server's endpoints.

    If a service is Ready, its gateways reach the API server: the network enforces no policies.
    """
    ports = {
        int(port["port"])
        for item in facts.all(ENDPOINT_SLICE)
        for port in item.get("ports") or []
        if port.get("port")
    }
    policies = [
        item
        for item in facts.all(NETWORK_POLICY)
        if _selected(item).get(names.LABEL_ROLE) == Role.GATEWAY
    ]
    fine = bool(ports and policies)
    for item in policies:
        rules = [rule for rule in item["spec"].get("egress") or [] if not rule.get("to")]
        allowed = {port.get("port") for rule in rules for port in rule.get("ports") or [{}]}
        missing = set() if None in allowed else ports - allowed
        if missing:
            fine = False
            service = facts.one(
                VLM_SERVICE,
                _selected(item).get(names.LABEL_SERVICE, ""),
                item["metadata"]["namespace"],
            )
            if service is not None and is_ready(service):
                continue
            meta, listed = item["metadata"], ", ".join(map(str, sorted(missing)))
            message = (
                f"NetworkPolicy {meta['namespace']}/{meta['name']} denies the API server's port "
                f"{listed}: if the network enforces policies, the gateway finds no workers"
            )
            remedy = "add the port to network.apiServerPorts of the chart"
            yield Finding("network", Level.WARN, message, remedy)
    if fine:
        listed = ", ".join(map(str, sorted(ports)))
        yield Finding("network", Level.OK, f"gateways may reach the API server's port {listed}")


def _selected(policy: Manifest) -> dict[str, str]:
    """Return the labels of the pods of a NetworkPolicy."""
    return dict(policy["spec"].get("podSelector", {}).get("matchLabels") or {})


def _definition(found: Manifest, wanted: Manifest) -> tuple[Level, str]:
    served = {item["name"]: item for item in found["spec"]["versions"] if item["served"]}
    if names.VERSION not in served:
        listed = ", ".join(sorted(served)) or "nothing"
        return Level.FAIL, f"serves {listed}, not {names.VERSION}"
    conditions = found.get("status", {}).get("conditions", [])
    for item in conditions:
        wrong = "True" if item["type"] in ("Terminating", "NonStructuralSchema") else "False"
        if item["status"] == wrong:
            return Level.FAIL, f"is {item['type']}={item['status']}: {item.get('message', '')}"
    ours, theirs = (
        set(_fields(version["schema"]["openAPIV3Schema"]))
        for version in (wanted["spec"]["versions"][0], served[names.VERSION])
    )
    if missing := sorted(ours - theirs):
        others = f" and {len(missing) - 1} more fields" if len(missing) > 1 else ""
        return Level.WARN, f"is older than this vlm: it lacks {missing[0]}{others}"
    if extra := sorted(theirs - ours):
        return Level.OK, f"is served; it is newer than this vlm ({extra[0]})"
    return Level.OK, f"is served in {names.VERSION}, and up to date"


def _fields(schema: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the paths of all fields, including those in items of lists and maps."""
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}.{name}"
        yield from _fields(inner, f"{path}.{name}")
    for inner in (schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, dict):
            yield from _fields(inner, f"{path}[]")


def _deployment(facts: Facts, found: Installation, *, leads: bool) -> Iterator[Finding]:
    level = Level.WARN if leads else Level.FAIL
    if found.deployment is None:
        if DEPLOYMENT not in facts.unreadable:
            message = "no Deployment of the operator was found"
            yield Finding("operator", level, message, "" if leads else INSTALL)
        return
    desired = found.deployment["spec"].get("replicas", 1)
    ready = found.deployment.get("status", {}).get("readyReplicas", 0)
    message = f"{found.name} has {ready} of {desired} pods ready"
    if desired and ready >= desired:
        yield Finding("operator", Level.OK, message)
        return
    namespace, _, name = found.name.partition("/")
    remedy = (
        f"kubectl -n {namespace} describe deploy/{name}; kubectl -n {namespace} logs deploy/{name}"
    )
    if not desired:
        remedy = f"kubectl -n {namespace} scale deploy/{name} --replicas=1"
    yield Finding("operator", level, message, remedy)


def _lease(facts: Facts, found: Installation) -> tuple[bool, Finding]:
    """Return whether an operator holds a current Lease, and the finding."""
    name = f"Lease {found.namespace}/{found.lease}"
    if LEASE in facts.unreadable:
        return False, Finding("lease", Level.WARN, f"{name}: {facts.unreadable[LEASE]}")
    lease = facts.one(LEASE, found.lease, found.namespace)
    spec = (lease or {}).get("spec", {})
    remedy = "no service changes until an operator leads: look at its log"
    if lease is None:
        return False, Finding("lease", Level.FAIL, f"{name} is missing: no operator leads", remedy)
    if not spec.get("holderIdentity"):
        return False, Finding("lease", Level.FAIL, f"{name} has no holder", remedy)
    renewed = epoch_seconds(spec["renewTime"])
    age, duration = facts.now - renewed, float(spec.get("leaseDurationSeconds", 15))
    held = f"{name} is held by {spec['holderIdentity']}"
    if age > duration:
        message = f"{held}, and not renewed for {age:.0f} s"
        return False, Finding("lease", Level.FAIL, message, remedy)
    if age < -_SKEW_SECONDS:
        message = f"{held}, renewed {-age:.0f} s from now"
        return True, Finding("lease", Level.WARN, message, "set the clock of this machine")
    return True, Finding("lease", Level.OK, f"{held}, renewed {max(0.0, age):.0f} s ago")
