"""The additions of a user to pods: arguments, environment, volumes. A closed list, no PodSpec."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from vlm_operator.api.base import (
    ANNOTATION_KEY,
    AnnotationValue,
    Bytes,
    DnsLabel,
    LabelKey,
    Model,
    ObjectName,
    Rule,
    Rules,
    TopologyKey,
    field,
    keyed,
    shaped,
)
from vlm_operator.api.placement import Labels

# Arguments that the operator sets on every command line (docs/contract.md); users cannot set them.
OWNED_ARGS = (
    "--model", "--served-name", "--model-revision", "--model-cache", "--stages", "--bind",
    "--grpc-port", "--http-port", "--data-port", "--announced-data-port", "--admin-port",
    "--block-size", "--dtype", "--kv-dtype", "--kv-memory-bytes", "--kv-memory-percent",
    "--kv-reserve-percent", "--max-model-len", "--drain-timeout-seconds", "--compat",
    "--namespace", "--service", "--worker", "--config", "--api-keys-dir",
)  # fmt: skip
OWNED_ENV = ("POD_NAME", "POD_UID", "POD_IP", "POD_NAMESPACE", "NODE_NAME")
OWNED_ENV_PREFIX = "TRIPTYCH_"
OWNED_LABEL_DOMAINS = ("triptych.dev/", "app.kubernetes.io/")
OWNED_MOUNTS = ("/models", "/tmp")  # noqa: S108

EnvName = Annotated[str, Field(max_length=128, pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$")]
Annotations = Annotated[
    dict[LabelKey, AnnotationValue], Field(max_length=32), keyed("annotation-keys", ANNOTATION_KEY)
]
_DATA_KEY = r"^[.]{0,2}[-_A-Za-z0-9][-._A-Za-z0-9]*$"
# No part of a path is empty, "." or ".."; parts of three and more dots are refused, too.
_MOUNT_PATH = r"^(/[.]{0,2}[^/:.][^/:]*)+/?$"
_SUB_PATH = r"^([.]{0,2}[^/.][^/]*(/[.]{0,2}[^/.][^/]*)*/?)?$"
DataKey = Annotated[
    str,
    Field(min_length=1, max_length=253, pattern=_DATA_KEY),
    shaped("data-key", _DATA_KEY, "is no key of a Secret: write letters, digits, -, _ and ."),
]
MountPath = Annotated[
    str,
    Field(max_length=512, pattern=_MOUNT_PATH),
    shaped(
        "mount-path",
        _MOUNT_PATH,
        "must be absolute, below /, without empty, . or .. parts and colons: write /scratch",
    ),
]
SubPath = Annotated[
    str,
    Field(max_length=512, pattern=_SUB_PATH),
    shaped(
        "sub-path", _SUB_PATH, "must be relative, without empty, . or .. parts: write run-1/cache"
    ),
]


def _cel_list(values: tuple[str, ...]) -> str:
    return "[" + ", ".join(f"'{value}'" for value in values) + "]"


OWNED_ARG_RULE = Rule(
    name="owned-args",
    # an abbreviation sets the owned argument, so abbreviations are refused, too
    holds=f"!' {' '.join(OWNED_ARGS)}'.contains(' ' + self.split('=')[0])",
    message="an argument that the operator sets itself: remove it",
    says="self.split('=')[0] + ' is set by the operator: remove it; "
    "what may be chosen has a field of its own'",
)
HELP_ARG_RULE = Rule(
    name="help-args",
    holds="!(self in ['-h', '--help'])",
    message="prints a text and ends: remove it",
)
Argument = Annotated[
    str, Field(min_length=1, max_length=512), Rules(OWNED_ARG_RULE), Rules(HELP_ARG_RULE)
]


class KeySelector(Model):
    """One key of a Secret or ConfigMap."""

    name: ObjectName = field(..., "Name of the object.", example="proxy-settings")
    key: DataKey = field(..., "Key in its data.", example="HTTPS_PROXY")


class EnvSource(Model):
    """The source of a variable's value."""

    secret_key_ref: KeySelector | None = field(None, "A key of a Secret.")
    config_map_key_ref: KeySelector | None = field(None, "A key of a ConfigMap.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="env-source",
            holds="has(self.secretKeyRef) != has(self.configMapKeyRef)",
            message="set exactly one of secretKeyRef and configMapKeyRef",
        ),
    )


class EnvVar(Model):
    """One environment variable."""

    name: EnvName = field(..., "Name of the variable.", example="OMP_NUM_THREADS")
    value: str | None = field(
        None, "Value of the variable.", example="4", unset="empty", max_length=4096
    )
    value_from: EnvSource | None = field(None, "Source of the value.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="env-value",
            holds="!(has(self.value) && has(self.valueFrom))",
            message="set value or valueFrom, not both",
            says="self.name + ': set value or valueFrom, not both'",
            at=".value",
        ),
        Rule(
            name="owned-env",
            holds=f"!(self.name in {_cel_list(OWNED_ENV)}) && "
            f"!self.name.startsWith('{OWNED_ENV_PREFIX}')",
            message="a variable that the operator sets itself: remove it",
            says="self.name + ' is set by the operator: remove it'",
            at=".name",
        ),
    )


