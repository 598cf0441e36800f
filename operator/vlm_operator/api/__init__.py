"""The Kubernetes API as Python types: the source of crds/, docs/api.md and the operator's view.

service  VLMServiceSpec ── model  pool (placement scaling pod)  gateway  policy
kinds    VLMPool, VLMNodeClass        status  what the operator reports
parse    body -> VLMService -> resolved      topology  which pool runs which stage
"""

from vlm_operator.api.enums import (
    DisruptionPolicy,
    DType,
    KvDType,
    LendingMode,
    Modality,
    OnDemand,
    RolloutStrategy,
    ScalingMode,
    Topology,
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
from vlm_operator.api.pool import Drain, KvCache, Pool, Pools
from vlm_operator.api.scaling import Scaling
from vlm_operator.api.service import VLMServiceSpec
from vlm_operator.api.status import CONDITIONS, Condition, Decision, VLMServiceStatus
from vlm_operator.api.topology import stages, topology

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
    "LendingMode",
    "Limits",
    "Modality",
    "ModelSource",
    "OnDemand",
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
    "effective",
    "parse",
    "resolve",
    "stages",
    "topology",
]
