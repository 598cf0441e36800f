"""Controllers and kubelets that act when a test calls them; and pods that answer."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import hashlib
import json
from collections.abc import Callable, Iterable
from typing import Any

from support.fakes.cluster import FakeCluster
from vlm_operator.cluster import DEPLOYMENT, POD, REPLICA_SET, Kind, Manifest
from vlm_operator.names import Role
from vlm_operator.state import ANNOTATION_DELETION_COST, KvTokens, PodState, Sample, owned_by
from vlm_operator.state.cluster_view import DownloadPod, DownloadProgress
from vlm_operator.state.pod_stats import ModelFacts


def run_controllers(
    cluster: FakeCluster,
    *,
    start: bool | Callable[[Manifest], bool] = True,
    crash: Callable[[Manifest], bool] = lambda _: False,
) -> None:
    """Let Deployments have their pods, and pods start.

    Args:
        cluster: in which.
        start: whether pods find a node, all alike or each by itself.
        crash: pods whose process ends as soon as it starts.
    """
    for deployment in cluster.all(DEPLOYMENT):
        _scale(cluster, deployment)
    for pod in cluster.all(POD):
        if pod["metadata"].get("ownerReferences", [{}])[0].get("kind") == "Job":
            continue  # `run_downloads` runs it
        if start is True or (start is not False and start(pod)):
            _run(cluster, pod, crash=crash(pod))
    for deployment in cluster.all(DEPLOYMENT):
        _count(cluster, deployment)


def start_pods(cluster: FakeCluster) -> None:
    """Put every pod on a node, start its containers, and hold Ready to its readiness gates."""
    for pod in cluster.all(POD):
        _run(cluster, pod, crash=False)


def _run(cluster: FakeCluster, pod: Manifest, *, crash: bool) -> None:
    meta = pod["metadata"]
    conditions = {item["type"]: item for item in pod.get("status", {}).get("conditions", [])}
    gates = [item["conditionType"] for item in pod["spec"].get("readinessGates", [])]
    opened = all(conditions.get(gate, {}).get("status") == "True" for gate in gates)
    wanted = {
        "PodScheduled": "True",
        "ContainersReady": "False" if crash else "True",
        "Ready": "True" if opened and not crash else "False",
    }
    for kind, status in wanted.items():
        if conditions.get(kind, {}).get("status") != status:
            stamp = cluster.clock.stamp()
            conditions[kind] = {"type": kind, "status": status, "lastTransitionTime": stamp}

    def change(item: Manifest) -> None:
        item["spec"]["nodeName"] = "node-1"
        status = {"phase": "Running", "podIP": "127.0.1.1"}
        item["status"] = {**item.get("status", {}), **status}
        item["status"]["conditions"] = list(conditions.values())
        item["status"]["containerStatuses"] = [_CRASHING] if crash else []

    cluster.edit(POD, meta["namespace"], meta["name"], change, manager="kubelet")


_CRASHING: dict[str, Any] = {
    "name": "worker",
    "ready": False,
    "restartCount": 4,
    "state": {"waiting": {"reason": "CrashLoopBackOff"}},
    "lastState": {"terminated": {"reason": "Error", "exitCode": 1, "message": "no such weights"}},
}


def _replica_sets(cluster: FakeCluster, deployment: Manifest) -> dict[str, Manifest]:
    """A Deployment's ReplicaSets, by `pod-template-hash`."""
    meta = deployment["metadata"]
    return {
        item["metadata"]["labels"]["pod-template-hash"]: item
        for item in cluster.all(REPLICA_SET, meta["namespace"])
        if owned_by(item, meta["uid"])
    }


def _pods(cluster: FakeCluster, deployment: Manifest) -> list[Manifest]:
    owners = _replica_sets(cluster, deployment).values()
    return [
        pod
        for pod in cluster.all(POD, deployment["metadata"]["namespace"])
        if any(owned_by(pod, owner["metadata"]["uid"]) for owner in owners)
    ]


def _scale(cluster: FakeCluster, deployment: Manifest) -> None:
    """Make the pods as many as wanted, of the newest template; the cheapest go first."""
    meta, spec = deployment["metadata"], deployment["spec"]
    template = json.dumps(spec["template"], sort_keys=True)
    digest = hashlib.sha256(template.encode()).hexdigest()[:8]
    pods = _pods(cluster, deployment)
    for pod in pods:
        if pod["metadata"]["labels"]["pod-template-hash"] != digest:
            cluster.remove(POD, meta["namespace"], pod["metadata"]["name"])
    pods = _pods(cluster, deployment)
    for pod in sorted(pods, key=_price)[: max(0, len(pods) - spec["replicas"])]:
        cluster.remove(POD, meta["namespace"], pod["metadata"]["name"])
    for _ in range(spec["replicas"] - len(pods)):
        _create_pod(cluster, deployment, digest)


