"""Plans the claim and the Job of `spec.model.cache`, and which old ones stay.

wanted digest ─ no claim ─▶ claim      no Job, no running pod ─▶ Job
              └ Job is of another claim, or not complete and outdated ─▶ deleted, then made again
other digests ─ a Deployment or a pod mounts the claim ─▶ claim stays, its Job if it is complete
              └ else ─▶ deleted

Both are written once: a Job's template is immutable, and others may enlarge a claim or suspend a
Job.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from vlm_operator import names
from vlm_operator.api import VLMService
from vlm_operator.cluster import CLAIM, DEPLOYMENT, JOB, Kind, Manifest
from vlm_operator.pods.fetch import claim_spec, job_spec, labels
from vlm_operator.pods.parts import Images
from vlm_operator.state import Observed
from vlm_operator.state.deployments import ANNOTATION_INPUTS
from vlm_operator.state.downloads import DownloadState, download_state, job_is_complete


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """Claims and Jobs of a service.

    Attributes:
        objects: those to create; empty if all exist.
        kept: kind and name of those that stay as they are.
    """

    objects: tuple[Manifest, ...] = ()
    kept: frozenset[tuple[str, str]] = frozenset()


def plan_cache(
    service: VLMService, observed: Observed, images: Images, owner: dict[str, object]
) -> CachePlan:
    """Decide the claims and Jobs of a service.

    A stopped service downloads nothing; files that are in a claim already stay there.

    Args:
        service: with every default filled in.
        observed: state of the cluster.
        images: the operator's settings of pods.
        owner: ownerReference of the objects.
    """
    download = download_state(service, observed)
    objects: list[Manifest] = []
    kept: set[tuple[str, str]] = set()
    if download is not None:
        spec = job_spec(service, download, images)
        inputs = names.digest_of(spec["template"], length=16)
        if download.claim is not None:
            kept.add((CLAIM.kind, download.name))
        elif not service.spec.stopped:
            objects.append(_object(service, download, owner, CLAIM, claim_spec(service)))
        if download.job is not None:
            if _is_current(download, inputs, stopped=service.spec.stopped):
                kept.add((JOB.kind, download.name))
        elif not service.spec.stopped and not download.running:
            job = _object(service, download, owner, JOB, spec)
            job["metadata"]["annotations"] = {ANNOTATION_INPUTS: inputs}
            objects.append(job)
    mounted = set(mounted_claims(observed))
    for claim in observed.of_kind(CLAIM.kind):
        name = claim["metadata"]["name"]
        if name not in mounted:
            continue
        kept.add((CLAIM.kind, name))
        filled = observed.child(JOB.kind, name)
        other = download is None or name != download.name
        if other and filled is not None and job_is_complete(filled):
            kept.add((JOB.kind, name))
    return CachePlan(tuple(objects), frozenset(kept))


def mounted_claims(observed: Observed) -> Iterator[str]:
    """Yield the claims that pods mount, or that pods of a Deployment would mount."""
    for pod in observed.pods:
        if not pod.finished:
            yield from pod.claims
    for item in observed.of_kind(DEPLOYMENT.kind):
        for volume in item["spec"]["template"]["spec"].get("volumes", ()):
            if claim := volume.get("persistentVolumeClaim"):
                yield claim["claimName"]


def _is_current(download: DownloadState, inputs: str, *, stopped: bool) -> bool:
    """Whether the Job stays: it has completed, or a new one would be the same."""
    if download.orphaned:
        return False
    return download.complete or (download.inputs == inputs and not stopped)


def _object(
    service: VLMService,
    download: DownloadState,
    owner: dict[str, object],
    kind: Kind,
    spec: Manifest,
) -> Manifest:
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {
            "name": download.name,
            "namespace": service.namespace,
            "labels": labels(service, download),
            "ownerReferences": [owner],
        },
        "spec": spec,
    }
