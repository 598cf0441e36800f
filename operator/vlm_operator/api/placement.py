"""Where pods run and what they may use: placement, resources, the node types of a pool."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from vlm_operator.api import quantity
from vlm_operator.api.base import (
    LabelKey,
    LabelValue,
    Model,
    NameRef,
    Open,
    Quantity,
    ResourceName,
    Restarts,
    Rule,
    VariantName,
    field,
)

# Extended resources that compute, by what follows the domain: `nvidia.com/gpu`, `gpu.shared`,
# `mig-1g.5gb`, `Ascend910`. Others are network cards and the like: `rdma/hca`.
_ACCELERATOR = re.compile(
    r"(v?gpu|mig|tpu|npu|hpu|xpu|gaudi|neuron(core|device)?|ascend|dcu|v?mlu|gcu)([-.0-9].*)?"
    r"|i915|xe",
    re.IGNORECASE,
)

Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=32)]
Resources = Annotated[dict[ResourceName, Quantity], Field(max_length=16)]


class Toleration(Model):
    """A node taint that these pods accept; Kubernetes' own shape."""

    key: str | None = field(
        None, "Taint key; every key with Exists.", example="nvidia.com/gpu", max_length=317
    )
    operator: Literal["Equal", "Exists"] | None = field(
        None, "How value is compared.", example="Exists", unset="Equal"
    )
    value: str | None = field(None, "Taint value, with Equal.", example="present", max_length=63)
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = field(
        None, "Taint effect.", example="NoSchedule", unset="all effects"
    )
    toleration_seconds: int | None = field(
        None, "Seconds a NoExecute taint is borne.", example=60, unset="for ever", ge=0
    )


class Placement(Model):
    """Which nodes take these pods."""

    node_selector: Labels = field(
        {}, "Labels a node must have.", example={"triptych.dev/node-type": "gpu-memory"}
    )
    tolerations: list[Toleration] = field([], "Taints these pods accept.", max_length=16)
    affinity: Open | None = field(
        None,
        "Kubernetes' own affinity, checked by a dry run.",
        unset="none",
    )


class ResourceRequirements(Model):
    """CPU, memory and devices of one pod."""

    requests: Resources = field(
        {},
        "What the scheduler sets aside.",
        example={"cpu": "2"},
    )
    limits: Resources = field(
        {},
        "What a pod may use at most; devices go here.",
        example={"nvidia.com/gpu": "1"},
    )


class Variant(Model):
    """One node type of a pool."""

    name: VariantName = field(..., "Name of the variant, a DNS label.", example="l40s")
    node_class_ref: NameRef | None = field(
        None, "VLMNodeClass that says where to run; instead of placement."
    )
    placement: Placement | None = field(None, "Which nodes take these pods; {} is any.")
    resources: ResourceRequirements = field(
        ResourceRequirements(), "CPU, memory and devices of one pod.", restarts=Restarts.PODS
    )
    preference: int = field(
        0,
        "At equal cost the higher one is taken first.",
        example=10,
        restarts=Restarts.NONE,
        ge=0,
        le=100,
    )
    max_replicas: int | None = field(
        None,
        "Most replicas of this variant.",
        example=4,
        unset="as many as the pool",
        restarts=Restarts.NONE,
        ge=1,
        le=1000,
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="variant-place",
            holds="has(self.nodeClassRef) != has(self.placement)",
            message="set exactly one of nodeClassRef and placement; placement: {} is any node",
            at=".placement",
        ),
    )

    def accelerators(self, resource: str | None = None) -> int:
        """Devices of one replica in its limits, for `budget.maxAccelerators`.

        Args:
            resource: what the variant's node class calls its accelerator. It counts whatever its
                name is; others count if they have a name of a known accelerator.
        """
        limits = self.resources.limits.items()
        return sum(
            int(quantity.parse(value))
            for name, value in limits
            if name == resource or is_accelerator(name)
        )


def is_accelerator(resource: str) -> bool:
    """Whether an extended resource has the name of a device that computes."""
    domain, _, device = resource.rpartition("/")
    return bool(domain) and _ACCELERATOR.fullmatch(device) is not None
