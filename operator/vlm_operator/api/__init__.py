"""The Kubernetes API as Python types. crds/ and docs/api.md are generated from them.

service  VLMServiceSpec ── model  pool (placement scaling engine; topology)  gateway  policy
         pod_template
kinds    VLMPool, VLMNodeClass               status    fields that the operator writes
parse    body -> VLMService -> resolved
"""

from vlm_operator.api.enums import ScalingMode
from vlm_operator.api.parse import VLMService, effective, parse, resolve
from vlm_operator.api.placement import Variant
from vlm_operator.api.pool import Pool, stages, topology
from vlm_operator.api.service import VLMServiceSpec

__all__ = [
    "Pool",
    "ScalingMode",
    "VLMService",
    "VLMServiceSpec",
    "Variant",
    "effective",
    "parse",
    "resolve",
    "stages",
    "topology",
]