def _price(pod: Manifest) -> tuple[bool, bool, int]:
    conditions = {item["type"]: item for item in pod.get("status", {}).get("conditions", [])}
    ready = conditions.get("Ready", {}).get("status") == "True"
    notes = pod["metadata"].get("annotations", {})
    assigned = "nodeName" in pod["spec"]
    return (assigned, ready, int(notes.get(ANNOTATION_DELETION_COST, "0")))


def _create_pod(cluster: FakeCluster, deployment: Manifest, digest: str) -> None:
    meta, template = deployment["metadata"], deployment["spec"]["template"]
    taken = {pod["metadata"]["name"] for pod in cluster.all(POD)}
    number = next(n for n in range(1000) if f"{meta['name']}-{n}" not in taken)
    labels = {**template["metadata"]["labels"], "pod-template-hash": digest}
    replica_set = _replica_sets(cluster, deployment).get(digest)
    if replica_set is None:
        replica_set = cluster.hardware(
            _owned(deployment, REPLICA_SET, f"{meta['name']}-{digest}", labels, spec={})
        )
    spec = copy.deepcopy(template["spec"])
    cluster.hardware(_owned(replica_set, POD, f"{meta['name']}-{number}", labels, spec=spec))


def _owned(
    owner: Manifest, kind: Kind, name: str, labels: dict[str, str], *, spec: Manifest
) -> Manifest:
    """An object that a controller makes for another one."""
    meta = owner["metadata"]
    reference = {"apiVersion": owner["apiVersion"], "kind": owner["kind"], "controller": True}
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {
            "name": name,
            "namespace": meta["namespace"],
            "labels": labels,
            "ownerReferences": [{**reference, "name": meta["name"], "uid": meta["uid"]}],
        },
        "spec": spec,
    }


def _count(cluster: FakeCluster, deployment: Manifest) -> None:
    pods = _pods(cluster, deployment)
    since = [
        datetime.datetime.fromisoformat(item["lastTransitionTime"]).timestamp()
        for pod in pods
        for item in pod.get("status", {}).get("conditions", [])
        if item["type"] == "Ready" and item["status"] == "True"
    ]
    patience = deployment["spec"].get("minReadySeconds", 0)
    available = sum(cluster.clock.now - at >= patience for at in since)

    def change(item: Manifest) -> None:
        counts = {"replicas": len(pods), "readyReplicas": len(since)}
        item["status"] = {**counts, "availableReplicas": available}

    meta = deployment["metadata"]
    cluster.edit(DEPLOYMENT, meta["namespace"], meta["name"], change, manager="controllers")


def sample_of(pod: PodState, **changes: Any) -> Sample:
    """Return the /stats of an idle worker; `changes` replaces fields."""
    plain = Sample(
        pod_uid=pod.uid,
        boot_id="0" * 32,
        role=pod.role,
        phase="ready",
        message="",
        accepting=True,
        inflight=0,
        queued_requests=0,
        queued_work_seconds=0.0,
        started_work_seconds=0.0,
        kv=None if pod.role is Role.ENCODER else KvTokens(1000, 0, 0, 0, 1000, 0),
        model=None if pod.role is Role.GATEWAY else ModelFacts(64, 32, 1200, 4096),
        ttft={},
        config_hash=None,
    )
    return dataclasses.replace(plain, **changes)


class FakeScraper:
    """Pods that answer at once: idle ones, but for `busy` (in flight, by pod name)."""

    def __init__(self) -> None:
        self.busy: dict[str, int] = {}
        self.silent: set[str] = set()
        self.progress: dict[str, DownloadProgress] = {}
        self.asked = 0

    async def scrape(self, pods: Iterable[PodState]) -> dict[str, Sample]:
        """See `Scraper.scrape`."""
        self.asked += 1
        return {
            pod.uid: sample_of(pod, inflight=self.busy.get(pod.name, 0))
            for pod in pods
            if pod.containers_ready and pod.name not in self.silent
        }

    async def downloads(self, pods: Iterable[DownloadPod]) -> dict[str, DownloadProgress]:
        """See `Scraper.downloads`."""
        return {pod.uid: self.progress[pod.name] for pod in pods if pod.name in self.progress}


class Saying(FakeScraper):
    """Pods of one role say that they fail."""

    def __init__(self, role: str, **said: Any) -> None:
        super().__init__()
        self.role, self.said = role, said

    async def scrape(self, pods: Iterable[PodState]) -> dict[str, Sample]:
        asked = list(pods)
        found = await super().scrape(asked)
        changed = {pod.uid for pod in asked if pod.role == self.role}
        return {
            uid: dataclasses.replace(sample, **self.said) if uid in changed else sample
            for uid, sample in found.items()
        }
