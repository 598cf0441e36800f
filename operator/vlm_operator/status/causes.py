"""Finds why pods do not serve: one table of detector, reason, delay, cause and fix. Pure.

pod, its /stats, the manifest ─▶ POD_CAUSES, the first that applies ─▶ Problem
Deployment whose pods are refused ─▶ refused_pods ───────────────────▶ Problem

A message is `subject: cause; fix`. `vlm status`, `vlm doctor`, Events and docs/conditions.md use
the same text. Messages contain no duration and no load, so a lasting state is written once.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vlm_operator.cluster import epoch_seconds
from vlm_operator.names import Role
from vlm_operator.state import Manifest, PodState, Sample
from vlm_operator.state.cluster_view import ContainerState, error_line, one_line

Reference = tuple[str, str]  # kind and name of an object that a pod refers to

CRASHES = 3  # restarts after which a container does not recover by itself
LIVED_SECONDS = 600.0  # a process that ran for longer did not crash at start-up
_KILLED = 137
_IMAGE = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
    "SignatureValidationFailed",
)
_REFUSED = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_NOT_FOUND = re.compile(r'(?i)(persistentvolumeclaim|secret|configmap)s? "([^"]+)" not found')
_NO_KEY = re.compile(r"couldn't find key (\S+) in (Secret|ConfigMap) (?:\S+/)?(\S+)")
_QUOTA = re.compile(r"exceeded quota: (\S+?), requested: (.*?), used: .*?, limited: (.*)")
_KINDS = {
    "persistentvolumeclaim": "PersistentVolumeClaim",
    "secret": "Secret",
    "configmap": "ConfigMap",
}
_CLAIM = "PersistentVolumeClaim"
# Key of the manifest → kind of the object that it names, and the key of the name below it.
_NAMING = {
    "secretRef": ("Secret", "name"),
    "credentialsSecretRef": ("Secret", "name"),
    "secretKeyRef": ("Secret", "name"),
    "secret": ("Secret", "secretName"),
    "configMapRef": ("ConfigMap", "name"),
    "configMapKeyRef": ("ConfigMap", "name"),
    "configMap": ("ConfigMap", "name"),
    "persistentVolumeClaim": (_CLAIM, "claimName"),
}
_PROBED_SECONDS = 20.0  # no liveness probe ends a process sooner than this
REFUSED_SECONDS = 60.0
FIX_QUOTA = "raise the quota or lower replicas or resources"
FIX_REFUSED = "change what refuses them or the pod template"
FIX_MEMORY = "raise resources.limits.memory or lower kv.memory"
READ_LOG = "read its log with kubectl logs --previous"
ACCESS_DENIED = "the API server denies the list of pods"


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that keeps a pod from serving.

    Attributes:
        subject: the object, such as `pod demo-decode-0`.
        since: start of the problem, in seconds since the epoch.
        delay: seconds after which a user must act; None leaves that to the progress deadline.
    """

    reason: str
    subject: str
    cause: str
    fix: str
    since: float
    delay: float | None

    @property
    def message(self) -> str:
        return sentence(f"{self.subject}: {self.cause}", self.fix)

    def needs_user(self, now: float) -> bool:
        """Whether it has lasted for its delay, so that a user must act."""
        return self.delay is not None and now - self.since >= self.delay


@dataclasses.dataclass(frozen=True)
class Facts:
    """Input of a detector.

    Attributes:
        accelerators: number of devices that the pod requests.
        fields: manifest field that refers to a Secret, ConfigMap or claim, by kind and name.
    """

    pod: PodState
    sample: Sample | None
    accelerators: int
    fields: Mapping[Reference, str]


@dataclasses.dataclass(frozen=True)
class Cause:
    """One row of the table.

    Attributes:
        delay: seconds after which a user must act; None leaves that to the progress deadline.
        find: returns the texts of cause and fix, or None if the row does not apply.
    """

    reason: str
    delay: float | None
    find: Callable[[Facts], tuple[str, str] | None]


def sentence(cause: str, fix: str) -> str:
    """Join a cause and its fix; `split` is the inverse."""
    return f"{cause}; {fix}" if fix else cause


def split(message: str) -> tuple[str, str]:
    """Split a message into cause and fix; the fix is "" if there is none."""
    cause, mark, fix = message.rpartition("; ")
    return (cause, fix) if mark else (message, "")


def pod_problem(
    pod: PodState,
    sample: Sample | None,
    *,
    accelerators: int = 0,
    fields: Mapping[Reference, str] | None = None,
) -> Problem | None:
    """Return the problem of the first row that applies to a pod; None if no row does.

    `fields` is the result of `references`.
    """
    if pod.draining or pod.finished:
        return None
    facts = Facts(pod, sample, accelerators, fields or {})
    for row in POD_CAUSES:
        texts = row.find(facts)
        if texts is not None:
            cause, fix = texts
            subject = f"pod {pod.name}"
            return Problem(row.reason, subject, cause, fix, pod.waiting_since, row.delay)
    return None


