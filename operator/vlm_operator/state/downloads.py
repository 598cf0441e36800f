"""The download of a model into a claim: what the cluster shows of it. Pure.

spec.model.cache ─▶ digest of uri, revision and claim ─▶ claim and Job SERVICE-model-DIGEST

Another revision has another digest, so its claim and Job exist beside the old ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vlm_operator import names
from vlm_operator.api import VLMService
from vlm_operator.api.model import ModelSource
from vlm_operator.cluster import CLAIM, JOB, Manifest, epoch_seconds
from vlm_operator.state.cluster_view import DownloadPod, Observed
from vlm_operator.state.deployments import ANNOTATION_INPUTS


@dataclasses.dataclass(frozen=True)
class DownloadState:
    """The claim and the Job of one revision of the model, as observed.

    Attributes:
        name: of the claim and of the Job.
        digest: the value of their label.
        claim: the claim; None if the service has none of that name.
        job: the Job; None if the service has none of that name.
        pods: the Job's pods, oldest first.
        inputs: digest of the pod template with which the Job was created; "" without a Job.
    """

    name: str
    digest: str
    claim: Manifest | None = None
    job: Manifest | None = None
    pods: tuple[DownloadPod, ...] = ()
    inputs: str = ""

    @property
    def complete(self) -> bool:
        """Whether the present claim holds the whole model."""
        return self.job is not None and not self.orphaned and _holds(self.job, "Complete")

    @property
    def failed(self) -> str | None:
        """The Job's message about its failure; None if it has not failed."""
        if self.job is None:
            return None
        for item in _conditions(self.job):
            if item["type"] == "Failed" and item["status"] == "True":
                return str(item.get("message", ""))
        return None

    @property
    def orphaned(self) -> bool:
        """Whether the claim that the Job filled is gone; a later one of its name is empty."""
        if self.job is None or self.claim is None:
            return self.job is not None
        return _created(self.claim) > _created(self.job)

    @property
    def claim_phase(self) -> str:
        """`Pending`, `Bound`, `Lost`, or `Missing` without a claim."""
        if self.claim is None:
            return "Missing"
        return str(self.claim.get("status", {}).get("phase", "Pending"))

    @property
    def running(self) -> tuple[DownloadPod, ...]:
        """Pods that may still write into the claim."""
        return tuple(pod for pod in self.pods if not pod.finished)


def model_digest(model: ModelSource) -> str:
    """Return the digest of what a claim holds; "" without `model.cache`."""
    if model.cache is None:
        return ""
    value = [model.uri, model.revision, model.cache.claim.to_dict()]
    return names.digest_of(value, length=8)


def claim_name(service: VLMService) -> str:
    """Return the name of the claim, and of its Job; "" without `model.cache`."""
    digest = model_digest(service.spec.model)
    return names.model_claim(service.name, digest) if digest else ""


def download_state(service: VLMService, observed: Observed) -> DownloadState | None:
    """Return the download that the manifest asks for; None without `model.cache`."""
    name = claim_name(service)
    if not name:
        return None
    job = observed.child(JOB.kind, name)
    pods = (pod for pod in observed.downloads if pod.job == name)
    notes = {} if job is None else job["metadata"].get("annotations", {})
    return DownloadState(
        name=name,
        digest=model_digest(service.spec.model),
        claim=observed.child(CLAIM.kind, name),
        job=job,
        pods=tuple(sorted(pods, key=lambda pod: (pod.created, pod.name))),
        inputs=str(notes.get(ANNOTATION_INPUTS, "")),
    )


def job_is_complete(job: Mapping[str, Any]) -> bool:
    """Whether a Job has completed."""
    return _holds(job, "Complete")


def _holds(job: Mapping[str, Any], kind: str) -> bool:
    return any(item["type"] == kind and item["status"] == "True" for item in _conditions(job))


def _conditions(job: Mapping[str, Any]) -> list[Manifest]:
    return list(job.get("status", {}).get("conditions") or ())


def _created(item: Mapping[str, Any]) -> float:
    moment = item["metadata"].get("creationTimestamp")
    return epoch_seconds(moment) if moment else 0.0
