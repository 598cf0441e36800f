"""What should exist, for any service; and one in full."""

import dataclasses
import json
from typing import Any

from hypothesis import given, settings
from inline_snapshot import snapshot

from support.world import body, empty, external, pool, service, specs
from vlm_operator import names
from vlm_operator.autoscale.decide import Memory
from vlm_operator.cluster import CHILD_KINDS, Manifest
from vlm_operator.names import Role
from vlm_operator.reconcile.decisions import Options, TurnPlan, plan_turn
from vlm_operator.state import DeploymentState, Resolved


def turn_plan(manifest: Manifest, observed: Any = None) -> TurnPlan:
    return plan_turn(service(manifest), observed or empty(), Memory(), options=Options())


def applied(first: TurnPlan) -> Any:
    """The cluster right after a plan was carried out."""
    children = {
        (item["kind"], item["metadata"]["name"]): json.loads(json.dumps(item))
        for item in first.plan.objects
    }
    for role in first.service.spec.pools.present:
        key = (names.KIND_POOL, names.child(first.service.name, role))
        children[key]["spec"]["replicas"] = first.pool_replicas[role]
    return dataclasses.replace(empty(), children=children)


@given(specs())
@settings(max_examples=60, deadline=None)
def test_planning_twice_plans_the_same(manifest: Manifest):
    assert turn_plan(manifest).plan == turn_plan(manifest).plan


@given(specs())
@settings(max_examples=60, deadline=None)
def test_planning_over_the_applied_plan_plans_the_same(manifest: Manifest):
    first = turn_plan(manifest)
    again = turn_plan(manifest, applied(first))
    assert again.plan == first.plan
    assert again.pool_replicas == {}
    assert again.step.done


@given(specs())
@settings(max_examples=60, deadline=None)
def test_every_child_is_owned_labelled_and_named_once_in_order(manifest: Manifest):
    found = turn_plan(manifest).plan
    seen = [(item["kind"], item["metadata"]["name"]) for item in found.objects]
    assert len(seen) == len(set(seen))
    order = [kind.kind for kind in CHILD_KINDS]
    positions = [order.index(kind) for kind, _ in seen]
    assert positions == sorted(positions)
    for item in found.objects:
        meta = item["metadata"]
        assert meta["ownerReferences"][0]["uid"] == "uid-service"
        assert meta["ownerReferences"][0]["controller"] is True
        assert meta["labels"][names.LABEL_SERVICE] == manifest["metadata"]["name"]
        assert meta["labels"][names.LABEL_APP_MANAGED_BY] == names.MANAGER
        assert "app.kubernetes.io/instance" not in meta["labels"]
        assert len(meta["name"]) <= 63
        json.dumps(item)


@given(specs())
@settings(max_examples=60, deadline=None)
def test_budgets_guard_two_replicas_or_more_and_never_one(manifest: Manifest):
    found = turn_plan(manifest)
    guarded = {
        item["metadata"]["labels"][names.LABEL_ROLE]
        for item in found.plan.objects
        if item["kind"] == "PodDisruptionBudget"
    }
    counts = {str(role): count for role, count in found.desired.items()}
    counts["gateway"] = found.service.spec.gateway.replicas
    assert guarded == {role for role, count in counts.items() if count >= 2}


def test_a_pool_of_external_mode_carries_its_bounds_and_never_the_number():
    found = turn_plan(body(decode=external(2, 5))).plan
    spec = next(item["spec"] for item in found.objects if item["kind"] == "VLMPool")
    assert spec == snapshot(
        {
            "serviceRef": {"name": "demo", "uid": "uid-service"},
            "role": "decode",
            "mode": "External",
            "minReplicas": 2,
            "maxReplicas": 5,
        }
    )


def test_the_objects_of_three_pools():
    found = turn_plan(body()).plan
    listed = [f"{item['kind']} {item['metadata']['name']}" for item in found.objects]
    assert listed == snapshot(
        [
            "ServiceAccount demo-encoder",
            "ServiceAccount demo-prefill",
            "ServiceAccount demo-decode",
            "ServiceAccount demo-gateway",
            "Role demo-gateway",
            "RoleBinding demo-gateway",
            "ConfigMap demo-gateway",
            "NetworkPolicy demo-encoder",
            "NetworkPolicy demo-prefill",
            "NetworkPolicy demo-decode",
            "NetworkPolicy demo-gateway",
            "Service demo-encoder",
            "Service demo-prefill",
            "Service demo-decode",
            "Service demo-gateway",
            "VLMPool demo-encoder",
            "VLMPool demo-prefill",
            "VLMPool demo-decode",
        ]
        + [f"Deployment {item['metadata']['name']}" for item in found.objects[-4:]]
    )


def test_what_a_revision_settled_is_read_back_from_its_deployment():
    found = turn_plan(body(decode=pool()))
    deployment = next(i for i in found.plan.objects if i["kind"] == "Deployment")
    state = DeploymentState.of(deployment)
    revision = found.revisions[Role.DECODE, "default"]
    assert state.revision == revision.id
    assert Resolved.parse(state.resolved) == revision.resolved
    assert "identity" not in json.loads(state.resolved)  # as operators before it wrote it
