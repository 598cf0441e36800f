"""Checks services: namespace, claims, conditions, pods, and other writers of their pools. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from vlm_cli.access import condition
from vlm_cli.doctor.facts import AUTOSCALER, CLAIM, NAMESPACE, Facts, Finding, Level
from vlm_cli.doctor.installed import installations
from vlm_operator import names
from vlm_operator.api.gateway import Gateway
from vlm_operator.autoscale.inputs import pool_owner
from vlm_operator.cluster import DEPLOYMENT, POD, VLM_POOL, VLM_SERVICE, Manifest
from vlm_operator.observe import pod_states
from vlm_operator.status.causes import pod_problem, references, split

_PVC = "pvc://"
_SHARED = {"ReadOnlyMany", "ReadWriteMany"}
_SECURITY = "pod-security.kubernetes.io/enforce"
_NO_LEVEL = "without any"
_LEVELS = ("privileged", "baseline", "restricted")
# Reasons of Ready=False that need no action of a user.
_TRANSIENT = ("PodsStarting", "PodsMissing", "Creating", "WaitsForModel", "Stopping", "Deleting")
# Other conditions to report, even if a service is Ready: type, and the status that is wrong.
_OTHER_CONDITIONS = (
    ("ScalingActive", "False"),
    ("MetricsAvailable", "False"),
    ("CapacitySufficient", "False"),
    ("CertificatesReady", "False"),
    ("SLOAttainable", "False"),
)
# Reasons of these that a user chose, or that the check `pods` reports in more detail.
_NOT_REPORTED = ("Stopped", "Paused", "Off", "Advisory", "Unschedulable")


def watched(facts: Facts) -> Iterator[Finding]:
    """Check that each service is in a namespace that an operator watches."""
    if DEPLOYMENT in facts.unreadable:
        return
    found = installations(facts)
    spaces = {item["metadata"]["namespace"] for item in facts.all(VLM_SERVICE)}
    for space in sorted(spaces):
        if not any(item.watches(space) for item in found):
            message = f"no operator watches namespace {space}, which has services"
            yield Finding("operator", Level.FAIL, message, "add it to watchNamespaces of the chart")


def conditions(facts: Facts) -> Iterator[Finding]:
    """Check that each service is Ready; if not, report its message."""
    services = facts.all(VLM_SERVICE)
    if not services and VLM_SERVICE not in facts.unreadable:
        yield Finding(
            "services", Level.OK, "there is no VLMService: begin with examples/quickstart"
        )
    for service in services:
        yield from _conditions(service)


def gateways(facts: Facts) -> Iterator[Finding]:
    """Report the number of gateways; with one gateway, a node drain makes requests fail."""
    if VLM_SERVICE in facts.unreadable:
        return
    for service in facts.all(VLM_SERVICE):
        meta, count = service["metadata"], _num_gateways(service)
        message = f"{_where(service)} has {count} gateways, and a PodDisruptionBudget for them"
        remedy = ""
        if count == 1:
            message = f"{_where(service)} has one gateway: if its node is drained, requests fail"
            patch = '{"spec":{"gateway":{"replicas":2}}}'
            remedy = (
                "where that matters: "
                f"kubectl -n {meta['namespace']} patch vlm {meta['name']} --type=merge -p '{patch}'"
            )
        yield Finding("gateways", Level.OK, message, remedy)


def claims(facts: Facts) -> Iterator[Finding]:
    """Check that the claim of each pvc:// model exists, is bound, and mounts on several nodes."""
    if CLAIM in facts.unreadable:
        return
    users: dict[tuple[str, str], Manifest] = {}  # one service per claim
    for service in facts.all(VLM_SERVICE):
        uri = str(service["spec"]["model"]["uri"])
        if uri.startswith(_PVC):
            name = uri.removeprefix(_PVC).partition("/")[0]
            users.setdefault((service["metadata"]["namespace"], name), service)
    for (space, name), service in sorted(users.items(), key=lambda item: item[0]):
        claim = facts.one(CLAIM, name, space)
        level, message, remedy = (
            (Level.FAIL, "does not exist", f"create it, with the weights of {_where(service)}")
            if claim is None
            else _claim(claim)
        )
        yield Finding("claims", level, f"PersistentVolumeClaim {space}/{name} {message}", remedy)


