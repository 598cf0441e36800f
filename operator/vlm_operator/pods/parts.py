"""Builds the parts of every pod: labels, security context, environment, probes, model mount.

A pod mounts its model read-only from a PersistentVolumeClaim (`pvc://`) or an image (`oci://`), or
downloads it into an emptyDir (`hf://`). The scheme decides the `--model` argument and one volume.
With `model.cache`, which `s3://` requires, it mounts the claim that a Job fills.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from vlm_operator import names
from vlm_operator.api import VLMService, quantity
from vlm_operator.api.model import ModelSource
from vlm_operator.api.placement import Placement
from vlm_operator.api.pod_template import IDENTITY_PATH
from vlm_operator.api.pool import EncoderCache
from vlm_operator.names import Role
from vlm_operator.state import Revision
from vlm_operator.state.downloads import claim_name
from vlm_operator.state.identities import secret_name

MODEL_PATH = "/models/model"
CHECKPOINT = "checkpoint"
"""Directory of the model in a claim of `model.cache`; volumes have directories of their own."""
CACHE_PATH = "/models/cache"
DISK_PATH = "/embeddings"
SCALES_PATH, SCALES_FILE = "/activation-scales", "scales.json"
DISK_PERCENT = 90  # of the emptyDir, for the files
GRACE_SECONDS = 30  # added to the drain timeout, for the process to exit
START_SECONDS = 1800  # model.startTimeoutSeconds if unset
Part = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Images:
    """The operator's settings that enter the pods of new revisions.

    Attributes:
        pull_policy: imagePullPolicy; "" leaves Kubernetes' default.
        bind: address that the pods listen on.
    """

    pull_policy: str = ""
    bind: str = "::"


@dataclasses.dataclass(frozen=True)
class ModelMount:
    """The parts of a pod that give a container its model."""

    args: tuple[str, ...]
    mount: Part
    volume: Part
    env: tuple[Part, ...] = ()


def object_labels(service: str, role: Role | str) -> dict[str, str]:
    return {
        names.LABEL_APP_NAME: names.APP_NAME,
        names.LABEL_APP_COMPONENT: str(role),
        names.LABEL_APP_PART_OF: service,
        names.LABEL_APP_MANAGED_BY: names.MANAGER,
        names.LABEL_SERVICE: service,
        names.LABEL_ROLE: str(role),
    }


def selector(service: str, role: Role) -> dict[str, str]:
    """Return the labels that select all pods of a role, of every revision."""
    return {names.LABEL_SERVICE: service, names.LABEL_ROLE: str(role)}


def labels(service: VLMService, revision: Revision) -> dict[str, str]:
    pod_labels = object_labels(service.name, revision.role)
    if revision.variant:
        pod_labels[names.LABEL_VARIANT] = revision.variant
    pod_labels[names.LABEL_REVISION] = revision.id
    pod_labels[names.LABEL_COMPAT] = revision.resolved.compat
    return pod_labels


def environment(service: VLMService, revision: Revision) -> list[Part]:
    """Return variables from the downward API, the pod's place in the service, and the collector."""
    fields = {
        "POD_NAME": "metadata.name",
        "POD_UID": "metadata.uid",
        "POD_IP": "status.podIP",
        "POD_NAMESPACE": "metadata.namespace",
        "NODE_NAME": "spec.nodeName",
    }
    variables: list[Part] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in fields.items()
    ]
    identity = {
        "TRIPTYCH_SERVICE": service.name,
        "TRIPTYCH_ROLE": revision.role.value,
        "TRIPTYCH_VARIANT": revision.variant,
        "TRIPTYCH_REVISION": revision.id,
    }
    found = variables + [{"name": name, "value": value} for name, value in identity.items()]
    tracing = service.spec.tracing
    if tracing is not None:  # the names are OpenTelemetry's
        found += [
            {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": tracing.endpoint},
            {"name": "OTEL_TRACES_SAMPLER_ARG", "value": f"{tracing.sample_percent / 100:.6g}"},
        ]
    return found


def model_mount(service: VLMService) -> ModelMount:
    """Convert `spec.model.uri` to arguments, a mount and a volume."""
    model = service.spec.model
    scheme, _, rest = model.uri.partition("://")
    revision = revision_argument(model)
    cached = claim_name(service)
    if scheme in ("pvc", "oci") or cached:
        source: Part
        if scheme == "pvc" or cached:
            claim, _, path = rest.strip("/").partition("/")
            if cached:
                claim, path = cached, CHECKPOINT
            source = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        else:
            reference, _, path = rest.partition("#")
            source = {"image": {"reference": reference}}
        return ModelMount(
            args=(f"--model={'/'.join(filter(None, (MODEL_PATH, path)))}", *revision),
            mount={"name": "triptych-model", "mountPath": MODEL_PATH, "readOnly": True},
            volume={"name": "triptych-model", **source},
        )
    return ModelMount(
        args=(f"--model={model.uri}", *revision, f"--model-cache={CACHE_PATH}"),
        mount={"name": "triptych-model-cache", "mountPath": CACHE_PATH},
        volume={"name": "triptych-model-cache", "emptyDir": {}},
        env=credentials(service),
    )


def revision_argument(model: ModelSource) -> tuple[str, ...]:
    """Return the argument with the model's revision; empty without one."""
    return (f"--model-revision={model.revision}",) if model.revision else ()


def credentials(service: VLMService) -> tuple[Part, ...]:
    """Return the variables with the credentials of the model's source; empty without a Secret."""
    model = service.spec.model
    secret = model.credentials_secret_ref
    if secret is None:
        return ()
    if model.uri.startswith("s3://"):
        return (
            _secret_variable("AWS_ACCESS_KEY_ID", secret.name, "AWS_ACCESS_KEY_ID"),
            _secret_variable("AWS_SECRET_ACCESS_KEY", secret.name, "AWS_SECRET_ACCESS_KEY"),
            _secret_variable("AWS_SESSION_TOKEN", secret.name, "AWS_SESSION_TOKEN", optional=True),
        )
    return (_secret_variable("HF_TOKEN", secret.name, "token"),)


def _secret_variable(name: str, secret: str, key: str, *, optional: bool = False) -> Part:
    reference: Part = {"name": secret, "key": key}
    if optional:
        reference["optional"] = True
    return {"name": name, "valueFrom": {"secretKeyRef": reference}}


@dataclasses.dataclass(frozen=True)
class IdentityMount:
    """The parts of a pod that give a container its certificate; empty for plaintext."""

    args: tuple[str, ...] = ()
    mounts: tuple[Part, ...] = ()
    volumes: tuple[Part, ...] = ()


def identity_mount(service: VLMService, revision: Revision) -> IdentityMount:
    """Mount the Secret of a role.

    The mode of the files is 0444: only the containers that mount the volume can read them. With
    0440 a pod needs an fsGroup, which changes the owner of other volumes, too, and which OpenShift
    refuses.
    """
    identity = revision.resolved.identity
    if not identity:
        return IdentityMount()
    secret = {
        "secretName": secret_name(service.name, revision.role, identity),
        "defaultMode": 0o444,
    }
    name = "triptych-identity"
    return IdentityMount(
        args=(f"--identity-dir={IDENTITY_PATH}",),
        mounts=({"name": name, "mountPath": IDENTITY_PATH, "readOnly": True},),
        volumes=({"name": name, "secret": secret},),
    )


@dataclasses.dataclass(frozen=True)
class DiskMount:
    """The parts of a pod with a disk for embeddings; empty without one."""

    args: tuple[str, ...] = ()
    mounts: tuple[Part, ...] = ()
    volumes: tuple[Part, ...] = ()
    requests: Mapping[str, str] = dataclasses.field(default_factory=dict)


def disk_mount(cache: EncoderCache | None) -> DiskMount:
    """Mount the disk of the encoder cache: an emptyDir, which outlives containers, not the pod.

    The kubelet evicts a pod whose emptyDir exceeds its limit, so files get less than all of it.
    """
    if cache is None or cache.disk is None:
        return DiskMount()
    disk, name = cache.disk, "triptych-embeddings"
    num_bytes = int(quantity.parse(disk.size)) * DISK_PERCENT // 100
    return DiskMount(
        args=(
            f"--embedding-disk-dir={DISK_PATH}",
            f"--embedding-disk-bytes={num_bytes}",
            f"--embedding-disk-age-seconds={disk.max_age_seconds}",
        ),
        mounts=({"name": name, "mountPath": DISK_PATH},),
        volumes=({"name": name, "emptyDir": {"sizeLimit": disk.size}},),
        requests={"ephemeral-storage": disk.size},
    )


@dataclasses.dataclass(frozen=True)
class ScalesMount:
    """The parts of a pod with scales of activations; empty without any."""

    args: tuple[str, ...] = ()
    mounts: tuple[Part, ...] = ()
    volumes: tuple[Part, ...] = ()


def scales_mount(model: ModelSource) -> ScalesMount:
    """Mount the key of a ConfigMap with the scales of int8 layers' inputs.

    The pod reads the file at start only. Its hash is an argument: a ConfigMap that changes without
    the service gives no pod other scales.
    """
    if model.weights is None or model.weights.activation_scales is None:
        return ScalesMount()
    scales, name = model.weights.activation_scales, "triptych-activation-scales"
    key = scales.config_map_key_ref
    items = [{"key": key.key, "path": SCALES_FILE}]
    return ScalesMount(
        args=(
            f"--activation-scales={SCALES_PATH}/{SCALES_FILE}",
            f"--activation-scales-hash={scales.sha256}",
        ),
        mounts=({"name": name, "mountPath": SCALES_PATH, "readOnly": True},),
        volumes=({"name": name, "configMap": {"name": key.name, "items": items}},),
    )


def start_seconds(service: VLMService) -> int:
    """Return the seconds that a pod has to download and load the model and to warm up."""
    return service.spec.model.start_timeout_seconds or START_SECONDS


def probes(service: VLMService, readiness: Part, *, live: Part) -> Part:
    """Return the probes of a container; `readiness` is the handler of startup and readiness.

    `live` is the GET of the liveness probe.

    The startup probe allows `model.startTimeoutSeconds` to load the weights. The readiness probe
    runs every second, so that a service is Ready within a second of its last pod.
    """
    return {
        "startupProbe": {
            **readiness,
            "periodSeconds": 1,
            "timeoutSeconds": 2,
            "failureThreshold": start_seconds(service),
        },
        "readinessProbe": {
            **readiness,
            "periodSeconds": 1,
            "timeoutSeconds": 2,
            "failureThreshold": 3,
        },
        "livenessProbe": {
            "httpGet": live,
            "periodSeconds": 5,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
    }


def container_security() -> Part:
    """Return the settings that Pod Security `restricted` requires, and a read-only root."""
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
    policy = revision.resolved.pull_policy
    return {**container, "imagePullPolicy": policy} if policy else container
