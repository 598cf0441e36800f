"""What every pod has: labels, security context, environment, probes, the model's mount.

A worker takes its model read-only from a claim (`pvc://`), or downloads it into an emptyDir
(`hf://`); which of the two decides the first argument of its command line and one volume.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vlm_operator import names
from vlm_operator.api import Placement, VLMService
from vlm_operator.names import Role
from vlm_operator.state import Revision

MODEL_PATH = "/models/model"
CACHE_PATH = "/models/cache"
GRACE_SECONDS = 30  # beyond the drain timeout, for the process to end
START_SECONDS = 1800  # until weights are downloaded, loaded and warm
Part = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Images:
    """What the operator's own settings add to the pods of new revisions."""

    pull_policy: str = ""
    bind: str = "::"


@dataclasses.dataclass(frozen=True)
class ModelMount:
    """How a container comes to its model."""

    args: tuple[str, ...]
    mount: Part
    volume: Part
    env: tuple[Part, ...] = ()


def object_labels(service: str, role: Role | str) -> dict[str, str]:
    """Labels of everything that belongs to one role of a service."""
    return {
        names.LABEL_APP_NAME: names.APP_NAME,
        names.LABEL_APP_COMPONENT: str(role),
        names.LABEL_APP_PART_OF: service,
        names.LABEL_APP_MANAGED_BY: names.MANAGER,
        names.LABEL_SERVICE: service,
        names.LABEL_ROLE: str(role),
    }


def selector(service: str, role: Role) -> dict[str, str]:
    """What finds all pods of a role, through every revision."""
    return {names.LABEL_SERVICE: service, names.LABEL_ROLE: str(role)}


def labels(service: VLMService, revision: Revision) -> dict[str, str]:
    """Labels of one revision's Deployment and pods."""
    found = object_labels(service.name, revision.role)
    if revision.variant:
        found[names.LABEL_VARIANT] = revision.variant
    found[names.LABEL_REVISION] = revision.id
    found[names.LABEL_COMPAT] = revision.resolved.compat
    return found


def environment(service: VLMService, revision: Revision) -> list[Part]:
    """The downward API, and what the process is part of."""
    fields = {
        "POD_NAME": "metadata.name",
        "POD_UID": "metadata.uid",
        "POD_IP": "status.podIP",
        "POD_NAMESPACE": "metadata.namespace",
        "NODE_NAME": "spec.nodeName",
    }
    found: list[Part] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    known = {
        "TRIPTYCH_SERVICE": service.name,
        "TRIPTYCH_ROLE": revision.role.value,
        "TRIPTYCH_VARIANT": revision.variant,
        "TRIPTYCH_REVISION": revision.id,
    }
    return found + [{"name": name, "value": value} for name, value in known.items()]


def model_mount(service: VLMService) -> ModelMount:
    """Turn `spec.model.uri` into arguments, a mount and a volume."""
    model = service.spec.model
    scheme, _, rest = model.uri.partition("://")
    revision = (f"--model-revision={model.revision}",) if model.revision else ()
    if scheme == "pvc":
        claim, _, path = rest.strip("/").partition("/")
        return ModelMount(
            args=(f"--model={'/'.join(filter(None, (MODEL_PATH, path)))}", *revision),
            mount={"name": "triptych-model", "mountPath": MODEL_PATH, "readOnly": True},
            volume={
                "name": "triptych-model",
                "persistentVolumeClaim": {"claimName": claim, "readOnly": True},
            },
        )
    secret = model.credentials_secret_ref
    token: Part = {"name": "HF_TOKEN"}
    if secret is not None:
        token["valueFrom"] = {"secretKeyRef": {"name": secret.name, "key": "token"}}
    return ModelMount(
        args=(f"--model={model.uri}", *revision, f"--model-cache={CACHE_PATH}"),
        mount={"name": "triptych-model-cache", "mountPath": CACHE_PATH},
        volume={"name": "triptych-model-cache", "emptyDir": {}},
        env=() if secret is None else (token,),
    )


def probes(readiness: Part, *, port: str) -> Part:
    """Startup waits for the weights, liveness for progress; readiness is the caller's.

    Readiness asks every second: a service is Ready within a second of its last pod.
    """
    return {
        "startupProbe": {
            **readiness,
            "periodSeconds": 1,
            "timeoutSeconds": 2,
            "failureThreshold": START_SECONDS,
        },
        "readinessProbe": {
            **readiness,
            "periodSeconds": 1,
            "timeoutSeconds": 2,
            "failureThreshold": 3,
        },
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": port},
            "periodSeconds": 5,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
    }


def container_security() -> Part:
    """What Pod Security `restricted` asks of a container, and a read-only root beside it."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
    }


def pod_spec(
    service: VLMService,
    revision: Revision,
    *,
    account: str,
    token: bool,
    placement: Placement | None,
) -> Part:
    """Everything of a PodSpec but containers and volumes."""
    spec: Part = {
        "serviceAccountName": account,
        "automountServiceAccountToken": token,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": revision.resolved.drain_seconds + GRACE_SECONDS,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    secrets = [{"name": item.name} for item in service.spec.image_pull_secrets]
    if secrets:
        spec["imagePullSecrets"] = secrets
    if placement is not None:
        spec |= {
            key: value
            for key, value in placement.to_dict().items()
            if value and key in ("nodeSelector", "tolerations", "affinity")
        }
    return spec


def with_pull_policy(container: Part, revision: Revision) -> Part:
    """Set imagePullPolicy where the operator was told one when the revision was made."""
    policy = revision.resolved.pull_policy
    return {**container, "imagePullPolicy": policy} if policy else container
