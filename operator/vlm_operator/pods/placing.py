"""Fills in the placement and the devices of variants from their VLMNodeClasses.

nodeClassRef ─▶ VLMNodeClass ─▶ placement {nodeSelector, tolerations}, resources.limits[device]

The result equals a service in which the user wrote these fields. So a change of a class that
affects pods creates a new revision, and a change of its cost or speed does not.
"""

from __future__ import annotations

from collections.abc import Mapping

from vlm_operator.api import Placement, ResourceRequirements, Toleration, Variant, VLMService
from vlm_operator.errors import SpecError
from vlm_operator.names import Role
from vlm_operator.state import NodeClassState


def place(service: VLMService, classes: Mapping[str, NodeClassState]) -> VLMService:
    """Fill in the placement and the devices of all variants.

    Args:
        service: the service as the user wrote it.
        classes: the cluster's VLMNodeClasses by name.

    Raises:
        SpecError: a class does not exist, or does not allow the role.
    """
    pools = {}
    for role, pool in service.spec.pools.present.items():
        variants = [_placed(role, variant, classes) for variant in pool.variants]
        pools[role.value] = pool.model_copy(update={"variants": variants})
    spec = service.spec
    placed = spec.model_copy(update={"pools": spec.pools.model_copy(update=pools)})
    return service.model_copy(update={"spec": placed})


def _placed(role: Role, variant: Variant, classes: Mapping[str, NodeClassState]) -> Variant:
    if variant.node_class_ref is None:
        return variant
    name = variant.node_class_ref.name
    path = f"spec.pools.{role}.variants[{variant.name}].nodeClassRef"
    found = classes.get(name)
    if found is None:
        raise SpecError(path, f"VLMNodeClass {name} does not exist: create it")
    if found.roles and role not in found.roles:
        allowed = " and ".join(sorted(found.roles))
        raise SpecError(path, f"VLMNodeClass {name} takes {allowed} only: choose another class")
    placement = Placement(
        node_selector=dict(found.node_selector),
        tolerations=[Toleration.model_validate(item) for item in found.tolerations],
    )
    resources = variant.resources
    if found.accelerator is not None:
        limits = {found.accelerator: str(found.accelerators), **resources.limits}
        resources = ResourceRequirements(requests=resources.requests, limits=limits)
    return variant.model_copy(update={"placement": placement, "resources": resources})
