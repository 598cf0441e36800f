"""What a real API server admits where it enforces Pod Security `restricted`.

Each pod is created by a dry run on the server: nothing of it is stored, and no node is needed.
"""

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings

from support.world import body, empty, pool, service, specs
from vlm_local.client import ApiError
from vlm_local.controlplane import ControlPlane
from vlm_operator import names
from vlm_operator.autoscale.decide import Memory
from vlm_operator.cluster import Manifest
from vlm_operator.reconcile.decisions import Options, plan_turn

pytestmark = pytest.mark.cluster

SPACE = "restricted-pods"
LEVEL = {"pod-security.kubernetes.io/enforce": "restricted"}


@pytest.fixture(scope="module")
def plane(control_plane: ControlPlane) -> ControlPlane:
    """With a namespace that enforces `restricted`, and a ServiceAccount for pods."""

    async def make() -> None:
        async with control_plane.client() as api:
            metadata = {"name": SPACE, "labels": LEVEL}
            await api.create("/api/v1/namespaces", {"metadata": metadata})
            account = {"metadata": {"name": "of-pods"}}
            await api.create(f"/api/v1/namespaces/{SPACE}/serviceaccounts", account)

    asyncio.run(make())
    return control_plane


def pods(manifest: Manifest) -> dict[str, dict[str, Any]]:
    """By role, as a ReplicaSet would make them."""
    found = plan_turn(service(manifest), empty(), Memory(), options=Options())
    made = {}
    for item in found.plan.objects:
        if item["kind"] != "Deployment":
            continue
        template = copy.deepcopy(item["spec"]["template"])
        template["spec"]["serviceAccountName"] = "of-pods"
        template["spec"].pop("priorityClassName", None)  # the cluster's, which is not here
        role = template["metadata"]["labels"][names.LABEL_ROLE]
        made[role] = {"metadata": template["metadata"] | {"name": role}, "spec": template["spec"]}
    return made


def refusals(plane: ControlPlane, *made: dict[str, Any]) -> list[str]:
    """What the server says of each; "" where it admits the pod."""

    async def ask() -> list[str]:
        said = []
        async with plane.client() as api:
            for pod in made:
                try:
                    await api.request(
                        "POST", f"/api/v1/namespaces/{SPACE}/pods", body=pod,
                        params={"dryRun": "All"},
                    )  # fmt: skip
                    said.append("")
                except ApiError as error:
                    said.append(str(error))
        return said

    return asyncio.run(ask())


@given(specs())
@settings(max_examples=20, deadline=None)
def test_pods_of_any_service_are_admitted(plane: ControlPlane, manifest: Manifest):
    made = pods(manifest)
    assert made
    assert refusals(plane, *made.values()) == [""] * len(made)


def context(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda spec: spec["containers"][0]["securityContext"].update(changes)


def volume(**source: Any) -> Callable[[dict[str, Any]], None]:
    return lambda spec: spec["volumes"].append({"name": "theirs", **source})


def root(spec: dict[str, Any]) -> None:
    spec["securityContext"]["runAsNonRoot"] = False
    spec["containers"][0]["securityContext"].pop("runAsNonRoot", None)


def unconfined(spec: dict[str, Any]) -> None:
    spec["securityContext"].pop("seccompProfile")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param(context(allowPrivilegeEscalation=True), "allowPrivilegeEscalation", id="rise"),
        pytest.param(context(capabilities={}), "unrestricted capabilities", id="capabilities"),
        pytest.param(root, "runAsNonRoot", id="root"),
        pytest.param(unconfined, "seccompProfile", id="seccomp"),
        pytest.param(volume(hostPath={"path": "/"}), "hostPath", id="the node's files"),
        pytest.param(lambda spec: spec.update(hostNetwork=True), "host namespaces", id="network"),
    ],
)
def test_one_thing_less_and_the_same_pod_is_refused(
    plane: ControlPlane, change: Callable[[dict[str, Any]], None], named: str
):
    """Or the namespace would enforce nothing, and what is admitted would say nothing."""
    made = pods(body(decode=pool()))
    for pod in made.values():
        change(pod["spec"])
    said = refusals(plane, *made.values())
    assert len(said) == 2
    assert all("violates PodSecurity" in text and named in text for text in said), said
