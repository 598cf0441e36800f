"""Reads the whole state of a service from the cluster into `Observed`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vlm_operator import names
from vlm_operator.api import quantity
from vlm_operator.cluster import (
    CHILD_KINDS,
    DEPLOYMENT,
    JOB,
    POD,
    VLM_NODE_CLASS,
    VLM_SERVICE,
    Cluster,
    Kind,
    Manifest,
    epoch_seconds,
)
from vlm_operator.names import Role
from vlm_operator.state import (
    ANNOTATION_DELETION_COST,
    NodeClassState,
    Observed,
    PodState,
    owned_by,
)
from vlm_operator.state.cluster_view import ContainerState, DownloadPod, error_line, one_line
from vlm_operator.state.owners import is_download_of, is_pod_of, names_of, parted

_ROLES = frozenset(role.value for role in Role)
_ERROR_PREFIX = "vlm-worker: "  # of the line with which a failed command ends
_SIGNALLED = 128  # greater exit codes are 128 plus the number of a signal


async def observe(cluster: Cluster, namespace: str, name: str, *, now: float) -> Observed:
    """Read a service, all objects with its label, and the node classes.

    Objects that carry the label but that the service does not control are in `foreign`. `samples`
    is empty.

    Raises:
        ClusterError: a read failed; a partial state is never returned.
    """
    labels = {names.LABEL_SERVICE: name}

    async def children(kind: Kind) -> list[Manifest]:
        return await cluster.list(kind, namespace, labels)

    service, (classes, pods, *objects) = await asyncio.gather(
        cluster.get(VLM_SERVICE, namespace, name),
        asyncio.gather(
            cluster.list(VLM_NODE_CLASS), children(POD), *(children(kind) for kind in CHILD_KINDS)
        ),
    )
    uid = None if service is None else str(service["metadata"]["uid"])
    labelled = [item for items in objects for item in items]
    owned, foreign = parted(labelled, lambda item: owned_by(item, uid))
    ours, theirs = (names_of(DEPLOYMENT.kind, some) for some in (owned, foreign))
    own_pods, foreign_pods = parted(
        pods, lambda item: is_pod_of(item, name, ours=ours, foreign=theirs)
    )
    foreign_jobs = names_of(JOB.kind, foreign)
    downloads, foreign_pods = parted(
        foreign_pods.values(), lambda item: is_download_of(item, name, foreign=foreign_jobs)
    )
    return Observed(
        service=service,
        children=owned,
        pods=pod_states(list(own_pods.values())),
        node_classes={item["metadata"]["name"]: node_class(item) for item in classes},
        samples={},
        now=now,
        foreign={**foreign, **foreign_pods},
        downloads=tuple(_download(item) for item in downloads.values()),
    )


def pod_states(pods: Sequence[Manifest]) -> tuple[PodState, ...]:
    """Convert pods with a role label of ours; other pods are skipped."""
    return tuple(
        _pod(item)
        for item in pods
        if item["metadata"].get("labels", {}).get(names.LABEL_ROLE) in _ROLES
    )


def _download(item: Manifest) -> DownloadPod:
    meta, spec, status = item["metadata"], item.get("spec", {}), item.get("status", {})
    conditions = {entry["type"]: entry for entry in status.get("conditions", [])}
    containers = [ContainerState.of(entry) for entry in status.get("containerStatuses", [])]
    owner = next(one for one in meta["ownerReferences"] if one.get("controller"))
    outputs = [one.exit_message for one in containers if one.exit_code]
    phase = status.get("phase")
    return DownloadPod(
        name=meta["name"],
        uid=meta["uid"],
        job=owner["name"],
        created=epoch_seconds(meta["creationTimestamp"]),
        ip=status.get("podIP"),
        scheduled=bool(spec.get("nodeName")),
        started=any(one.started for one in containers),
        deleting=meta.get("deletionTimestamp") is not None,
        finished=phase in ("Succeeded", "Failed"),
        failed=phase == "Failed",
        blocked=_blocked(spec, status, conditions) or one_line(str(status.get("message", ""))),
        error=next((text for output in outputs if (text := _reason(output))), ""),
        unscheduled=_unscheduled(conditions),
    )


def _reason(output: str) -> str:
    """Return why a command failed, with the fix after "; " if it names one."""
    for line in reversed(output.splitlines()):
        if line.startswith(_ERROR_PREFIX):
            return " ".join(line.removeprefix(_ERROR_PREFIX).split())[:512]
    return error_line(output)


def _unscheduled(conditions: Mapping[str, Any]) -> str:
    """Return the scheduler's message while a pod has no node; "" otherwise."""
    scheduled = conditions.get("PodScheduled", {})
    if scheduled.get("status") != "False":
        return ""
    return one_line(str(scheduled.get("message", "")), limit=1024) or "no node was found"


def _claims(spec: Manifest) -> frozenset[str]:
    claims = (item.get("persistentVolumeClaim") for item in spec.get("volumes", ()))
    return frozenset(str(item["claimName"]) for item in claims if item)


