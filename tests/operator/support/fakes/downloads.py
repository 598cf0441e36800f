"""The claims and Jobs of `model.cache`, as a provisioner and the Job controller treat them."""

from __future__ import annotations

import copy
from typing import Any

from support.fakes.cluster import FakeCluster
from vlm_operator.cluster import CLAIM, JOB, POD, Manifest

GATED = (
    "vlm-worker: --model: hf://org/name: the model is gated; accept its licence on the hub, and "
    "give a token (HF_TOKEN; in a VLMService, x)"
)


def run_downloads(
    cluster: FakeCluster, *, end: bool = False, error: str = "", bind: bool = True
) -> None:
    """Bind claims, start the pods of Jobs, and perhaps end them.

    Args:
        cluster: in which.
        end: whether the downloads end; with `error`, they fail.
        error: the last output of a pod whose failure needs a user.
        bind: whether a provisioner makes volumes.
    """
    for claim in cluster.all(CLAIM):
        phase = "Bound" if bind else "Pending"
        _status(cluster, claim, {"phase": phase})
    for job in cluster.all(JOB):
        if not job.get("status", {}).get("conditions"):
            pod = _pod_of(cluster, job)
            _run(cluster, pod, bound=bind, end=end, error=error)
            if end:
                failed = {"reason": "PodFailurePolicy", "message": "Container fetch failed"}
                kind: dict[str, Any] = {"type": "Complete"} if not error else {"type": "Failed"}
                stamp = {"status": "True", "lastTransitionTime": cluster.clock.stamp()}
                condition = {**kind, **stamp, **(failed if error else {})}
                _status(cluster, job, {"conditions": [condition]})


def _status(cluster: FakeCluster, item: Manifest, status: dict[str, Any]) -> None:
    kind = CLAIM if item["kind"] == CLAIM.kind else JOB
    meta = item["metadata"]
    cluster.edit(
        kind, meta["namespace"], meta["name"], lambda live: live.update(status=status),
        manager="controllers",
    )  # fmt: skip


def _pod_of(cluster: FakeCluster, job: Manifest) -> Manifest:
    meta = job["metadata"]
    name = f"{meta['name']}-abcde"
    for pod in cluster.all(POD):
        if pod["metadata"]["name"] == name:
            return pod
    template = copy.deepcopy(job["spec"]["template"])
    owner = {"apiVersion": job["apiVersion"], "kind": "Job", "controller": True}
    labels = {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": meta["name"]}
    return cluster.hardware(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": meta["namespace"],
                "labels": labels,
                "ownerReferences": [{**owner, "name": meta["name"], "uid": meta["uid"]}],
            },
            "spec": template["spec"],
        }
    )


def _run(cluster: FakeCluster, pod: Manifest, *, bound: bool, end: bool, error: str) -> None:
    unbound = "pod has unbound immediate PersistentVolumeClaims"
    scheduled: dict[str, Any] = {"type": "PodScheduled", "status": "True" if bound else "False"}
    scheduled["lastTransitionTime"] = cluster.clock.stamp()
    if not bound:
        scheduled |= {"reason": "Unschedulable", "message": unbound}
    ended = {"exitCode": 3 if error else 0, "reason": "Error" if error else "Completed"}
    if error:
        ended["message"] = f"...\n{error}\n"
    state = {"terminated": ended} if end else {"running": {"startedAt": cluster.clock.stamp()}}
    phase = "Pending"
    if bound:
        phase = "Running" if not end else "Failed" if error else "Succeeded"

    def change(item: Manifest) -> None:
        if bound:
            item["spec"]["nodeName"] = "node-1"
        item["status"] = {
            "phase": phase,
            "conditions": [scheduled],
            "containerStatuses": [{"name": "fetch", "ready": False, "state": state}]
            if bound
            else [],
        }

    meta = pod["metadata"]
    cluster.edit(POD, meta["namespace"], meta["name"], change, manager="kubelet")