class Engine(Model):
    """Additions to the worker's command line and environment."""

    extra_args: list[Argument] = field(
        [],
        "Additional arguments; see `vlm-worker ROLE --help`.",
        example=["--max-requests=64"],
        max_length=64,
    )
    env: list[EnvVar] = field([], "Additional environment variables.", keys="name", max_length=64)


class TopologySpread(Model):
    """The spread of a pool's pods over nodes; the operator adds the pool's selector."""

    max_skew: int = field(
        1, "Maximum difference between the pod counts of two domains.", example=1, ge=1, le=100
    )
    topology_key: TopologyKey = field(
        ..., "Node label that names the domain.", example="topology.kubernetes.io/zone"
    )
    when_unsatisfiable: Literal["DoNotSchedule", "ScheduleAnyway"] = field(
        "ScheduleAnyway", "Whether a pod waits for an even place.", example="DoNotSchedule"
    )


class ClaimVolume(Model):
    """A PersistentVolumeClaim."""

    claim_name: ObjectName = field(..., "Name of the claim.", example="scratch")
    read_only: bool = field(False, "Whether the claim is mounted read-only.", example=True)


class EmptyDirVolume(Model):
    """A directory that is deleted with the pod."""

    medium: Literal["", "Memory"] | None = field(
        None, "Memory for a tmpfs.", example="Memory", unset="the node's disk"
    )
    size_limit: Bytes | None = field(
        None, "Maximum size of the folder.", example="8Gi", unset="no limit"
    )


class SecretVolume(Model):
    """The keys of a Secret as files."""

    secret_name: ObjectName = field(..., "Name of the Secret.", example="proxy-ca")


class ConfigMapVolume(Model):
    """The keys of a ConfigMap as files."""

    name: ObjectName = field(..., "Name of the ConfigMap.", example="proxy-ca")


class Volume(Model):
    """A volume of one of four kinds."""

    name: DnsLabel = field(..., "Name of the volume.", example="scratch")
    persistent_volume_claim: ClaimVolume | None = field(
        None, "A PersistentVolumeClaim of the same namespace."
    )
    empty_dir: EmptyDirVolume | None = field(None, "An empty folder that is deleted with the pod.")
    secret: SecretVolume | None = field(None, "The keys of a Secret.")
    config_map: ConfigMapVolume | None = field(None, "The keys of a ConfigMap.")

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="volume-kind",
            holds="[has(self.persistentVolumeClaim), has(self.emptyDir), has(self.secret), "
            "has(self.configMap)].filter(x, x).size() == 1",
            message="set exactly one of persistentVolumeClaim, emptyDir, secret and configMap",
            says="'volume ' + self.name + ': set exactly one kind'",
        ),
        Rule(
            name="volume-name",
            holds="!self.name.startsWith('triptych-')",
            message="names with triptych- are the operator's: choose another",
            at=".name",
        ),
    )


class VolumeMount(Model):
    """The mount of a volume in the worker container."""

    name: DnsLabel = field(..., "Name of the volume.", example="scratch")
    mount_path: MountPath = field(..., "Absolute path.", example="/scratch")
    sub_path: SubPath | None = field(
        None, "Path inside the volume.", example="run-1", unset="its root"
    )
    read_only: bool = field(False, "Whether the mount is read-only.", example=True)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="owned-mount",
            holds=f"!self.mountPath.matches('^({'|'.join(OWNED_MOUNTS)})(/|$)')",
            message=f"{' and '.join(OWNED_MOUNTS)} are the operator's: choose another path",
            at=".mountPath",
        ),
    )


class PodOverlay(Model):
    """Additions to the pods of a pool. A closed list; a PodSpec is not accepted."""

    labels: Labels = field(
        {}, "Labels in addition to those of the operator.", example={"team": "vision"}
    )
    annotations: Annotations = field(
        {}, "Annotations of the pods.", example={"example.com/note": "x"}
    )
    priority_class_name: ObjectName | None = field(
        None, "PriorityClass of the pods.", example="inference", unset="the cluster's"
    )
    topology_spread_constraints: list[TopologySpread] = field(
        [], "How the pods spread over nodes.", max_length=8
    )
    volumes: list[Volume] = field([], "Volumes of the pods.", keys="name", max_length=16)
    volume_mounts: list[VolumeMount] = field(
        [], "Mount points of the volumes in the worker.", keys="mountPath", max_length=16
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="owned-labels",
            holds="!has(self.labels) || self.labels.all(k, "
            + " && ".join(f"!k.startsWith('{domain}')" for domain in OWNED_LABEL_DOMAINS)
            + ")",
            message=f"labels under {' and '.join(OWNED_LABEL_DOMAINS)} are the operator's: "
            "remove them",
            at=".labels",
        ),
        Rule(
            name="mount-volume",
            holds="!has(self.volumeMounts) || self.volumeMounts.all(m, "
            "has(self.volumes) && self.volumes.exists(v, v.name == m.name))",
            message="each names one of volumes: add the volume, or correct the name",
            at=".volumeMounts",
        ),
    )
