"""A pod's status is a function of its containers, its gates and the time."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlm_local.agent.status import (
    ContainerView,
    PodView,
    Running,
    Terminated,
    Waiting,
    gates,
    pod_phase,
    pod_status,
)

NEVER_RAN = Waiting("ContainerCreating")
UP = Running(10.0)
WELL = Terminated(0, 10.0, 20.0)
ILL = Terminated(1, 10.0, 20.0)
BACKING_OFF = Waiting("CrashLoopBackOff")
STATES = st.sampled_from([NEVER_RAN, UP, WELL, ILL])
POLICIES = st.sampled_from(["Always", "OnFailure", "Never"])


def view(*states: Any, **more: Any) -> PodView:
    containers = [
        ContainerView(f"c{number}", "image", state=state, ready=state is UP)
        for number, state in enumerate(states)
    ]
    return PodView(containers, pod_ip="127.1.1.1", host_ip="127.1.0.1", **more)


def pod(*gate_types: str, conditions: Any = ()) -> dict[str, Any]:
    spec = {"readinessGates": [{"conditionType": kind} for kind in gate_types]}
    return {"metadata": {}, "spec": spec, "status": {"conditions": list(conditions)}}


@pytest.mark.parametrize(
    ("states", "policy", "phase"),
    [
        pytest.param([NEVER_RAN], "Always", "Pending", id="nothing has started"),
        pytest.param([UP, NEVER_RAN], "Always", "Pending", id="one of two has started"),
        pytest.param([UP, UP], "Always", "Running", id="all run"),
        pytest.param([UP, ILL], "Never", "Running", id="one still runs"),
        pytest.param([WELL, WELL], "Never", "Succeeded", id="all ended well"),
        pytest.param([WELL, ILL], "Never", "Failed", id="one ended ill"),
        pytest.param([WELL], "OnFailure", "Succeeded", id="a job is done"),
        pytest.param([ILL], "OnFailure", "Running", id="a job tries again"),
        pytest.param([WELL], "Always", "Running", id="a server that ends starts again"),
    ],
)
def test_the_phase_is_that_of_a_kubelet(states: list[Any], policy: str, phase: str):
    assert pod_phase(view(*states), restart_policy=policy) == phase


def test_a_container_that_backs_off_does_not_make_a_pod_pending():
    crashing = ContainerView("c", "image", state=BACKING_OFF, last=ILL, num_restarts=1)
    assert pod_phase(PodView([crashing]), restart_policy="Always") == "Running"


@given(states=st.lists(STATES, min_size=1, max_size=4), policy=POLICIES)
def test_a_deleted_pod_whose_containers_ended_is_never_left_running(states: Any, policy: str):
    seen = view(*states, terminating=True)
    phase = pod_phase(seen, restart_policy=policy)
    if UP in states:
        assert phase in ("Running", "Pending")
    else:
        assert phase == ("Succeeded" if set(states) == {WELL} else "Failed")


@given(
    states=st.lists(STATES, min_size=1, max_size=4),
    gate=st.sampled_from([None, "True", "False"]),
    wanted=st.booleans(),
)
def test_ready_is_all_containers_ready_and_all_gates_true(states: Any, gate: Any, wanted: bool):
    conditions = [] if gate is None else [{"type": "gate", "status": gate}]
    body = pod(*(["gate"] if wanted else []), conditions=conditions)
    written = pod_status(body, view(*states), [], now=0.0)
    found = {one["type"]: one["status"] for one in written["conditions"]}
    containers = all(state is UP for state in states)
    assert found["ContainersReady"] == str(containers)
    assert found["Ready"] == str(containers and (not wanted or gate == "True"))


@given(
    states=st.lists(STATES, min_size=1, max_size=3), now=st.floats(0, 1e9), later=st.floats(0, 1e6)
)
def test_transition_times_move_only_when_a_status_does(states: Any, now: float, later: float):
    first = pod_status(pod(), view(*states), [], now=now)
    again = pod_status(pod(), view(*states), first["conditions"], now=now + later)
    assert again == first
    changed = [UP] * len(states) if any(state is not UP for state in states) else [ILL]
    other = pod_status(pod(), view(*changed), first["conditions"], now=2e9)
    before = {one["type"]: one for one in first["conditions"]}
    for condition in other["conditions"]:
        old = before[condition["type"]]
        moved = condition["lastTransitionTime"] != old["lastTransitionTime"]
        assert moved == (condition["status"] != old["status"])


def test_it_never_writes_a_condition_of_another_writer():
    gate = {"type": "triptych.dev/accepting", "status": "True"}
    written = pod_status(pod("triptych.dev/accepting", conditions=[gate]), view(UP), [], now=0.0)
    assert "triptych.dev/accepting" not in {one["type"] for one in written["conditions"]}


def test_a_closed_gate_is_explained():
    assert gates(pod("a", conditions=[{"type": "a", "status": "False"}])) == [
        'the status of pod readiness gate "a" is not "True", but False'
    ]


def test_init_containers_hold_a_pod_pending_and_fail_it():
    init = ContainerView("init", "image", state=UP)
    waiting = dataclasses.replace(view(NEVER_RAN), init_containers=[init])
    assert pod_phase(waiting, restart_policy="Always") == "Pending"
    failed = dataclasses.replace(waiting, init_containers=[dataclasses.replace(init, state=ILL)])
    assert pod_phase(failed, restart_policy="Never") == "Failed"


def test_a_container_that_waits_for_init_containers_has_the_kubelets_reason():
    init = ContainerView("init", "image", state=UP)
    waiting = dataclasses.replace(view(NEVER_RAN), init_containers=[init])
    (entry,) = pod_status(pod(), waiting, [], now=0.0)["containerStatuses"]
    assert entry["state"] == {"waiting": {"reason": "PodInitializing"}}
    (alone,) = pod_status(pod(), view(NEVER_RAN), [], now=0.0)["containerStatuses"]
    assert alone["state"] == {"waiting": {"reason": "ContainerCreating"}}


def test_a_sidecar_initializes_a_pod_when_it_has_started_and_counts_for_readiness():
    sidecar = ContainerView("sidecar", "image", state=UP, sidecar=True)
    both = dataclasses.replace(view(UP), init_containers=[sidecar])
    assert pod_phase(both, restart_policy="Always") == "Pending"
    up = dataclasses.replace(sidecar, started=True)
    started = dataclasses.replace(both, init_containers=[up])
    assert pod_phase(started, restart_policy="Always") == "Running"
    verdicts = {one["type"]: one["status"] for one in conditions_of(started)}
    assert (verdicts["Initialized"], verdicts["ContainersReady"]) == ("True", "False")
    ready = dataclasses.replace(started, init_containers=[dataclasses.replace(up, ready=True)])
    verdicts = {one["type"]: one["status"] for one in conditions_of(ready)}
    assert verdicts["ContainersReady"] == "True"


def conditions_of(state: PodView) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pod_status(pod(), state, [], now=0.0)["conditions"]
    return found


def test_a_sidecar_that_fails_is_no_failed_init_container():
    failed = ContainerView("sidecar", "image", state=ILL, sidecar=True, num_restarts=1)
    both = dataclasses.replace(view(UP), init_containers=[failed])
    assert pod_phase(both, restart_policy="Never") == "Running"
