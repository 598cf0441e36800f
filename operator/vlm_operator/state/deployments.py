"""Revisions, and the Deployments whose annotations store them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

from vlm_operator import names
from vlm_operator.cluster import Manifest, epoch_seconds
from vlm_operator.names import Role

Key = tuple[Role, str, str]  # role, variant, revision

# On each Deployment: inputs of its revision, so that another operator version renders equal pods.
ANNOTATION_INPUTS = f"{names.GROUP}/inputs"
ANNOTATION_RESOLVED = f"{names.GROUP}/resolved"
# On Deployments of a rollout: replicas of an old one before it; why a new one is not tried again.
ANNOTATION_INITIAL = f"{names.GROUP}/initial"
ANNOTATION_FAILED = f"{names.GROUP}/failed"
# Defined by Kubernetes: if a ReplicaSet shrinks, pods with lower cost are deleted first.
ANNOTATION_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
# On each child: digest of the last applied manifest.
ANNOTATION_APPLIED = f"{names.GROUP}/applied"
_STAGES_FLAG = "--stages="
_BIND_FLAG = "--bind="
_ROLES = frozenset(role.value for role in Role)


@dataclasses.dataclass(frozen=True)
class Resolved:
    """Values of a revision that the manifest does not fix.

    The operator keeps them for existing revisions, so that its upgrade restarts no pod.

    Attributes:
        base: digest of the fields that all pods of the service share.
        image: image of roles whose pool names none.
        block_size: tokens per KV block.
        compat: pods with the same value may exchange KV and embeddings.
        drain_seconds: drain timeout at the creation of the revision. A change of the timeout
            alone restarts no pod.
        template: version of the pod template.
        pull_policy: imagePullPolicy from the operator's settings; "" leaves Kubernetes' default.
            None: a Deployment of version 0.1, which stored neither this field nor `bind`.
        bind: listen address of the pods, from the operator's settings.
        gateway_image: image of the gateway if its spec names none; None: `image`.
        identity: issuer of the pods' certificates (`state.identities`); "" for plaintext.
    """

    base: str
    image: str
    block_size: int
    compat: str
    drain_seconds: int
    template: int = 2
    pull_policy: str | None = None
    bind: str | None = None
    gateway_image: str | None = None
    identity: str = ""

    @classmethod
    def parse(cls, text: str) -> Resolved | None:
        """Read the annotation of a Deployment; None if it is malformed.

        Fields that a later version added are ignored: a rollback of the operator keeps the others.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        try:
            stored = json.loads(text)
            return cls(**{name: stored[name] for name in stored.keys() & known})
        except (ValueError, TypeError, AttributeError):
            return None

    def text(self) -> str:
        """Return the annotation of a Deployment, as versions without the last two wrote it."""
        values = dataclasses.asdict(self)
        if self.gateway_image is None:
            del values["gateway_image"]
        if not self.identity:
            del values["identity"]
        return json.dumps(values, sort_keys=True)


@dataclasses.dataclass(frozen=True)
class Revision:
    """The revision of one role and variant; the digest `id` names it."""

    role: Role
    variant: str
    id: str
    inputs: str  # digest of the manifest fields that restart pods
    resolved: Resolved


@dataclasses.dataclass(frozen=True)
class DeploymentState:
    """One Deployment: one role, variant and revision.

    Attributes:
        resolved: `Resolved` as JSON, from its annotation.
        desired: `spec.replicas`.
        replicas: `status.replicas`, pods that exist.
        available: pods that have been ready for `minReadySeconds`.
        stages: stages that its workers load; empty if its command line does not name them.
        initial: replicas before a rollout removed the first pod; None before that.
        failed: why its revision is not tried again; "" if it has not failed.
        created: seconds since the epoch.
        pull_policy: imagePullPolicy of its first container; "" without one.
        bind: listen address on its command line; "" without one.
    """

    name: str
    role: Role
    variant: str
    revision: str
    compat: str
    inputs: str
    resolved: str
    desired: int
    replicas: int
    ready: int
    deleting: bool
    available: int = 0
    stages: frozenset[str] = frozenset()
    initial: int | None = None
    failed: str = ""
    created: float = 0.0
    pull_policy: str = ""
    bind: str = ""

    @property
    def key(self) -> Key:
        return (self.role, self.variant, self.revision)

    @property
    def before_rollout(self) -> int:
        """Replicas from before the rollout removed its first pod."""
        return self.desired if self.initial is None else self.initial

    @classmethod
    def of(cls, manifest: Manifest) -> DeploymentState | None:
        """Read a manifest of a Deployment that the service controls; None if it has no role.

        The selector's labels take precedence, because the selector is immutable and labels are not.
        """
        meta, status = manifest["metadata"], manifest.get("status", {})
        notes = meta.get("annotations", {})
        initial, created = notes.get(ANNOTATION_INITIAL, ""), meta.get("creationTimestamp")
        fixed = manifest["spec"].get("selector", {}).get("matchLabels", {})
        labels = {**meta.get("labels", {}), **fixed}
        if labels.get(names.LABEL_ROLE) not in _ROLES:
            return None
        return cls(
            name=meta["name"],
            role=Role(labels[names.LABEL_ROLE]),
            variant=labels.get(names.LABEL_VARIANT, ""),
            revision=labels.get(names.LABEL_REVISION, ""),
            compat=labels.get(names.LABEL_COMPAT, ""),
            inputs=notes.get(ANNOTATION_INPUTS, ""),
            resolved=notes.get(ANNOTATION_RESOLVED, ""),
            desired=int(manifest["spec"].get("replicas", 1)),
            replicas=int(status.get("replicas", 0)),
            ready=int(status.get("readyReplicas", 0)),
            deleting=meta.get("deletionTimestamp") is not None,
            available=int(status.get("availableReplicas", 0)),
            stages=frozenset(filter(None, _flag(manifest, _STAGES_FLAG).split(","))),
            initial=int(initial) if initial.isdecimal() else None,
            failed=notes.get(ANNOTATION_FAILED, ""),
            created=epoch_seconds(created) if created else 0.0,
            pull_policy=next(_containers(manifest), {}).get("imagePullPolicy", ""),
            bind=_flag(manifest, _BIND_FLAG),
        )


def _flag(manifest: Manifest, flag: str) -> str:
    """Read a flag from the command line of the pods; "" if it is absent."""
    values = (
        argument.removeprefix(flag)
        for container in _containers(manifest)
        for argument in container.get("args", [])
        if argument.startswith(flag)
    )
    return str(next(values, ""))


def _containers(manifest: Manifest) -> Iterator[Manifest]:
    pod = manifest["spec"].get("template", {}).get("spec", {})
    return iter(pod.get("containers", []))
