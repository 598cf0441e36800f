"""A podTemplate may change everything but what the operator sets."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.world import body, empty, pool, service
from vlm_operator.autoscale.decide import Memory
from vlm_operator.errors import SpecError
from vlm_operator.reconcile.decisions import Options, plan_turn

WORKER, GATEWAY = "spec.pools.decode.podTemplate", "spec.gateway.podTemplate"


def of_decode(spec: dict[str, Any]) -> dict[str, Any]:
    return body(decode=pool(podTemplate={"spec": spec}))


def of_gateway(spec: dict[str, Any]) -> dict[str, Any]:
    return body({"gateway": {"podTemplate": {"spec": spec}}}, decode=pool())


def worker(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "worker", **fields}]}


@pytest.mark.parametrize(
    ("spec", "path", "message"),
    [
        ({"nodeSelector": {"a": "b"}}, ".spec.nodeSelector", "set placement of a variant"),
        ({"tolerations": []}, ".spec.tolerations", "set placement of a variant"),
        ({"affinity": {}}, ".spec.affinity", "set placement of a variant"),
        ({"nodeName": "n"}, ".spec.nodeName", "set placement of a variant"),
        (
            {"terminationGracePeriodSeconds": 5},
            ".spec.terminationGracePeriodSeconds",
            "set drain.timeoutSeconds",
        ),
        ({"restartPolicy": "Never"}, ".spec.restartPolicy", "remove it"),
        (worker(image="x"), ".spec.containers[worker].image", "set pools.decode.image"),
        (worker(command=["x"]), ".spec.containers[worker].command", "set engine.extraArgs"),
        (worker(args=["x"]), ".spec.containers[worker].args", "set engine.extraArgs"),
        (worker(ports=[{"containerPort": 1}]), ".spec.containers[worker].ports", "remove it"),
        (worker(livenessProbe={}), ".spec.containers[worker].livenessProbe", "remove it"),
        (
            worker(resources={"limits": {"cpu": 1}}),
            ".spec.containers[worker].resources",
            "set resources of a variant",
        ),
        (
            worker(env=[{"name": "POD_IP", "value": "x"}]),
            ".spec.containers[worker].env[POD_IP]",
            "remove it",
        ),
        (
            worker(env=[{"name": "TRIPTYCH_ROLE", "value": "x"}]),
            ".spec.containers[worker].env[TRIPTYCH_ROLE]",
            "remove it",
        ),
        (
            worker(volumeMounts=[{"name": "v", "mountPath": "/tmp/x"}]),
            ".spec.containers[worker].volumeMounts[/tmp/x]",
            "choose another path",
        ),
        (
            worker(volumeMounts=[{"name": "v", "mountPath": "/var/run/triptych/identity"}]),
            ".spec.containers[worker].volumeMounts[/var/run/triptych/identity]",
            "choose another path",
        ),
        (
            worker(volumeMounts=[{"name": "v", "mountPath": "/var/run/"}]),
            ".spec.containers[worker].volumeMounts[/var/run]",
            "hides /var/run/triptych/identity",
        ),
        (
            {"volumes": [{"name": "triptych-identity", "emptyDir": {}}]},
            ".spec.volumes[triptych-identity]",
            "choose another",
        ),
        (
            {"volumes": [{"name": "triptych-tmp", "emptyDir": {}}]},
            ".spec.volumes[triptych-tmp]",
            "choose another",
        ),
        (
            {"containers": [{"name": "s", "resources": {"limits": {"nvidia.com/gpu": 1}}}]},
            ".spec.containers[s].resources.limits[nvidia.com/gpu]",
            "only the worker may have devices",
        ),
        (
            {"initContainers": [{"name": "s", "resources": {"requests": {"amd.com/gpu": 1}}}]},
            ".spec.initContainers[s].resources.requests[amd.com/gpu]",
            "only the worker may have devices",
        ),
        ({"containers": [{"image": "x"}]}, ".spec.containers[0]", "an object with name"),
        ({"containers": ["x"]}, ".spec.containers[0]", "an object with name"),
        ({"containers": {"name": "x"}}, ".spec.containers", "must be a list"),
        (
            {"volumes": [{"name": "a"}, {"name": "a"}]},
            ".spec.volumes[1]",
            "two items have the name a",
        ),
        ({"$patch": "replace"}, ".spec.$patch", "directives of a patch"),
        (
            worker(env=[{"name": "A", "$patch": "delete"}]),
            ".spec.containers[0].env[0].$patch",
            "directives of a patch",
        ),
    ],
)
def test_what_the_operator_sets_is_refused_with_the_field_and_the_fix(
    spec: dict[str, Any], path: str, message: str
):
    with pytest.raises(SpecError) as caught:
        service(of_decode(spec))
    assert str(caught.value).startswith(f"{WORKER}{path}: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "path", "message"),
    [
        ({"affinity": {}}, ".spec.affinity", "set gateway.placement"),
        ({"automountServiceAccountToken": False}, ".spec.automountServiceAccountToken", "watches"),
        (
            {"containers": [{"name": "gateway", "image": "x"}]},
            ".spec.containers[gateway].image",
            "set gateway.image",
        ),
        (
            {"containers": [{"name": "gateway", "args": []}]},
            ".spec.containers[gateway].args",
            "set the fields of gateway",
        ),
        (
            {"containers": [{"name": "gateway", "resources": {"requests": {}}}]},
            ".spec.containers[gateway].resources",
            "set gateway.resources",
        ),
    ],
)
def test_the_gateway_has_the_same_rules(spec: dict[str, Any], path: str, message: str):
    with pytest.raises(SpecError) as caught:
        service(of_gateway(spec))
    assert str(caught.value).startswith(f"{GATEWAY}{path}: ")
    assert message in str(caught.value)


_CONTAINER = ["name", "worker", "env", "volumeMounts", "mountPath", "resources", "limits", "ports"]
_SECURITY = ["securityContext", "capabilities", "drop"]
_NAMES = st.sampled_from(["containers", "initContainers", "volumes", *_CONTAINER, *_SECURITY])
_ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 3) | _NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(_NAMES, _ANY, max_size=4), _ANY)
@settings(max_examples=300, deadline=None)
def test_whatever_is_written_is_refused_with_a_path_or_merged(spec: dict[str, Any], inner: Any):
    """The API server checks types only after the merge, in a dry run."""
    for tried in (spec, {"containers": [{"name": "worker", "resources": inner, "env": inner}]}):
        try:
            found = service(of_decode(tried))
        except SpecError as error:
            path = str(error)
        else:
            path = f"{WORKER}.spec"
            plan_turn(found, empty(), Memory(), options=Options())
        assert path.startswith(f"{WORKER}.spec")


def test_everything_else_is_accepted():
    spec = {
        "serviceAccountName": "reader",
        "automountServiceAccountToken": True,
        "runtimeClassName": "nvidia",
        "schedulerName": "volcano",
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one"}],
        "initContainers": [{"name": "warm", "image": "busybox", "restartPolicy": "Always"}],
        "containers": [
            {"name": "sidecar", "image": "busybox", "command": ["sleep", "1"]},
            {
                "name": "worker",
                "resources": {"claims": [{"name": "gpu"}]},
                "env": [{"name": "A", "value": "b"}],
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
            },
        ],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    assert service(of_decode(spec)).spec.pools.decode.pod_template.spec == spec
