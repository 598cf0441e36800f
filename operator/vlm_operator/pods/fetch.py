"""Builds the claim and the Job that download a model once for all pods of a service.

The Job's pods are never restarted: a failed pod keeps its termination message, which has the cause.
A cause that needs a user ends the Job at once. A lost node or an eviction counts as no attempt.
"""

from __future__ import annotations

from vlm_operator import names
from vlm_operator.api import VLMService
from vlm_operator.api.model import ModelCache
from vlm_operator.pods.overlay import with_overlay
from vlm_operator.pods.parts import (
    CHECKPOINT,
    MODEL_PATH,
    Images,
    Part,
    container_security,
    credentials,
    object_labels,
    revision_argument,
)
from vlm_operator.state.downloads import DownloadState

ATTEMPTS = 6
"""Pods that may fail after the first one. Kubernetes waits 10 s, 20 s … 6 min between them."""
EXIT_NEEDS_USER = 3
"""Exit code of `vlm-worker fetch` if another attempt would fail alike (docs/contract.md)."""
FS_GROUP = 65532
"""Group that owns the volume, so that a user other than root may write there."""


def cache_of(service: VLMService) -> ModelCache:
    """Return `spec.model.cache` of a service that has it."""
    cache = service.spec.model.cache
    assert cache is not None, "the service has a cache"
    return cache


def claim_spec(service: VLMService) -> Part:
    """Return the spec of the PersistentVolumeClaim."""
    claim = cache_of(service).claim
    spec: Part = {
        "accessModes": [mode.value for mode in claim.access_modes],
        "resources": {"requests": {"storage": claim.size}},
    }
    if claim.storage_class_name is not None:
        spec["storageClassName"] = claim.storage_class_name
    return spec


def job_spec(service: VLMService, download: DownloadState, images: Images) -> Part:
    """Return the spec of the Job."""
    refused = {"containerName": "fetch", "operator": "In", "values": [EXIT_NEEDS_USER]}
    return {
        "backoffLimit": ATTEMPTS,
        "podReplacementPolicy": "Failed",  # two pods never write into one claim
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": refused},
                {
                    "action": "Ignore",
                    "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
                },
            ]
        },
        "template": fetch_template(service, download, images),
    }


def fetch_template(service: VLMService, download: DownloadState, images: Images) -> Part:
    """Return the pod template of the Job: no accelerator, restricted, no token of Kubernetes."""
    model = service.spec.model
    container: Part = {
        "name": "fetch",
        "image": service.spec.image,
        "command": ["vlm-worker"],
        "args": [
            "fetch",
            f"--model={model.uri}",
            *revision_argument(model),
            f"--into={MODEL_PATH}/{CHECKPOINT}",
            f"--bind={images.bind}",
            f"--http-port={names.PORT_HTTP}",
        ],
        "env": [
            {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
            {"name": "HF_HOME", "value": "/tmp/hub"},  # noqa: S108
            *credentials(service),
        ],
        "ports": [{"name": "http", "containerPort": names.PORT_HTTP, "protocol": "TCP"}],
        "resources": {
            "requests": {"cpu": "500m", "memory": "1Gi"},
            "limits": {"memory": "4Gi"},
        },
        "securityContext": container_security(),
        "volumeMounts": [
            {"name": "triptych-tmp", "mountPath": "/tmp"},  # noqa: S108
            {"name": "triptych-model", "mountPath": MODEL_PATH},
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if images.pull_policy:
        container["imagePullPolicy"] = images.pull_policy
    spec: Part = {
        "serviceAccountName": names.child(service.name, names.MODEL_PART),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "securityContext": {
            "runAsNonRoot": True,
            "fsGroup": FS_GROUP,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": "triptych-tmp", "emptyDir": {}},
            {"name": "triptych-model", "persistentVolumeClaim": {"claimName": download.name}},
        ],
    }
    secrets = [{"name": item.name} for item in service.spec.image_pull_secrets]
    if secrets:
        spec["imagePullSecrets"] = secrets
    pod_labels = labels(service, download)
    template = {"metadata": {"labels": pod_labels}, "spec": spec}
    return with_overlay(
        template,
        cache_of(service).pod_template,
        spread={key: pod_labels[key] for key in (names.LABEL_SERVICE, names.LABEL_ROLE)},
    )


def labels(service: VLMService, download: DownloadState) -> dict[str, str]:
    """Return the labels of a claim, its Job and its pods.

    The role is none of a pool or gateway, so no Service, budget or gateway selects the pods.
    """
    return {**object_labels(service.name, names.MODEL_PART), names.LABEL_MODEL: download.digest}
