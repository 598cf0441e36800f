"""Kinds, labels, ports, field managers, and the names of a service's children.

VLMService demo ─▶ demo-decode-default-1a2b3c4d   Deployment, per role, variant and revision
                ─▶ demo-decode        VLMPool, Service, PDB, NetworkPolicy, ServiceAccount
                ─▶ demo-gateway       Deployment, Service, PDB, NetworkPolicy, ServiceAccount,
                                      ConfigMap, Role, RoleBinding
                ─▶ demo-autoscaler    ConfigMap: the autoscaler's memory
                ─▶ demo-model         ServiceAccount, NetworkPolicy of the Job below
                ─▶ demo-model-1a2b3c4d  PersistentVolumeClaim, Job: one revision of the model
"""

from __future__ import annotations

import enum
import hashlib
import json

GROUP = "triptych.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
ANNOTATION_RESTARTED_AT = f"{GROUP}/restarted-at"
"""Annotation of a VLMService. A new value replaces all of its pods by a rollout."""

KIND_SERVICE = "VLMService"
KIND_POOL = "VLMPool"
KIND_NODE_CLASS = "VLMNodeClass"
PLURAL_SERVICE = "vlmservices"
PLURAL_POOL = "vlmpools"
PLURAL_NODE_CLASS = "vlmnodeclasses"

LABEL_SERVICE = f"{GROUP}/service"
LABEL_ROLE = f"{GROUP}/role"
LABEL_VARIANT = f"{GROUP}/variant"
LABEL_REVISION = f"{GROUP}/revision"
LABEL_COMPAT = f"{GROUP}/compat"
LABEL_MODEL = f"{GROUP}/model"
"""Label of a claim, its Job and its pods: the digest of what the claim holds."""
LABEL_NODE_TYPE = f"{GROUP}/node-type"
LABEL_SIMULATED = f"{GROUP}/simulated"
LABEL_APP_NAME = "app.kubernetes.io/name"
LABEL_APP_COMPONENT = "app.kubernetes.io/component"
LABEL_APP_PART_OF = "app.kubernetes.io/part-of"
LABEL_APP_MANAGED_BY = "app.kubernetes.io/managed-by"
APP_NAME = "triptych"

MANAGER = "vlm-operator"
MANAGER_STATUS = "vlm-operator-status"
MANAGER_AUTOSCALER = "vlm-autoscaler"

FINALIZER = f"{GROUP}/drain"
GATE_ACCEPTING = f"{GROUP}/accepting"
OPERATOR_NAMESPACE = "triptych-system"
OPERATOR_LEASE = "triptych-operator"
CA_SECRET = f"{OPERATOR_LEASE}-ca"

PORT_GRPC = 9000
PORT_HTTP = 9001
PORT_DATA = 9002  # workers derive it: the gRPC port plus two
PORT_GATEWAY = 8000
PORT_GATEWAY_ADMIN = 9001

MAX_SERVICE_NAME = 40
MAX_VARIANT_NAME = 20
MAX_NAME = 63  # a label value, and a DNS label
# A pod is named deployment-replicaset(10)-pod(5); within 63 its hostname is its whole name.
MAX_DEPLOYMENT_NAME = MAX_NAME - 17


class Role(enum.StrEnum):
    """The role of a pod. Labels, argv, metrics and gRPC health names use the same spelling."""

    ENCODER = "encoder"
    PREFILL = "prefill"
    DECODE = "decode"
    GATEWAY = "gateway"


MODEL_PART = "model"
"""Value of the role label of the pods that download a model. It is no `Role`."""

# The roles with a pool, in the order in which a request passes them.
POOL_ROLES = (Role.ENCODER, Role.PREFILL, Role.DECODE)


def child(service: str, part: Role | str) -> str:
    """Name an object that a service has once per role: `demo-decode`, `demo-autoscaler`."""
    return bounded(f"{service}-{part}")


def api_url(service: str, namespace: str, *, domain: str, port: int, tls: bool = False) -> str:
    """Return the base URL of a service's API inside a cluster of this DNS domain."""
    host = f"{child(service, Role.GATEWAY)}.{namespace}.svc.{domain}"
    scheme, default = ("https", 443) if tls else ("http", 80)
    return f"{scheme}://{host}/v1" if port == default else f"{scheme}://{host}:{port}/v1"


def digest_of(value: object, *, length: int) -> str:
    """Return `length` hexadecimal digits that differ if a JSON value differs."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def deployment(service: str, role: Role | str, variant: str, revision: str) -> str:
    """Name one Deployment, short enough that the hostname of its pods is the full pod name.

    The digest separates the parts: service `z` with variant `decode-v` and service `z-decode` with
    variant `v` have equal text and get different names.
    """
    parts = json.dumps([service, str(role), variant, revision])
    digest = hashlib.sha256(parts.encode()).hexdigest()[:8]
    head = bounded(f"{service}-{role}-{variant}", limit=MAX_DEPLOYMENT_NAME - 9)
    return f"{head}-{digest}"


def model_claim(service: str, digest: str) -> str:
    """Name the claim and the Job of one revision of the model.

    The name of a Job's pod is that of the Job and 6 characters more.
    """
    return f"{bounded(f'{service}-{MODEL_PART}', limit=MAX_NAME - 6 - 9)}-{digest}"


def former_deployment(service: str, role: Role | str, variant: str, revision: str) -> str:
    """Name a Deployment as version 0.1 did. An existing Deployment keeps that name."""
    return bounded(f"{service}-{role}-{variant}-{revision}", limit=MAX_DEPLOYMENT_NAME)


def gateway(service: str, compat: str) -> str:
    """Name the gateway's Deployment of one compat, if the name of `child` is already used."""
    return bounded(f"{child(service, Role.GATEWAY)}-{compat}")


def status_manager(operator: str) -> str:
    """Name the field manager of one operator, if several operators write one status."""
    return bounded(f"{MANAGER_STATUS}:{operator}", limit=128)


def bounded(name: str, *, limit: int = MAX_NAME) -> str:
    """Return `name`; if it is longer than `limit`, its first part and a digest of all of it.

    The digest keeps different names different.
    """
    if len(name) <= limit:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: limit - 9].rstrip('-.')}-{digest}"