def security(facts: Facts) -> Iterator[Finding]:
    """Check that Pod Security admits pods: they satisfy `restricted`, so any known level does."""
    if NAMESPACE in facts.unreadable:
        return
    found: Counter[str] = Counter()
    for space in sorted({item["metadata"]["namespace"] for item in facts.all(VLM_SERVICE)}):
        labels = (facts.one(NAMESPACE, space) or {"metadata": {}})["metadata"].get("labels", {})
        level = labels.get(_SECURITY, _NO_LEVEL)
        found[level] += 1
        if level not in (*_LEVELS, _NO_LEVEL):
            message = f"namespace {space}: {_SECURITY}={level} is no level"
            remedy = f"kubectl label --overwrite ns {space} {_SECURITY}=restricted"
            yield Finding("pod-security", Level.WARN, message, remedy)
    if found:
        listed = ", ".join(f"{count} {level}" for level, count in sorted(found.items()))
        message = f"pods pass `restricted`; namespaces with services, by level: {listed}"
        yield Finding("pod-security", Level.OK, message)


def pods(facts: Facts) -> Iterator[Finding]:
    """Check that no pod is blocked; one finding has all pods of a role with the same cause."""
    found: Counter[tuple[str, str, str, str]] = Counter()
    fixes: dict[str, str] = {}
    fields = {
        (item["metadata"]["namespace"], item["metadata"]["name"]): references(item["spec"])
        for item in facts.all(VLM_SERVICE)
    }
    count = 0
    for item in facts.all(POD):
        for pod in pod_states([item]):
            count += 1
            meta = item["metadata"]
            service = meta["labels"].get(names.LABEL_SERVICE, "")
            problem = pod_problem(pod, None, fields=fields.get((meta["namespace"], service), {}))
            lasting = problem is not None and (
                pod.blocked or problem.since + (problem.delay or 0.0) <= facts.now
            )
            cause = problem.cause if problem is not None and lasting else pod.blocked
            if cause and not pod.ready and not pod.deleting:
                if problem is not None:
                    fixes[cause] = problem.fix
                found[meta["namespace"], service, pod.role.value, cause] += 1
    for (space, service, role, cause), number in sorted(found.items()):
        level = Level.WARN if cause.startswith(("Pending", "no node")) else Level.FAIL
        plural = "pod" if number == 1 else "pods"
        labels = f"{names.LABEL_SERVICE}={service},{names.LABEL_ROLE}={role}"
        remedy = fixes.get(cause) or f"kubectl -n {space} describe pods -l {labels}"
        message = f"{number} {role} {plural} of {space}/{service}: {cause}"
        yield Finding("pods", level, message, remedy)
    if count and not found:
        yield Finding("pods", Level.OK, f"none of the {count} pods of services is blocked")


def paused(facts: Facts) -> Iterator[Finding]:
    """Report services for which the operator writes nothing, because a user chose that."""
    for service in facts.all(VLM_SERVICE):
        if service["spec"].get("paused"):
            meta, patch = service["metadata"], '{"spec":{"paused":false}}'
            message = f"{_where(service)} is paused: the operator changes none of its objects"
            remedy = (
                f"kubectl -n {meta['namespace']} patch vlm {meta['name']} --type=merge -p '{patch}'"
            )
            yield Finding("services", Level.OK, message, remedy)


def owners(facts: Facts) -> Iterator[Finding]:
    """Check that each pod and VLMPool with our labels or kind belongs to a service."""
    for item in facts.all(POD):
        meta = item["metadata"]
        if names.LABEL_SERVICE in meta.get("labels", {}) and "ReplicaSet" not in _owners(item):
            where = f"{meta['namespace']}/{meta['labels'][names.LABEL_SERVICE]}"
            message = (
                f"pod {meta['namespace']}/{meta['name']} has the label of {where}, and no "
                "ReplicaSet controls it: gateways and operator ignore it"
            )
            remedy = f"remove its label {names.LABEL_SERVICE}, or delete it"
            yield Finding("owners", Level.WARN, message, remedy)
    for item in facts.all(VLM_POOL):
        if names.KIND_SERVICE not in _owners(item):
            meta = item["metadata"]
            message = f"VLMPool {meta['namespace']}/{meta['name']} belongs to no VLMService"
            remedy = "delete it: the operator creates the VLMPools of a VLMService"
            yield Finding("owners", Level.WARN, f"{message}: nothing reads it", remedy)


def writers(facts: Facts) -> Iterator[Finding]:
    """Check that each replica count of a VLMPool has one writer."""
    pools = {
        (item["metadata"]["namespace"], item["metadata"]["name"]): item
        for item in facts.all(VLM_POOL)
    }
    scalers: dict[tuple[str, str], list[str]] = {}
    for item in facts.all(AUTOSCALER):
        target = item["spec"]["scaleTargetRef"]
        if target["kind"] == names.KIND_POOL:
            key = (item["metadata"]["namespace"], target["name"])
            scalers.setdefault(key, []).append(item["metadata"]["name"])
    for (space, name), by in sorted(scalers.items()):
        yield from _scaled(f"{space}/{name}", pools.get((space, name)), sorted(by))
    for (space, name), pool in sorted(pools.items()):
        owner, mode = pool_owner(pool), pool["spec"].get("mode")
        if mode == "Auto" and owner not in (names.MANAGER_AUTOSCALER, None):
            message = f"VLMPool {space}/{name} is of mode Auto, and {owner} wrote its replicas"
            remedy = "set mode External, or stop the other writer"
            yield Finding("writers", Level.WARN, message, remedy)


