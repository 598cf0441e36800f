"""Kinds that `vlm doctor` reads."""

from __future__ import annotations

from vlm_operator.cluster import (
    DEPLOYMENT,
    LEASE,
    NODE,
    POD,
    ROLE,
    VLM_NODE_CLASS,
    VLM_POOL,
    VLM_SERVICE,
    Kind,
)

CRD = Kind(
    "apiextensions.k8s.io/v1",
    "CustomResourceDefinition",
    "customresourcedefinitions",
    namespaced=False,
)
NAMESPACE = Kind("v1", "Namespace", "namespaces", namespaced=False)
CLAIM = Kind("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
AUTOSCALER = Kind("autoscaling/v2", "HorizontalPodAutoscaler", "horizontalpodautoscalers")

# Kinds read in the whole cluster, and kinds read in the chosen namespaces.
GLOBAL = (CRD, NAMESPACE, NODE, VLM_NODE_CLASS)
LOCAL = (VLM_SERVICE, VLM_POOL, POD, ROLE, CLAIM, AUTOSCALER)

__all__ = [
    "AUTOSCALER",
    "CLAIM",
    "CRD",
    "DEPLOYMENT",
    "GLOBAL",
    "LEASE",
    "LOCAL",
    "NAMESPACE",
    "NODE",
    "POD",
    "ROLE",
    "VLM_NODE_CLASS",
    "VLM_POOL",
    "VLM_SERVICE",
]