def references(spec: Mapping[str, Any]) -> dict[Reference, str]:
    """Return the field of a manifest's spec that names each Secret, ConfigMap or claim."""
    fields: dict[Reference, str] = {}
    for kind, name, path in _walk(spec, ""):
        fields.setdefault((kind, name), path)
    uri = str(spec.get("model", {}).get("uri", ""))
    if uri.startswith("pvc://"):
        fields[_CLAIM, uri.removeprefix("pvc://").partition("/")[0]] = "model.uri"
    return fields


def refused_pods(deployment: Manifest) -> Problem | None:
    """Return why the API server refuses the pods of a Deployment; None if it accepts them."""
    conditions = deployment.get("status", {}).get("conditions", [])
    failure = next((item for item in conditions if item["type"] == "ReplicaFailure"), None)
    if failure is None or failure["status"] != "True":
        return None
    message = str(failure.get("message", ""))
    since = epoch_seconds(failure["lastTransitionTime"])
    subject = f"Deployment {deployment['metadata']['name']}"
    if "exceeded quota" in message:
        quota = _QUOTA.search(message)
        cause = (
            f"ResourceQuota {quota[1]} allows {quota[3]}, one more pod requests {quota[2]}"
            if quota
            else f"pods exceed a ResourceQuota: {one_line(message.partition('quota: ')[2])}"
        )
        return Problem("QuotaExceeded", subject, cause, FIX_QUOTA, since, REFUSED_SECONDS)
    # each attempt has a new pod name, which would change the message
    cause = "pods are refused: " + one_line(re.sub(r'^pods "[^"]*" is ', "", message))
    return Problem("PodsRefused", subject, cause, FIX_REFUSED, since, REFUSED_SECONDS)


def _missing_reference(facts: Facts) -> tuple[str, str] | None:
    for text in (
        facts.pod.unscheduled,
        *(item.waiting_message for item in _waiting(facts.pod, _REFUSED)),
    ):
        if match := _NOT_FOUND.search(text):
            kind, name = _KINDS[match[1].lower()], match[2]
            return f'{kind} "{name}" not found', f"create it or change {_field(facts, kind, name)}"
        if key := _NO_KEY.search(text):
            field = _field(facts, key[2], key[3])
            return f'{key[2]} "{key[3]}" has no key {key[1]}', f"add the key or change {field}"
    return None


def _volume_pending(facts: Facts) -> tuple[str, str] | None:
    if "unbound immediate PersistentVolumeClaims" in facts.pod.unscheduled:
        return "a PersistentVolumeClaim is not bound", "give the claim a volume or a StorageClass"
    return None


def _unmounted(facts: Facts) -> tuple[str, str] | None:
    """Detect a pod whose volumes kubelet has not mounted, so that it has no address.

    Only Events name the volume that fails. The operator reads neither Events nor Secrets, so the
    fix lists the objects that the pod refers to.
    """
    pod, role = facts.pod, facts.pod.role
    creating = [item.waiting in ("ContainerCreating", "PodInitializing") for item in pod.containers]
    if not pod.scheduled or pod.ip or not creating or not all(creating):
        return None
    own = ("model.", "gateway." if role is Role.GATEWAY else f"pools.{role}.")
    named = [
        f'{kind} "{name}" ({field})'
        for (kind, name), field in sorted(facts.fields.items())
        if field.startswith(own)
    ]
    if not named:
        return "its volumes or its network are not set up", "see kubectl describe pod"
    fix = f"check that these exist, with the keys that their fields name: {', '.join(named)}"
    return "its volumes are not mounted", fix


def _unschedulable(facts: Facts) -> tuple[str, str] | None:
    if not facts.pod.unscheduled:
        return None
    cause = facts.pod.blocked.removeprefix("Pending: ") or facts.pod.unscheduled
    if facts.pod.role is Role.GATEWAY:
        return (
            cause,
            "add nodes, or change gateway.placement, gateway.resources or gateway.replicas",
        )
    return cause, "add nodes or a variant, or lower replicas"


def _image(facts: Facts) -> tuple[str, str] | None:
    return _waits(facts.pod, _IMAGE, "correct spec.image or imagePullSecrets")


def _container_refused(facts: Facts) -> tuple[str, str] | None:
    return _waits(facts.pod, _REFUSED, "correct podTemplate or engine of the pool")


