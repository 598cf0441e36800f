"""Drains, as laws over any state of a pool."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from support.fakes import sample_of
from vlm_operator.names import Role
from vlm_operator.rollout.drain import PodPatch, plan_drain
from vlm_operator.state import DeploymentState, KvTokens, PodState, Sample

NOW = 1_800_000_000.0


def deployment(role: Role, revision: str, **more: int) -> DeploymentState:
    counts = {"desired": 1, "replicas": 1, "ready": 1, **more}
    return DeploymentState(
        name=f"demo-{role}-default-{revision}",
        role=role,
        variant="default",
        revision=revision,
        compat="one",
        inputs="",
        resolved="",
        deleting=False,
        **counts,
    )


def pod(number: int, **changes: object) -> PodState:
    plain = PodState(
        name=f"pod-{number}",
        uid=f"uid-{number}",
        role=Role.DECODE,
        variant="default",
        revision="new",
        node="node-1",
        ip="127.0.0.1",
        created=NOW - 1000 + number,
        scheduled=True,
        containers_ready=True,
        ready=True,
        accepting=True,
        gate_since=NOW - 500,
        deleting=False,
        finished=False,
        restarts=0,
        deletion_cost=0,
        blocked="",
    )
    return dataclasses.replace(plain, **changes)


@st.composite
def pools(draw: st.DrawFn) -> list[PodState]:
    number = draw(st.integers(0, 6))
    return [
        pod(
            index,
            containers_ready=draw(st.booleans()),
            accepting=draw(st.sampled_from([True, False, None])),
            gate_since=NOW - draw(st.integers(0, 700)),
            deleting=draw(st.sampled_from([False, False, False, True])),
        )
        for index in range(number)
    ]


def obeying(item: PodState, gate: PodPatch | None) -> PodState:
    """The pod once it has been told."""
    if gate is None:
        return item
    if gate.accepting is not None:
        item = dataclasses.replace(item, accepting=gate.accepting, gate_since=NOW)
    return item if gate.cost is None else dataclasses.replace(item, deletion_cost=gate.cost)


def settled(pods: list[PodState], *, want: int, inflight: int = 0, at_once: int = 1, silent=()):
    samples = {p.uid: sample_of(p, inflight=inflight) for p in pods if p.uid not in silent}
    live = deployment(Role.DECODE, "new", desired=len([p for p in pods if not p.deleting]))
    return plan_drain(
        live, pods, samples, want=want, timeout=600, at_once=at_once, now=NOW
    ), live  # fmt: skip


@given(pools(), st.integers(0, 8), st.integers(0, 2))
def test_a_deployment_never_shrinks_below_what_is_wanted(
    pods: list[PodState], want: int, inflight: int
):
    found, live = settled(pods, want=want, inflight=inflight, at_once=9)
    assert min(live.desired, want) <= found.replicas <= max(live.desired, want)


@given(pools(), st.integers(0, 8))
def test_a_pod_with_requests_in_flight_is_kept_until_its_deadline(pods: list[PodState], want: int):
    found, live = settled(pods, want=want, inflight=1, at_once=9)
    alive = [item for item in pods if not item.deleting]
    may_go = [
        item
        for item in alive
        if not item.containers_ready
        or (item.accepting is False and NOW - (item.gate_since or NOW) >= 600)
    ]
    assert live.desired - found.replicas <= len(may_go)


@given(pools(), st.integers(0, 6), st.integers(1, 9), st.integers(0, 1))
def test_a_pod_that_went_counts_once_however_late_the_controllers_end_it(
    pods: list[PodState], want: int, at_once: int, inflight: int
):
    samples = {item.uid: sample_of(item, inflight=inflight) for item in pods}
    alive = {item.uid for item in pods if not item.deleting}
    live = deployment(Role.DECODE, "new", desired=len(alive))
    may_go = {
        item.uid
        for item in pods
        if not item.containers_ready
        or (item.accepting is False and NOW - (item.gate_since or NOW) >= (600 if inflight else 2))
    }
    gone: set[str] = set()
    for _ in range(4):
        found = plan_drain(live, pods, samples, want=want, timeout=600, at_once=at_once, now=NOW)
        told = {gate.uid: gate for gate in found.pod_patches}
        assert not gone & told.keys(), "what went is told nothing more"
        gone |= {uid for uid, gate in told.items() if gate.cost}
        pods = [obeying(item, told.get(item.uid)) for item in pods]
        live = dataclasses.replace(live, desired=found.replicas)
    assert len(alive) - live.desired <= len(may_go & alive)


@given(pools(), st.integers(1, 8), st.integers(1, 3))
def test_no_more_pods_drain_at_once_than_allowed(pods: list[PodState], want: int, at_once: int):
    found, _ = settled(pods, want=want, inflight=1, at_once=at_once)
    closing = [gate for gate in found.pod_patches if gate.accepting is False]
    assert len(closing) <= at_once


@given(pools())
def test_without_a_scale_in_every_running_pod_is_open(pods: list[PodState]):
    found, _ = settled(pods, want=len(pods) + 1)
    told = {gate.uid: gate.accepting for gate in found.pod_patches}
    for item in pods:
        if item.containers_ready and not item.deleting:
            assert told.get(item.uid, item.accepting) is True
    assert found.draining == ()


def test_a_silent_pod_is_waited_for_until_its_deadline():
    closed = pod(0, accepting=False, ready=False, gate_since=NOW - 100)
    found, _ = settled([closed], want=0, silent={"uid-0"})
    assert (found.replicas, found.draining) == (1, ("pod-0",))
    late = dataclasses.replace(closed, gate_since=NOW - 600)
    assert settled([late], want=0, silent={"uid-0"})[0].replicas == 0


def test_a_pod_that_never_started_goes_first_and_at_once():
    broken = pod(1, containers_ready=False, ready=False, accepting=None)
    found, _ = settled([pod(0), broken], want=1, inflight=1)
    assert found.replicas == 1
    assert [(gate.pod, gate.accepting, gate.cost) for gate in found.pod_patches] == [
        ("pod-1", None, -1000)
    ]


def victims(pods: list[PodState], samples: dict[str, Sample], *, want: int) -> tuple[str, ...]:
    live = deployment(Role.DECODE, "new", desired=len(pods))
    return plan_drain(live, pods, samples, want=want, timeout=600, at_once=9, now=NOW).draining


def test_the_pod_with_the_least_work_left_is_the_victim_and_of_equals_the_oldest():
    pods = [pod(0), pod(1), pod(2), pod(3)]
    held = {"uid-0": 900, "uid-1": 40, "uid-2": 40, "uid-3": 300}
    samples = {
        item.uid: sample_of(item, inflight=1, kv=KvTokens(1000, held[item.uid], 0, 0, 0, 0))
        for item in pods
    }
    assert victims(pods, samples, want=3) == ("pod-1",)
    assert set(victims(pods, samples, want=1)) == {"pod-1", "pod-2", "pod-3"}


def test_seconds_of_queued_work_count_where_there_is_no_kv_cache():
    pods = [pod(0, role=Role.ENCODER), pod(1, role=Role.ENCODER)]
    samples = {
        item.uid: sample_of(item, inflight=1, queued_work_seconds=seconds)
        for item, seconds in zip(pods, (2.5, 0.5), strict=True)
    }
    assert victims(pods, samples, want=1) == ("pod-1",)


def test_a_pod_that_waits_for_a_node_is_cancelled_before_all_others():
    starting = pod(0, containers_ready=False, ready=False, accepting=None)
    waiting = pod(1, containers_ready=False, ready=False, accepting=None, scheduled=False)
    found, _ = settled([starting, waiting, pod(2)], want=2, inflight=0)
    assert [(gate.pod, gate.cost) for gate in found.pod_patches if gate.cost] == [("pod-1", -1000)]
    assert found.replicas == 2
