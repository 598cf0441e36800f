"""The table of causes: which row applies, what it says, after what delay a person is needed."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.fakes import sample_of
from vlm_operator.names import Role
from vlm_operator.state import PodState
from vlm_operator.state.cluster_view import ContainerState, error_line
from vlm_operator.status.causes import pod_problem, references, sentence, split

POD = PodState(
    name="demo-decode-0", uid="u", role=Role.DECODE, variant="default", revision="r", node="n1",
    ip="10.0.0.1", created=100.0, scheduled=True, containers_ready=False, ready=False,
    accepting=None, gate_since=None, deleting=False, finished=False, restarts=0, deletion_cost=0,
    blocked="",
)  # fmt: skip
FIELDS = references(
    {
        "model": {"uri": "pvc://shapes/a"},
        "gateway": {"auth": {"secretRef": {"name": "keys"}}},
        "pools": {
            "decode": {
                "engine": {"env": [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "tok"}}}]},
                "podTemplate": {
                    "spec": {"volumes": [{"name": "v", "configMap": {"name": "conf"}}]}
                },
            }
        },
    }
)


def seen(*containers: ContainerState, **changes: object) -> PodState:
    return dataclasses.replace(POD, containers=containers, **changes)


def config_error(message: str) -> PodState:
    return seen(ContainerState(waiting="CreateContainerConfigError", waiting_message=message))


def test_a_manifest_knows_which_field_names_what():
    assert FIELDS == {
        ("PersistentVolumeClaim", "shapes"): "model.uri",
        ("Secret", "keys"): "gateway.auth.secretRef",
        ("Secret", "tok"): "pools.decode.engine.env[T].valueFrom.secretKeyRef",
        ("ConfigMap", "conf"): "pools.decode.podTemplate.spec.volumes[v].configMap",
    }


@pytest.mark.parametrize(
    ("pod", "reason", "cause", "fix"),
    [
        (
            config_error('secret "tok" not found'), "MissingReference", 'Secret "tok" not found',
            "create it or change pools.decode.engine.env[T].valueFrom.secretKeyRef",
        ),
        (
            config_error("couldn't find key token in Secret ns/tok"), "MissingReference",
            'Secret "tok" has no key token', "add the key or change pools.decode.engine.env[T]",
        ),
        (
            seen(unscheduled='0/1 nodes: persistentvolumeclaim "shapes" not found.'),
            "MissingReference", 'PersistentVolumeClaim "shapes" not found', "change model.uri",
        ),
        (
            seen(ContainerState(waiting="ImagePullBackOff", waiting_message="no such tag")),
            "ImagePullFailed", "no such tag", "spec.image or imagePullSecrets",
        ),
        (
            seen(ContainerState(waiting="ContainerCreating"), ip=None), "VolumesNotMounted",
            "not mounted", 'ConfigMap "conf" (pools.decode.podTemplate.spec.volumes[v].configMap)',
        ),
        (
            seen(
                containers_ready=True, accepting=True, gate_since=200.0, unready_since=300.0,
                node="n3",
            ),
            "NodeNotReady", "node n3 is not ready", "repair or remove node n3",
        ),
    ],
    ids=["secret", "key", "claim", "image", "volume", "node"],
)  # fmt: skip
def test_a_pod_that_does_not_serve_says_cause_and_fix(
    pod: PodState, reason: str, cause: str, fix: str
):
    problem = pod_problem(pod, None, fields=FIELDS)
    assert problem is not None
    assert problem.reason == reason
    assert cause in problem.cause
    assert fix in problem.fix
    assert split(problem.message) == (f"pod demo-decode-0: {problem.cause}", problem.fix)


def test_a_pod_whose_gate_was_just_opened_has_not_lost_its_node():
    pod = seen(containers_ready=True, accepting=True, gate_since=300.0, unready_since=200.0)
    assert pod_problem(pod, None) is None


def test_a_worker_on_the_cpu_in_a_pod_that_holds_gpus_is_a_mismatch_though_it_is_ready():
    pod = dataclasses.replace(POD, ready=True, containers_ready=True, accepting=True)
    sample = sample_of(pod, device="cpu")
    problem = pod_problem(pod, sample, accelerators=1)
    assert problem is not None
    assert (problem.reason, problem.delay) == ("DeviceMismatch", None)
    assert "CUDA image" in problem.fix
    assert pod_problem(pod, sample) is None
    assert pod_problem(pod, sample_of(pod, device="cuda"), accelerators=1) is None
    assert pod_problem(pod, sample_of(pod), accelerators=1) is None


def test_a_gateway_that_may_not_list_pods_is_denied_access():
    pod = dataclasses.replace(POD, role=Role.GATEWAY)
    sample = sample_of(pod, message="the API server denies the list of pods: 403 Forbidden")
    problem = pod_problem(pod, sample)
    assert problem is not None
    assert problem.reason == "AccessDenied"
    assert "Role and RoleBinding" in problem.fix


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("", ""),
        ('{"level": "info", "message": "listening"}', ""),
        ("2026-01-01 INFO started\nvlm-worker: no such flag\n", "vlm-worker: no such flag"),
        (
            '{"level": "error", "message": "no weights", "error": "at /models"}\n'
            '{"level": "info", "message": "bye"}',
            "no weights: at /models",
        ),
    ],
)
def test_a_crash_is_told_by_its_last_error_line_and_never_by_an_info_line(output: str, line: str):
    assert error_line(output) == line


def test_three_restarts_long_ago_are_no_crash_loop():
    ended = ContainerState(restarts=3, started=True, exit_code=1, lived_seconds=86_400.0)
    assert pod_problem(seen(ended), None) is None
    loop = dataclasses.replace(ended, lived_seconds=3.0)
    problem = pod_problem(seen(loop), None)
    assert problem is not None
    assert problem.reason == "CrashLoop"


@given(st.text(), st.text().filter(lambda fix: "; " not in fix))
def test_a_message_falls_apart_into_its_cause_and_its_fix(cause: str, fix: str):
    found = split(sentence(cause, fix))
    assert found == (cause, fix) or not fix or cause.endswith(";") or fix.startswith(" ")