def _waits(pod: PodState, reasons: tuple[str, ...], fix: str) -> tuple[str, str] | None:
    for item in _waiting(pod, reasons):
        return f"{item.waiting}{_after_colon(one_line(item.waiting_message))}", fix
    return None


def _after_colon(text: str) -> str:
    return f": {text}" if text else ""


def _crash(facts: Facts, *, least_restarts: int = CRASHES) -> tuple[str, str] | None:
    for item in facts.pod.containers:
        short = item.lived_seconds is None or item.lived_seconds < LIVED_SECONDS
        looping = item.waiting == "CrashLoopBackOff" or (least_restarts and not item.ready)
        if item.restarts >= least_restarts and looping and short and item.exit_code is not None:
            return _termination(item, facts.pod.role)
    return None


def _first_crashes(facts: Facts) -> tuple[str, str] | None:
    return _crash(facts, least_restarts=0)


def _termination(item: ContainerState, role: Role) -> tuple[str, str]:
    line = error_line(item.exit_message)
    suffix = _after_colon(line)
    if item.exit_reason == "OOMKilled":
        return f"crashes, OOMKilled{suffix}", FIX_MEMORY
    cause = f"ends again and again with exit code {item.exit_code}{suffix}"
    lived = item.lived_seconds
    if item.exit_code == 0 and lived is not None and lived < _PROBED_SECONDS:
        field = "" if role is Role.GATEWAY else f"pools.{role}.engine.extraArgs or "
        return cause, f"correct what makes it end in {field}its image, {READ_LOG}"
    if item.exit_code in (0, _KILLED):
        return cause, f"its liveness probe fails: {READ_LOG}"
    fix = "correct what the error names" if line else READ_LOG
    if "Cannot allocate memory" in line:
        fix = FIX_MEMORY
    return f"crashes with exit code {item.exit_code}{suffix}", fix


def _model_failed(facts: Facts) -> tuple[str, str] | None:
    if facts.sample is None or facts.sample.phase != "failed":
        return None
    cause, fix = split(facts.sample.message)
    return f"the model failed: {one_line(cause)}", one_line(fix) or "correct spec.model or engine"


def _access_denied(facts: Facts) -> tuple[str, str] | None:
    sample = facts.sample
    if facts.pod.role is not Role.GATEWAY or sample is None:
        return None
    if not sample.message.startswith(ACCESS_DENIED):
        return None
    fix = "let the operator write the Role and RoleBinding of the service's gateway"
    return one_line(sample.message), fix


def _node_not_ready(facts: Facts) -> tuple[str, str] | None:
    if not facts.pod.lost_its_node:
        return None
    node = facts.pod.node or ""
    return f"node {node} is not ready", f"repair or remove node {node}"


def _device(facts: Facts) -> tuple[str, str] | None:
    sample = facts.sample
    if sample is None or facts.accelerators == 0 or not sample.device.startswith("cpu"):
        return None
    cause = f"it holds {facts.accelerators} devices and its worker computes on the CPU"
    return cause, "use the CUDA image and check the node's driver"


POD_CAUSES: tuple[Cause, ...] = (
    Cause("MissingReference", 60.0, _missing_reference),
    Cause("VolumePending", None, _volume_pending),
    Cause("VolumesNotMounted", 60.0, _unmounted),
    Cause("Unschedulable", None, _unschedulable),
    Cause("ImagePullFailed", 120.0, _image),
    Cause("ContainerRefused", 120.0, _container_refused),
    Cause("CrashLoop", 0.0, _crash),
    Cause("PodsFailing", None, _first_crashes),
    Cause("ModelFailed", 0.0, _model_failed),
    Cause("AccessDenied", 60.0, _access_denied),
    Cause("NodeNotReady", None, _node_not_ready),
    Cause("DeviceMismatch", None, _device),
)
# A pod may have these while it serves: they are reported and do not change readiness.
SERVING_CAUSES = ("DeviceMismatch",)


def _waiting(pod: PodState, reasons: tuple[str, ...]) -> list[ContainerState]:
    return [item for item in pod.containers if item.waiting in reasons]


def _field(facts: Facts, kind: str, name: str) -> str:
    return facts.fields.get((kind, name), "the field that names it")


def _walk(node: Any, path: str) -> Iterator[tuple[str, str, str]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            here = f"{path}.{key}" if path else str(key)
            kind, name = _NAMING.get(key, ("", ""))
            if kind and isinstance(value, Mapping):
                named = value.get(name) or value.get("name")  # the latter in projected volumes
                if named:
                    yield kind, str(named), here
            yield from _walk(value, here)
    elif isinstance(node, list):
        for number, value in enumerate(node):
            label = value.get("name", number) if isinstance(value, Mapping) else number
            yield from _walk(value, f"{path}[{label}]")
