"""Node classes as a plan sees them: roles, memory, price and speed of one replica. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from pydantic import ValidationError

from vlm_cli.plan import capacity
from vlm_cli.plan.capacity import DeviceMemory
from vlm_cli.plan.facts import ModelFacts, parts_of, type_of
from vlm_cli.plan.fields import PlanError
from vlm_cli.plan.speed import Device, guess_device
from vlm_operator.api import quantity
from vlm_operator.api.kinds import VLMNodeClassSpec
from vlm_operator.cluster import Manifest
from vlm_operator.names import Role


@dataclasses.dataclass(frozen=True)
class Node:
    """One node class.

    Attributes:
        has_accelerator: False for CPU nodes.
        num_devices: devices of a pod; the worker computes on one.
        memory: bytes of one device; of a CPU node, of a pod. None if unknown.
        price: cost of a replica per hour, the spot price on spot nodes; None if unknown.
        device: peak speeds; None if unknown.
    """

    name: str
    roles: frozenset[Role]
    has_accelerator: bool
    num_devices: int
    memory: int | None
    price: float | None
    is_spot: bool
    device: Device | None
    assumptions: tuple[str, ...] = ()

    def refusal(
        self,
        facts: ModelFacts,
        stages: Collection[Role],
        role: Role,
        *,
        weights: str,
        has_scales: bool = False,
        kv_dtype: str = "",
    ) -> str | None:
        """Return why pods of `role` with `stages` cannot run here; None if they can."""
        if self.roles and role not in self.roles:
            return f"the class does not accept the role {role}"
        if not self.has_accelerator and facts.dtype == "float16":
            return "the worker does not serve float16 on CPUs: --dtype=bfloat16"
        if not self.has_accelerator and any(
            type_of(part, weights) == "int4" for part in parts_of(stages)
        ):
            return f"--weights={weights} needs a GPU"
        if kv_dtype == "fp8" and not self.has_accelerator:
            return "--kv-dtype=fp8 needs a GPU"
        if self.has_accelerator and kv_dtype in capacity.MIXED_KV and set(stages) != {Role.ENCODER}:
            return f"--kv-dtype={kv_dtype} is for CPUs: a worker on a GPU refuses it"
        if self.has_accelerator and has_scales:
            return "a worker on a GPU refuses scales: remove model.weights.activationScales"
        names_head = "=" in weights and type_of("head", weights) != "auto"
        if self.has_accelerator and facts.is_head_tied and names_head:
            return "the head shares the embedding table's weights: --weights without head="
        if self.device is None:
            return f"its speed is unknown: give --device {self.name}=TFLOPS:GBPS[:MEMORY]"
        if self.memory is None:
            if role is Role.ENCODER:
                return None
            return f"its memory is unknown: give --device {self.name}=TFLOPS:GBPS:MEMORY"
        memory = self.memory_of(facts, stages, weights=weights)
        if memory.missing:
            return (
                f"weights, activations and caches take {memory.missing / 2**30:.1f} GiB more than "
                f"the {self.memory / 2**30:.1f} GiB of one device; tensor parallelism is not built"
            )
        if not memory.kv and set(stages) != {Role.ENCODER}:
            return f"no memory is left for KV of {self.memory / 2**30:.1f} GiB"
        return None

    def memory_of(
        self, facts: ModelFacts, stages: Collection[Role], *, weights: str
    ) -> DeviceMemory:
        """Divide the memory of one device; it must be known."""
        assert self.memory is not None
        return capacity.device_memory(facts, stages, self.memory, weights=weights)


def read_node(manifest: Manifest, devices: Mapping[str, Device]) -> Node:
    """Convert a VLMNodeClass.

    Args:
        manifest: the object.
        devices: the user's choice by class. Without one, the device is recognized by the class's
            name and by the values of its node selector.

    Raises:
        PlanError: the class is invalid; the message names class and field.
    """
    name = str(manifest["metadata"]["name"])
    spec = _spec(name, manifest)
    found = devices.get(name)
    notes = []
    if found is None:
        found = guess_device((name, *spec.node_selector.values()))
        if found is not None:
            notes.append(f"{name} has the device {found.name}, by its name or node selector.")
    memory = found.memory if found is not None else None
    num_devices = 0
    if spec.accelerator is not None:
        num_devices = spec.accelerator.count
        if spec.accelerator.memory is not None:
            memory = int(quantity.parse(str(spec.accelerator.memory)))
    if num_devices > 1:
        notes.append(f"{name} has {num_devices} devices per pod; the worker computes on one.")
    if found is not None:
        notes.append(f"{name}: at peak {found.teraflops:g} TFLOP/s and {found.gigabytes:g} GB/s.")
    if spec.speed:
        notes.append(f"{name}: relativePercent of `speed` is not used; the peaks differ already.")
    return Node(
        name=name,
        roles=frozenset(spec.roles),
        has_accelerator=spec.accelerator is not None,
        num_devices=num_devices,
        memory=memory,
        price=_price(spec),
        is_spot=spec.spot,
        device=found,
        assumptions=tuple(notes),
    )


def read_nodes(manifests: Iterable[Manifest], devices: Mapping[str, Device]) -> tuple[Node, ...]:
    """Convert VLMNodeClasses, sorted by name.

    Raises:
        PlanError: there is none, one is invalid, or `devices` names another.
    """
    nodes = sorted((read_node(item, devices) for item in manifests), key=lambda node: node.name)
    if not nodes:
        raise PlanError("there is no VLMNodeClass; write one, see docs/node-classes.md")
    names = [node.name for node in nodes]
    for name in devices:
        if name not in names:
            raise PlanError(f"--device: there is no VLMNodeClass {name!r}, but {', '.join(names)}")
    return tuple(nodes)


def _spec(name: str, manifest: Manifest) -> VLMNodeClassSpec:
    try:
        return VLMNodeClassSpec.model_validate(manifest.get("spec") or {})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise PlanError(f"VLMNodeClass {name}: spec.{field}: {first['msg']}") from None


def _price(spec: VLMNodeClassSpec) -> float | None:
    if spec.cost is None:
        return None
    spot = spec.cost.spot_per_hour if spec.spot else None
    return float(quantity.parse(str(spec.cost.per_hour if spot is None else spot)))