def _pod(item: Manifest) -> PodState:
    meta, spec, status = item["metadata"], item.get("spec", {}), item.get("status", {})
    labels = meta["labels"]
    conditions = {entry["type"]: entry for entry in status.get("conditions", [])}
    gate = conditions.get(names.GATE_ACCEPTING)
    statuses = status.get("containerStatuses", [])
    cost = meta.get("annotations", {}).get(ANNOTATION_DELETION_COST, "0")
    return PodState(
        name=meta["name"],
        uid=meta["uid"],
        role=Role(labels[names.LABEL_ROLE]),
        variant=labels.get(names.LABEL_VARIANT, ""),
        revision=labels.get(names.LABEL_REVISION, ""),
        node=spec.get("nodeName"),
        ip=status.get("podIP"),
        created=epoch_seconds(meta["creationTimestamp"]),
        scheduled=bool(spec.get("nodeName")),
        containers_ready=_holds(conditions, "ContainersReady"),
        ready=_holds(conditions, "Ready"),
        accepting=None if gate is None else gate["status"] == "True",
        gate_since=None if gate is None else epoch_seconds(gate["lastTransitionTime"]),
        deleting=meta.get("deletionTimestamp") is not None,
        finished=status.get("phase") in ("Succeeded", "Failed"),
        restarts=sum(int(entry.get("restartCount", 0)) for entry in statuses),
        deletion_cost=int(cost) if re.fullmatch(r"-?\d{1,9}", cost) else 0,
        blocked=_blocked(spec, status, conditions),
        ready_since=_since(conditions, "Ready"),
        unready_since=_since(conditions, "Ready", status="False"),
        scheduled_since=_since(conditions, "PodScheduled"),
        compat=labels.get(names.LABEL_COMPAT, ""),
        containers=tuple(
            ContainerState.of(entry)
            for entry in [*status.get("initContainerStatuses", []), *statuses]
        ),
        unscheduled=_unscheduled(conditions),
        claims=_claims(spec),
    )


def _holds(conditions: Mapping[str, Any], name: str) -> bool:
    return bool(conditions.get(name, {}).get("status") == "True")


def _since(conditions: Mapping[str, Any], name: str, *, status: str = "True") -> float | None:
    """Return when a condition got a status, in seconds since the epoch; None if it has another."""
    condition = conditions.get(name)
    if condition is None or condition["status"] != status:
        return None
    return epoch_seconds(condition["lastTransitionTime"])


def _blocked(spec: Manifest, status: Manifest, conditions: Mapping[str, Any]) -> str:
    """Return the first cause that keeps a pod from becoming ready, in the order of its start."""
    scheduled = conditions.get("PodScheduled")
    if scheduled is not None and scheduled["status"] == "False":
        return "Pending: " + unschedulable(scheduled.get("message", ""), spec)
    for entry in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        state = entry.get("state", {})
        waiting, ended = state.get("waiting"), state.get("terminated")
        last = entry.get("lastState", {}).get("terminated") or ended
        if waiting is not None and waiting.get("reason") not in (
            "ContainerCreating",
            "PodInitializing",
            None,
        ):
            return one_line(
                f"{waiting['reason']}: {_termination(last) or waiting.get('message', '')}"
            )
        if ended is not None and ended.get("exitCode"):
            return one_line(_termination(ended))
        if last is not None and not entry.get("ready") and last.get("exitCode"):
            return one_line(f"restarted {entry.get('restartCount', 1)} times: {_termination(last)}")
    return ""


def _termination(terminated: Mapping[str, Any] | None) -> str:
    """Return the reason, the exit code and the last error of the log; "" for None."""
    if terminated is None:
        return ""
    reason, code = terminated.get("reason", "Error"), terminated.get("exitCode")
    by_signal = (code or 0) > _SIGNALLED
    cause = error_line(str(terminated.get("message", "")), last_only=by_signal)
    return f"{reason}, exit code {code}" + (f": {cause}" if cause else "")


def unschedulable(message: str, spec: Manifest) -> str:
    """Shorten the scheduler's message, for example to `no node with 1 free nvidia.com/gpu`."""
    checked = re.match(r"0/(\d+) nodes are available", message)
    if checked is None:
        return one_line(message) or "no node was found"
    lacking = re.findall(r"(\d+) Insufficient ([\w./-]*\w)", message)
    if not lacking:
        reasons = message.partition(": ")[2].partition(". preemption")[0]
        return one_line(f"no node fits ({checked[1]} checked): {reasons}")
    _, resource = max(lacking, key=lambda item: int(item[0]))
    return f"no node with {_request(spec, resource)} free {resource} ({checked[1]} checked)"


def _request(spec: Manifest, resource: str) -> str:
    for container in spec.get("containers", []):
        resources = container.get("resources", {})
        amounts = {**resources.get("limits", {}), **resources.get("requests", {})}
        if resource in amounts:
            return str(amounts[resource])
    return "enough"


def node_class(item: Manifest) -> NodeClassState:
    """Convert a VLMNodeClass; the API server has validated its fields."""
    spec, status = item.get("spec", {}), item.get("status", {})
    accelerator, cost = spec.get("accelerator") or {}, spec.get("cost") or {}
    spot = bool(spec.get("spot", False))
    price = cost.get("spotPerHour", cost.get("perHour")) if spot else cost.get("perHour")
    expected = spec.get("expectedStartupSeconds", NodeClassState.startup_seconds)
    return NodeClassState(
        name=item["metadata"]["name"],
        node_selector=spec.get("nodeSelector", {}),
        tolerations=tuple(spec.get("tolerations", [])),
        accelerator=accelerator.get("resourceName"),
        accelerators=int(accelerator.get("count", 1)) if accelerator else 0,
        cost_per_hour=None if price is None else float(quantity.parse(str(price))),
        spot=spot,
        speed={
            Role(entry["role"]): entry.get("relativePercent", 100) / 100
            for entry in spec.get("speed", [])
        },
        roles=frozenset(Role(role) for role in spec.get("roles", [])),
        startup_seconds=float(status.get("measuredStartupP90Seconds", expected)),
    )
