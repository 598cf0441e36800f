"""The Kubernetes API as Python types. crds/ and docs/api.md are generated from them.

service  VLMServiceSpec ── model  pool (placement scaling pod; topology)  gateway  policy
kinds    VLMPool, VLMNodeClass               status    fields that the operator writes
parse    body -> VLMService -> resolved
"""

from vlm_operator.api.enums import (
    DisruptionPolicy,
    DType,
    KvDType,
    Modality,
    RolloutStrategy,
    ScalingMode,
    Topology,
    WhileAtZero,
)
from vlm_operator.api.gateway import Gateway
from vlm_operator.api.kinds import (
    VLMNodeClassSpec,
    VLMNodeClassStatus,
    VLMPoolSpec,
    VLMPoolStatus,
)
from vlm_operator.api.model import Limits, ModelSource
from vlm_operator.api.parse import VLMService, effective, parse, resolve
from vlm_operator.api.placement import Placement, ResourceRequirements, Toleration, Variant
from vlm_operator.api.pod import Engine, EnvVar, PodOverlay, Volume, VolumeMount
from vlm_operator.api.policy import Slo
from vlm_operator.api.pool import Drain, KvCache, Pool, Pools, stages, topology
from vlm_operator.api.scaling import Scaling
from vlm_operator.api.service import VLMServiceSpec
from vlm_operator.api.status import CONDITIONS, Condition, Decision, VLMServiceStatus

__all__ = [
    "CONDITIONS",
    "Condition",
    "DType",
    "Decision",
    "DisruptionPolicy",
    "Drain",
    "Engine",
    "EnvVar",
    "Gateway",
    "KvCache",
    "KvDType",
    "Limits",
    "Modality",
    "ModelSource",
    "Placement",
    "PodOverlay",
    "Pool",
    "Pools",
    "ResourceRequirements",
    "RolloutStrategy",
    "Scaling",
    "ScalingMode",
    "Slo",
    "Toleration",
    "Topology",
    "VLMNodeClassSpec",
    "VLMNodeClassStatus",
    "VLMPoolSpec",
    "VLMPoolStatus",
    "VLMService",
    "VLMServiceSpec",
    "VLMServiceStatus",
    "Variant",
    "Volume",
    "VolumeMount",
    "WhileAtZero",
    "effective",
    "parse",
    "resolve",
    "stages",
    "topology",
]