def _scaled(name: str, pool: Manifest | None, by: list[str]) -> Iterator[Finding]:
    listed = " and ".join(f"HorizontalPodAutoscaler {item}" for item in by)
    if pool is None:
        message = f"{listed} scales VLMPool {name}, which does not exist"
        yield Finding("writers", Level.WARN, message, "name it as `kubectl get vlmp` does")
    elif len(by) > 1:
        message = f"{listed} scale VLMPool {name} against each other"
        yield Finding("writers", Level.FAIL, message, "keep one")
    elif pool["spec"].get("mode") != "External":
        message = f"{listed} scales VLMPool {name}, which is of mode {pool['spec'].get('mode')}"
        remedy = "set scaling.mode External on that pool, or delete the autoscaler"
        yield Finding("writers", Level.FAIL, message, remedy)


def _conditions(service: Manifest) -> Iterator[Finding]:
    where, meta = _where(service), service["metadata"]
    ready = condition(service, "Ready")
    if ready is None:
        message = f"{where} has no status: no operator has processed it"
        yield Finding("services", Level.FAIL, message, "is one running, and for its namespace?")
        return
    cause, remedy = split(ready.get("message", ""))
    message = f"{where}: {ready.get('reason', '')}: {cause}"
    remedy = remedy or f"kubectl -n {meta['namespace']} describe vlm {meta['name']}"
    if "deletionTimestamp" in meta:
        remedy = "if no operator runs any more: vlm release-finalizers"
        yield Finding("services", Level.WARN, f"{where} is being deleted: {message}", remedy)
        return
    if ready["status"] == "True":
        yield Finding("services", Level.OK, f"{where} is Ready")
    else:
        transient = ready.get("reason") in _TRANSIENT
        yield Finding("services", Level.WARN if transient else Level.FAIL, message, remedy)
    stalled = condition(service, "Stalled")
    if stalled and stalled["status"] == "True" and stalled.get("message") != ready.get("message"):
        cause, fix = split(stalled.get("message", ""))
        fix = fix or f"kubectl -n {meta['namespace']} edit vlm {meta['name']}"
        yield Finding("services", Level.FAIL, f"{where}: {stalled.get('reason', '')}: {cause}", fix)
    if service.get("status", {}).get("observedGeneration", 0) < meta.get("generation", 0):
        message = f"{where}: no operator has processed its last change"
        yield Finding("services", Level.WARN, message, "is an operator the leader?")
    for kind, wrong in _OTHER_CONDITIONS:
        found = condition(service, kind)
        if found and found["status"] == wrong and found.get("reason") not in _NOT_REPORTED:
            cause, fix = split(found.get("message", ""))
            fix = fix or f"vlm why -n {meta['namespace']} {meta['name']}"
            yield Finding("services", Level.WARN, f"{where}: {kind}: {cause}", fix)


def _claim(claim: Manifest) -> tuple[Level, str, str]:
    phase = claim.get("status", {}).get("phase", "Pending")
    meta = claim["metadata"]
    remedy = f"kubectl -n {meta['namespace']} describe pvc {meta['name']}"
    if phase == "Lost":
        return Level.FAIL, "has lost its volume", remedy
    if phase != "Bound":
        return Level.WARN, f"is {phase}: it has no volume yet", remedy
    modes = set(claim["spec"].get("accessModes", []))
    if not modes & _SHARED:
        listed = ", ".join(sorted(modes)) or "no access mode"
        message = f"is bound, {listed}: pods on a second node cannot mount it"
        return Level.WARN, message, "use a volume with ReadOnlyMany or ReadWriteMany"
    return Level.OK, "is bound", ""


def _owners(item: Manifest) -> set[str]:
    """Return the kinds of the objects that control another."""
    references = item["metadata"].get("ownerReferences") or []
    return {str(one["kind"]) for one in references if one.get("controller")}


def _num_gateways(service: Manifest) -> int:
    count: int = service["spec"].get("gateway", {}).get("replicas", Gateway().replicas)
    return count


def _where(service: Manifest) -> str:
    return f"{service['metadata']['namespace']}/{service['metadata']['name']}"
