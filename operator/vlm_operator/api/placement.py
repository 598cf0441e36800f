"""The nodes and resources of pods: placement, resource requirements, the variants of a pool."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from vlm_operator.api import quantity
from vlm_operator.api.base import (
    EXTENDED_RESOURCE,
    LABEL_KEY,
    LABEL_VALUE,
    RESERVED_DOMAINS,
    LabelKey,
    LabelValue,
    Model,
    NameRef,
    Open,
    Quantity,
    ResourceName,
    Restarts,
    Rule,
    Rules,
    VariantName,
    field,
    keyed,
    own_domain,
    whole_bytes,
)

# Extended resources that are accelerators, by the name after the domain: `nvidia.com/gpu`,
# `gpu.shared`, `mig-1g.5gb`, `Ascend910`. Others are for example network cards: `rdma/hca`.
_ACCELERATOR = re.compile(
    r"(v?gpu|mig|tpu|npu|hpu|xpu|gaudi|neuron(core|device)?|ascend|dcu|v?mlu|gcu)([-.0-9].*)?"
    r"|i915|xe",
    re.IGNORECASE,
)
_EXISTS = "(has(self.operator) && self.operator == 'Exists')"

# CEL: a limit consists of digits. The API server's cost estimate of a rule assumes 3 MB for a
# quantity, so a match, a comparison or string() of each of 16 would exceed the cost limit. size,
# charAt and `in` cost one step each.
_DIGITS = (
    "(self.limits[k].size() < 8 && [0, 1, 2, 3, 4, 5, 6].all(i, i >= self.limits[k].size() || "
    "self.limits[k].charAt(i) in ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9']))"
)
_BYTES = ("memory", "ephemeral-storage")
_PLAIN = ("cpu", *_BYTES)

Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=32), keyed("label-keys", LABEL_KEY)]
Resources = Annotated[
    dict[ResourceName, Quantity],
    Field(max_length=16),
    Rules(
        Rule(
            name="resource-names",
            holds=f"self.all(k, k in {list(_PLAIN)} || k.matches(r'{EXTENDED_RESOURCE}'))",
            message="a resource must be cpu, memory, ephemeral-storage or DOMAIN/NAME, "
            "as nvidia.com/gpu",
        )
    ),
    Rules(
        Rule(
            name="resource-domains",
            holds=f"self.all(k, {own_domain('k')})",
            message=RESERVED_DOMAINS,
        )
    ),
    Rules(
        Rule(
            name="memory-unit",
            holds=f"{list(_BYTES)}.all(k, !(k in self) || {whole_bytes('self[k]')})",
            message="memory in m, u or n is in parts of a byte: write Mi, as 512Mi",
        )
    ),
]


class Toleration(Model):
    """A node taint that these pods tolerate, as in a PodSpec."""

    key: str | None = field(
        None,
        "Taint key. With operator Exists, an absent key matches every taint.",
        example="nvidia.com/gpu",
        max_length=317,
    )
    operator: Literal["Equal", "Exists"] | None = field(
        None, "How value is compared.", example="Exists", unset="Equal"
    )
    value: str | None = field(
        None, "Taint value for operator Equal.", example="present", max_length=63
    )
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = field(
        None, "Taint effect.", example="NoSchedule", unset="all effects"
    )
    toleration_seconds: int | None = field(
        None,
        "Seconds for which pods tolerate a NoExecute taint.",
        example=60,
        unset="without limit",
        ge=0,
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="toleration-key",
            holds="has(self.key) && self.key != '' ? "
            f"self.key.indexOf('/') < 254 && self.key.matches(r'{LABEL_KEY}') : {_EXISTS}",
            message="must be [DOMAIN/]NAME; only operator Exists goes without a key",
            at=".key",
        ),
        Rule(
            name="toleration-value",
            holds=f"!has(self.value) || ({_EXISTS} ? self.value == '' : "
            f"self.value.matches(r'{LABEL_VALUE}'))",
            message="must be a label value, as large_1; with operator Exists remove it",
            at=".value",
        ),
        Rule(
            name="toleration-seconds",
            holds="!has(self.tolerationSeconds) || "
            "(has(self.effect) && self.effect == 'NoExecute')",
            message="needs effect NoExecute: set effect, or remove tolerationSeconds",
            at=".tolerationSeconds",
        ),
    )


class Placement(Model):
    """The nodes on which these pods may run."""

    node_selector: Labels = field(
        {}, "Labels that a node must have.", example={"triptych.dev/node-type": "gpu-memory"}
    )
    tolerations: list[Toleration] = field([], "Taints that these pods tolerate.", max_length=16)
    affinity: Open | None = field(
        None, "Affinity as in a Kubernetes pod. The operator checks it by a dry run.", unset="none"
    )


def _at_most_the_limit(name: str) -> Rule:
    """Return a rule that one request does not exceed its limit.

    One rule for all names would exceed the API server's cost limit.
    """
    request, limit = (f"self.{side}['{name}']" for side in ("requests", "limits"))
    return Rule(
        name=f"request-limit-{name}",
        holds=f"!has(self.requests) || !has(self.limits) || !('{name}' in self.requests) || "
        f"!('{name}' in self.limits) || "
        f"![{request}, {limit}].all(v, type(v) == int || isQuantity(v)) || "
        f"!quantity(string({request})).isGreaterThan(quantity(string({limit})))",
        message=f"{name}: the request is greater than the limit: lower it, or raise the limit",
        at=".requests",
    )


class ResourceRequirements(Model):
    """CPU, memory and devices of one pod."""

    requests: Resources = field({}, "Resources that the scheduler reserves.", example={"cpu": "2"})
    limits: Resources = field(
        {}, "Maximum resources of a pod, devices included.", example={"nvidia.com/gpu": "1"}
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="whole-devices",
            holds="!has(self.limits) || self.limits.all(k, !k.contains('/') || "
            f"type(self.limits[k]) == int || {_DIGITS})",
            message="devices are counted whole: write digits only, as 1",
            at=".limits",
        ),
        Rule(
            name="device-request",
            holds="!has(self.requests) || self.requests.all(k, !k.contains('/') || "
            "(has(self.limits) && k in self.limits && "
            "(self.requests[k] in [self.limits[k]] || "
            "int(self.requests[k]) == int(self.limits[k]))))",
            message="a request for a device must equal its limit: write the device under limits "
            "alone",
            at=".requests",
        ),
        *(_at_most_the_limit(name) for name in _PLAIN),
    )


class Variant(Model):
    """One node type of a pool."""

    name: VariantName = field(..., "Name of the variant, a DNS label.", example="l40s")
    node_class_ref: NameRef | None = field(
        None, "VLMNodeClass with the nodes for these pods; replaces placement."
    )
    placement: Placement | None = field(None, "Nodes for these pods; {} allows any node.")
    resources: ResourceRequirements = field(
        ResourceRequirements(), "CPU, memory and devices of one pod.", restarts=Restarts.PODS
    )
    preference: int = field(
        0,
        "Preference among variants of equal cost; higher is first.",
        example=10,
        restarts=Restarts.NONE,
        ge=0,
        le=100,
    )
    max_replicas: int | None = field(
        None,
        "Maximum number of replicas of this variant.",
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
        """Return the number of devices in one replica's limits, for `budget.maxAccelerators`.

        Args:
            resource: resource name of the node class's accelerator. It always counts; other
                resources count if `is_accelerator` knows their name.
        """
        limits = self.resources.limits.items()
        return sum(
            int(quantity.parse(value))
            for name, value in limits
            if name == resource or is_accelerator(name)
        )


def is_accelerator(resource: str) -> bool:
    """Whether an extended resource has the name of a known accelerator."""
    domain, _, device = resource.rpartition("/")
    return bool(domain) and _ACCELERATOR.fullmatch(device) is not None
