"""The kinds VLMPool, replicas with a scale subresource, and VLMNodeClass, a type of node."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from vlm_operator.api.base import Bytes, DeviceName, Model, ObjectName, Quantity, Rule, field
from vlm_operator.api.enums import ScalingMode
from vlm_operator.api.placement import Labels, Toleration
from vlm_operator.api.policy import PoolRole
from vlm_operator.api.status import Condition, Text
from vlm_operator.names import Role


class ServiceRef(Model):
    """The VLMService to which a pool belongs."""

    name: ObjectName = field(..., "Its name.", example="demo")
    uid: str | None = field(
        None,
        "Its uid.",
        example="3f1f6c1e-7f2b-4c7e-9d55-0f4f2b8d1a11",
        unset="unknown",
        max_length=64,
    )


class VLMPoolSpec(Model):
    """The replicas of one role. The operator writes it; other scalers use the scale subresource."""

    service_ref: ServiceRef | None = field(
        None, "The VLMService it belongs to.", unset="being written"
    )
    role: Role | None = field(None, "The role it counts.", example="decode", unset="being written")
    replicas: int = field(
        ..., "Replicas wanted; kubectl scale, HPA and KEDA write here.", example=2, ge=0, le=10_000
    )
    min_replicas: int | None = field(
        None, "Fewest replicas, from the VLMService.", example=1, unset="Manual", ge=0
    )
    max_replicas: int | None = field(
        None, "Most replicas, from the VLMService.", example=8, unset="Manual", ge=1
    )
    mode: ScalingMode | None = field(
        None,
        "The scaling mode of the pool, copied from the VLMService.",
        example="External",
        unset="being written",
    )

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            name="pool-min-max",
            holds="!(has(self.minReplicas) && has(self.maxReplicas)) || "
            "self.minReplicas <= self.maxReplicas",
            message="is greater than maxReplicas: lower it, or raise maxReplicas",
            at=".minReplicas",
        ),
    )


class VLMPoolStatus(Model):
    """The observed state of a pool."""

    replicas: int = field(0, "Pods that exist.")
    ready_replicas: int = field(0, "Pods that are ready.")
    selector: Text | None = field(None, "Label selector of the pods, for HPA.")
    conditions: list[Condition] | None = field(
        None, "Aspects of the state.", keys="type", max_length=32
    )


class Accelerator(Model):
    """The devices of one pod."""

    resource_name: DeviceName = field(..., "Extended resource.", example="nvidia.com/gpu")
    count: int = field(1, "Devices per pod.", example=1, ge=1, le=64)
    memory: Bytes | None = field(None, "Memory of one device.", example="48Gi", unset="unknown")


class NodeCost(Model):
    """The cost of a replica."""

    per_hour: Quantity = field(..., "Cost of a replica per hour; quote fractions.", example="1.20")
    spot_per_hour: Quantity | None = field(
        None, "The same on spot nodes.", example="0.45", unset="perHour"
    )


class Speed(Model):
    """The speed of one replica of a role on these nodes."""

    role: PoolRole = field(..., "The role.", example="encoder")
    relative_percent: int = field(
        100, "Work per second relative to other classes, in percent.", example=180, ge=1, le=100_000
    )


class VLMNodeClassSpec(Model):
    """A type of node, as the platform team declares it."""

    node_selector: Labels = field(
        {}, "Labels of its nodes.", example={"triptych.dev/node-type": "gpu-memory"}
    )
    tolerations: list[Toleration] = field([], "Taints of its nodes.", max_length=16)
    accelerator: Accelerator | None = field(None, "The devices of one pod.", unset="none")
    cost: NodeCost | None = field(None, "What a replica costs.", unset="unknown")
    spot: bool = field(False, "Whether its nodes may be taken away.", example=True)
    expected_startup_seconds: int = field(
        180, "Seconds until a replica is ready, until it is measured.", example=240, ge=1, le=86400
    )
    roles: Annotated[list[PoolRole], Field(json_schema_extra={"x-kubernetes-list-type": "set"})] = (
        field([], "Roles that may run here; empty is all.", example=["encoder"], max_length=3)
    )
    speed: list[Speed] = field([], "How fast each role is here.", keys="role", max_length=3)


class ClassUsage(Model):
    """The use of a class by the services of one operator."""

    operator: str = field(..., "Namespace and name of its Lease.", max_length=317)
    replicas: int = field(0, "Replicas that run there.")
    startup_p90_seconds: int | None = field(
        None, "Seconds from creation to ready, at the 90th percentile."
    )


class VLMNodeClassStatus(Model):
    """The nodes of a class in the cluster, and their use."""

    nodes: int = field(0, "Nodes that match.")
    allocatable: int | None = field(
        None, "Replicas for which their devices suffice; absent without an accelerator."
    )
    in_use: int = field(0, "Replicas that run there, of all operators.")
    usage: list[ClassUsage] | None = field(
        None, "What each operator uses; each writes its own entry.", keys="operator", max_length=256
    )
    measured_startup_p90_seconds: int | None = field(
        None, "Seconds from creation to ready, at the 90th percentile; of operators, the longest."
    )
    conditions: list[Condition] | None = field(
        None, "Aspects of the state.", keys="type", max_length=32
    )
