"""The checks of `vlm doctor` over facts: a healthy cluster, and then one thing wrong with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml

from vlm_cli.definitions import KINDS, crd
from vlm_cli.doctor.command import CHECKS, examine
from vlm_cli.doctor.facts import GLOBAL, LOCAL, Level, Right
from vlm_cli.doctor.nodes import problem_of
from vlm_cli.doctor.rights import OF_CERTIFICATES, OF_CLUSTER, OF_NAMESPACES, of_authority, of_lease
from vlm_cli.doctor.services import gateways
from vlm_operator import names
from vlm_operator.cluster import DEPLOYMENT, LEASE, NETWORK_POLICY

from .doctor_facts import (
    GPU,
    ROOT,
    Objects,
    blocked_pod,
    claim,
    deployment,
    endpoints,
    gateway_policy,
    gateway_role,
    healthy,
    installed,
    lease,
    node,
    node_class,
    scaler,
    service,
    vlm_pool,
    with_objects,
    wrong,
)


def test_a_healthy_cluster_passes_every_check_and_each_says_what_it_saw():
    assert wrong(healthy()) == []
    silent = {check.__name__ for check in CHECKS if not list(check(healthy()))}
    # these speak only where something is wrong, or where they were asked
    assert silent == {
        "unreadable",
        "exclusive",
        "watched",
        "pods",
        "writers",
        "gateway",
        "paused",
        "owners",
    }


def _old_definition() -> list[dict[str, Any]]:
    found = [crd(kind) for kind in KINDS]
    spec = found[0]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"] = dict(spec["properties"])
    spec["properties"].pop("slo")
    return found


def _unserved() -> list[dict[str, Any]]:
    found = [crd(kind) for kind in KINDS]
    found[1]["spec"]["versions"][0]["served"] = False
    return found


def _cordoned() -> list[dict[str, Any]]:
    return [{**node(type="fast"), "spec": {"unschedulable": True}}]


def _watching(*spaces: str) -> dict[str, Any]:
    found = deployment()
    container = found["spec"]["template"]["spec"]["containers"][0]
    container["args"] += [f"--namespace={space}" for space in spaces]
    return found


def _second(*spaces: str) -> list[dict[str, Any]]:
    other = _watching(*spaces)
    other["metadata"]["namespace"] = "elsewhere"
    return [deployment(), other]


def _tainted(key: str, effect: str) -> dict[str, Any]:
    found = node(type="fast")
    found["spec"]["taints"] = [{"key": key, "value": "b", "effect": effect}]
    return found


@pytest.mark.parametrize(
    ("change", "check", "level", "said"),
    [
        ({"customresourcedefinitions": []}, "crds", "fail", "is not installed"),
        ({"customresourcedefinitions": _old_definition()}, "crds", "warn", ".spec.slo"),
        ({"customresourcedefinitions": _unserved()}, "crds", "fail", "serves nothing"),
        ({"leases": []}, "lease", "fail", "is missing: no operator leads"),
        ({"leases": [lease("")]}, "lease", "fail", "has no holder"),
        ({"leases": [lease(ago=99)]}, "lease", "fail", "not renewed for 99 s"),
        ({"leases": [lease(ago=-60)]}, "lease", "warn", "60 s from now"),
        ({"deployments": []}, "operator", "warn", "no Deployment"),
        (
            {"deployments": [installed("Deployment", "triptych-operator")]},
            "operator", "warn", "0 of 1 pods ready",
        ),
        (
            {"deployments": _second()},
            "operator", "fail", "both watch every namespace",
        ),
        (
            {"deployments": _second("ns")},
            "operator", "fail", "both watch ns",
        ),
        (
            {"deployments": [_watching("other")]},
            "operator", "fail", "no operator watches namespace ns",
        ),
        ({"roles": []}, "gateway", "fail", "Role ns/demo-gateway is missing"),
        ({"roles": [gateway_role("get")]}, "gateway", "fail", "list and watch of pods"),
        ({"nodes": []}, "nodes", "fail", "no node: every pod stays Pending"),
        ({"nodes": _cordoned()}, "nodes", "fail", "0 of 1 nodes accept pods"),
        ({"nodes": [node()]}, "node-classes", "fail", "fast: no node has type=fast"),
        (
            {"vlmnodeclasses": [node_class(count=8)]},
            "node-classes", "fail", f"needs 8 {GPU}, the largest of its nodes has 2",
        ),
        (
            {"nodes": [_tainted("team", "NoSchedule")]},
            "node-classes", "fail", "do not tolerate: team=b:NoSchedule",
        ),
        ({"vlmnodeclasses": []}, "placement", "fail", "fast does not exist"),
        ({"persistentvolumeclaims": []}, "claims", "fail", "ns/shapes does not exist"),
        ({"persistentvolumeclaims": [claim("Lost")]}, "claims", "fail", "lost"),
        ({"persistentvolumeclaims": [claim("Pending")]}, "claims", "warn", "Pending"),
        (
            {"persistentvolumeclaims": [claim(mode="ReadWriteOnce")]},
            "claims", "warn", "a second node cannot mount it",
        ),
        (
            {"namespaces": [{"metadata": {
                "name": "ns", "labels": {"pod-security.kubernetes.io/enforce": "strict"}}}]},
            "pod-security", "warn", "strict is no level",
        ),
        ({"pods": [blocked_pod("ImagePullBackOff")]}, "pods", "fail", "ImagePullBackOff"),
        ({"pods": [blocked_pod("Pending")]}, "pods", "warn", "no node fits"),
        (
            {"horizontalpodautoscalers": [scaler("a")]},
            "writers", "fail", "which is of mode Manual",
        ),
        (
            {"horizontalpodautoscalers": [scaler("a"), scaler("b")]},
            "writers", "fail", "against each other",
        ),
        (
            {"horizontalpodautoscalers": [scaler("a")], "vlmpools": []},
            "writers", "warn", "does not exist",
        ),
        (
            {"vlmpools": [vlm_pool("Auto", "kubectl-scale")]},
            "writers", "warn", "kubectl-scale wrote its replicas",
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line_with_a_remedy(
    change: Objects, check: str, level: str, said: str
):
    found = [item for item in wrong(with_objects(**change)) if item.check == check]
    assert [item for item in found if said in item.message and item.level.value == level], found
    assert all(item.remedy for item in found if item.level is Level.FAIL)


@pytest.mark.parametrize(
    ("conditions", "level", "said"),
    [
        ([("Ready", "False", "PodsPending", "decode 0/1: Pending")], "fail", "decode 0/1: Pending"),
        ([("Ready", "False", "PodsStarting", "decode 0/1")], "warn", "PodsStarting"),
        ([("Ready", "False", "WaitsForModel", "waits for the model: x")], "warn", "WaitsForModel"),
        (
            [
                ("Ready", "True", "Serving", ""),
                ("ScalingActive", "False", "ScalingConflict", "decode: somebody wrote"),
            ],
            "warn", "decode: somebody wrote",
        ),
    ],
)  # fmt: skip
def test_a_service_that_is_not_well_says_its_one_sentence(
    conditions: list[tuple[str, str, str, str]], level: str, said: str
):
    (found,) = wrong(with_objects(vlmservices=[service(*conditions)]))
    assert (found.check, found.level.value) == ("services", level)
    assert said in found.message


def test_a_claim_of_several_services_is_told_once_and_no_node_is_one_thing():
    twins = [service(), service()]
    twins[1]["metadata"] |= {"name": "other", "uid": "u-2"}
    roles = [gateway_role("*"), gateway_role("*", service="other")]
    missing = wrong(with_objects(vlmservices=twins, persistentvolumeclaims=[], roles=roles))
    assert [item.check for item in missing] == ["claims"]
    empty = wrong(with_objects(nodes=[], vlmnodeclasses=[]))
    assert [item.check for item in empty] == ["nodes"]


def test_what_a_person_chose_is_no_problem():
    chosen = [("Ready", "True", "Serving", ""), ("ScalingActive", "False", "Paused", "spec.paused")]
    assert wrong(with_objects(vlmservices=[service(*chosen)])) == []


def test_a_paused_service_is_reported_with_the_patch_and_is_no_problem():
    paused = service()
    paused["spec"]["paused"] = True
    facts = with_objects(vlmservices=[paused])
    assert wrong(facts) == []
    (found,) = (item for item in examine(facts) if "is paused" in item.message)
    assert '{"spec":{"paused":false}}' in found.remedy


def test_a_policy_without_the_port_of_the_api_server_is_found():
    waits = service(("Ready", "False", "PodsStarting", "gateway 0/1"))
    facts = with_objects(endpointslices=[endpoints(16443)], vlmservices=[waits])
    (found,) = (item for item in wrong(facts) if item.check == "network")
    assert "denies the API server's port 16443" in found.message
    assert "network.apiServerPorts" in found.remedy
    assert wrong(with_objects(networkpolicies=[gateway_policy(16443)], endpointslices=[])) == []
    ready = with_objects(endpointslices=[endpoints(16443)])
    assert wrong(ready) == []  # its gateways reach the API server
    anything = gateway_policy()
    anything["spec"]["egress"] = [{}]
    open_to_all = dataclasses.replace(facts, objects={**facts.objects, NETWORK_POLICY: [anything]})
    assert not [item for item in wrong(open_to_all) if item.check == "network"]


def test_pods_and_pools_without_an_owner_are_found():
    pod, pool = blocked_pod(""), vlm_pool()
    pod["status"] = {}
    for item in (pod, pool):
        item["metadata"].pop("ownerReferences")
    found = wrong(with_objects(pods=[pod], vlmpools=[pool]))
    assert [item.check for item in found] == ["owners", "owners"]
    assert "no ReplicaSet controls it" in found[0].message
    assert "belongs to no VLMService" in found[1].message


def test_the_fix_of_a_refused_spec_names_the_service():
    refused = service()
    refused["spec"]["pools"]["encoder"]["scaling"] = {"mode": "Auto"}
    remedies = [item.remedy for item in wrong(with_objects(vlmservices=[refused]))]
    assert "correct it: kubectl -n ns edit vlm demo" in remedies


def test_a_service_without_status_and_one_being_deleted_are_reported():
    fresh, going = service(), service()
    fresh.pop("status")
    going["metadata"] |= {"deletionTimestamp": "2026-11-21T10:00:00Z"}
    assert "has no status" in wrong(with_objects(vlmservices=[fresh]))[0].message
    (found,) = wrong(with_objects(vlmservices=[going]))
    assert found.remedy.endswith("vlm release-finalizers")


@pytest.mark.parametrize(
    ("version", "level"),
    [("v1.34.2", "ok"), ("v1.30.0-eks-1", "ok"), ("v1.29.9", "fail"), ("main", "warn")],
)
def test_the_oldest_api_server_is_the_charts(version: str, level: str):
    facts = dataclasses.replace(healthy(), version=version)
    (found,) = [item for item in examine(facts) if item.check == "api"]
    assert found.level.value == level
    chart = yaml.safe_load((ROOT / "helm" / "triptych" / "Chart.yaml").read_text())
    assert chart["kubeVersion"] == ">=1.30.0-0"


def test_a_right_that_lacks_is_named():
    facts = healthy()
    scale = Right("patch", "", "pods/status")
    who = next(iter(facts.operators))
    rights = {**facts.operators, who: {**facts.operators[who], scale: False}}
    (found,) = wrong(dataclasses.replace(facts, operators=rights))
    assert found.message.endswith("triptych-operator may not patch pods/status")
    forward = Right("create", "", "pods/portforward")
    (found,) = wrong(dataclasses.replace(facts, user_rights={**facts.user_rights, forward: False}))
    assert (found.level, "vlm chat" in found.message) == (Level.WARN, True)
    reading = Right("list", names.GROUP, names.PLURAL_SERVICE)
    (found,) = wrong(dataclasses.replace(facts, user_rights={**facts.user_rights, reading: False}))
    assert found.level is Level.FAIL


def test_what_may_not_be_read_is_said_and_never_judged():
    facts = healthy()
    for kind in (*GLOBAL, *LOCAL, DEPLOYMENT, LEASE):
        objects = {key: found for key, found in facts.objects.items() if key is not kind}
        blind = dataclasses.replace(facts, objects=objects, unreadable={kind: "forbidden"})
        found = wrong(blind)
        assert {item.level for item in found} == {Level.WARN}, kind
        assert any(kind.plural in item.message for item in found)
    blind = dataclasses.replace(facts, operators={}, review_problem="forbidden")
    assert [item.level for item in wrong(blind)] == [Level.WARN]


def test_the_rights_that_are_asked_for_are_those_that_the_chart_grants():
    def granted(kind: str, name: str) -> set[Right]:
        return {
            Right(verb, group, resource, "" if not rule.get("resourceNames") else only)
            for rule in installed(kind, name)["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
            for only in rule.get("resourceNames", [""])
        }

    assert granted("ClusterRole", "triptych-system:triptych-operator") == {
        *OF_NAMESPACES,
        *OF_CLUSTER,
        *OF_CERTIFICATES,
    }
    assert granted("Role", "triptych-operator-lease") == {
        *of_lease("triptych-operator"),
        *of_authority("triptych-operator-ca"),
    }


@pytest.mark.parametrize("replicas", [None, 1, 2])
def test_one_gateway_is_told_with_the_patch_for_two(replicas: int | None) -> None:
    only = service()
    if replicas is not None:
        only["spec"]["gateway"] = {"replicas": replicas}
    (found,) = gateways(with_objects(vlmservices=[only]))
    assert found.level is Level.OK
    assert ("requests fail" in found.message) == (replicas != 2)
    assert found.remedy.endswith("""-p '{"spec":{"gateway":{"replicas":2}}}'""") == (replicas != 2)


TOLERATIONS: dict[str, tuple[dict[str, str], bool]] = {
    "the same value": ({"key": "team", "value": "b"}, True),
    "another value": ({"key": "team", "value": "a"}, False),
    "no value": ({"key": "team"}, False),
    "any value": ({"key": "team", "operator": "Exists"}, True),
    "any taint": ({"operator": "Exists"}, True),
    "another key": ({"key": "role", "operator": "Exists"}, False),
    "another effect": ({"key": "team", "operator": "Exists", "effect": "NoExecute"}, False),
    "its effect": ({"key": "team", "value": "b", "effect": "NoSchedule"}, True),
}


@pytest.mark.parametrize(("toleration", "fits"), TOLERATIONS.values(), ids=TOLERATIONS)
def test_a_taint_counts_unless_a_toleration_matches_it(toleration: dict[str, str], fits: bool):
    nodes = [_tainted("team", "NoSchedule")]
    problem, _ = problem_of(nodes, {}, {GPU: 1}, [toleration])
    assert (problem == "") is fits


@pytest.mark.parametrize(("key", "effect"), [(GPU, "NoSchedule"), ("team", "PreferNoSchedule")])
def test_a_taint_of_the_device_and_a_preference_do_not_count(key: str, effect: str):
    """Clusters that taint nodes by their device add the toleration to pods that ask for it."""
    assert problem_of([_tainted(key, effect)], {}, {GPU: 1}, []) == ("", "")


def test_one_node_without_the_taint_is_enough():
    nodes = [_tainted("team", "NoSchedule"), node("n2")]
    assert problem_of(nodes, {}, {GPU: 1}, []) == ("", "")
    nodes[1]["status"]["allocatable"] = {}
    assert "team=b:NoSchedule" in problem_of(nodes, {}, {GPU: 1}, [])[0]
