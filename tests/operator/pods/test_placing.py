"""What a variant takes from its VLMNodeClass, and what a change of the class restarts."""

import dataclasses

import pytest

from support.world import body, pool, service
from vlm_operator.api import Variant
from vlm_operator.errors import SpecError
from vlm_operator.names import Role
from vlm_operator.pods.worker import place
from vlm_operator.rollout.revisions import current_revisions, keep_defaults
from vlm_operator.state import NodeClassState

L40S = NodeClassState(
    name="l40s",
    node_selector={"type": "l40s"},
    tolerations=({"key": "gpu", "operator": "Exists"},),
    accelerator="nvidia.com/gpu",
    accelerators=2,
    cost_per_hour=1.5,
    roles=frozenset({Role.DECODE}),
)


def on_class(name: str = "l40s", **more: object):
    variant = {"name": "fast", "nodeClassRef": {"name": name}, **more}
    return service(body(decode=pool(variants=[variant])))


def variant_of(placed, role: Role = Role.DECODE):
    return placed.spec.pools.present[role].variants[0]


def revisions(written, known: NodeClassState):
    placed = place(written, {known.name: known})
    resolved, shared = keep_defaults(placed, (), worker_image="w")
    return {key: item.id for key, item in current_revisions(resolved, shared, ()).items()}


def test_a_class_says_where_the_pods_go_and_which_devices_they_hold():
    found = variant_of(place(on_class(), {"l40s": L40S}))
    assert found.placement.node_selector == {"type": "l40s"}
    assert [item.key for item in found.placement.tolerations] == ["gpu"]
    assert found.resources.limits == {"nvidia.com/gpu": "2"}
    assert found.accelerators() == 2


def test_what_the_variant_says_of_a_device_wins_and_its_cpu_stays():
    written = on_class(resources={"requests": {"cpu": "4"}, "limits": {"nvidia.com/gpu": "1"}})
    found = variant_of(place(written, {"l40s": L40S}))
    assert found.resources.limits == {"nvidia.com/gpu": "1"}
    assert found.resources.requests == {"cpu": "4"}


def test_a_service_without_classes_stays_as_it_is():
    plain = service(body(decode=pool(variants=[{"name": "a", "placement": {}}])))
    assert place(plain, {}) == plain


def test_a_class_that_does_not_exist_is_named():
    with pytest.raises(SpecError) as refusal:
        place(on_class("h100"), {"l40s": L40S})
    assert str(refusal.value) == (
        "spec.pools.decode.variants[fast].nodeClassRef: VLMNodeClass h100 does not exist: create it"
    )


def test_a_class_that_does_not_take_the_role_says_which_it_takes():
    prefill_only = dataclasses.replace(L40S, roles=frozenset({Role.PREFILL}))
    with pytest.raises(SpecError, match="takes prefill only: choose another class"):
        place(on_class(), {"l40s": prefill_only})


@pytest.mark.parametrize(
    "change",
    [
        {"node_selector": {"type": "l40s", "zone": "b"}},
        {"tolerations": ()},
        {"accelerators": 1},
        {"accelerator": "amd.com/gpu"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_change_of_a_class_that_touches_pods_is_a_new_revision(change):
    before, after = (
        revisions(on_class(), L40S),
        revisions(on_class(), dataclasses.replace(L40S, **change)),
    )
    assert before[Role.DECODE, "fast"] != after[Role.DECODE, "fast"]
    assert before[Role.GATEWAY, ""] == after[Role.GATEWAY, ""]


@pytest.mark.parametrize(
    "change",
    [
        {"cost_per_hour": 9.0},
        {"speed": {Role.DECODE: 2.0}},
        {"spot": True},
        {"startup_seconds": 5.0},
        {"roles": frozenset()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_change_of_a_class_that_only_counts_is_none(change):
    assert revisions(on_class(), L40S) == revisions(on_class(), dataclasses.replace(L40S, **change))


@pytest.mark.parametrize(
    ("limits", "named", "count"),
    [
        ({"nvidia.com/gpu": "2", "rdma/hca": "1"}, None, 2),
        ({"nvidia.com/mig-1g.5gb": "1"}, None, 1),
        ({"nvidia.com/gpu.shared": "1", "nvidia.com/gpumem": "8000"}, None, 1),
        ({"huawei.com/Ascend910": "4", "google.com/tpu": "4"}, None, 8),
        ({"gpu.intel.com/i915": "1", "gpu.intel.com/i915_monitoring": "1"}, None, 1),
        ({"cpu": "4", "memory": "1Gi", "example.com/board": "3"}, None, 0),
        ({"example.com/board": "3", "rdma/hca": "1"}, "example.com/board", 3),
    ],
)
def test_what_counts_against_a_budget_of_accelerators(
    limits: dict[str, str], named: str | None, count: int
):
    variant = Variant.model_validate(
        {"name": "v", "placement": {}, "resources": {"limits": limits}}
    )
    assert variant.accelerators(named) == count
