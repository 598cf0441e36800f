"""Steps and drains, as laws over any state of a pool."""

import dataclasses

from hypothesis import assume, given
from hypothesis import strategies as st
from operator_support import body, empty, service

from vlm_operator.api import RolloutStrategy, Variant
from vlm_operator.names import Role
from vlm_operator.reconcile import Options
from vlm_operator.reconcile.decisions import intend
from vlm_operator.rollout import next_step, settle, spread
from vlm_operator.state import DeploymentState, PodState
from vlm_operator.testing import sample_of

NOW = 1_800_000_000.0
REVISIONS = intend(service(body()), empty(), {}, options=Options()).revisions
ROLES = (Role.ENCODER, Role.PREFILL, Role.DECODE)


def deployment(role: Role, revision: str, compat: str = "", **more: int) -> DeploymentState:
    counts = {"desired": 1, "replicas": 1, "ready": 1, **more}
    return DeploymentState(
        name=f"demo-{role}-default-{revision}",
        role=role,
        variant="default",
        revision=revision,
        compat=compat or REVISIONS[Role.GATEWAY, ""].resolved.compat,
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


def step(live: list[DeploymentState], strategy=RolloutStrategy.ROLLING_BY_REVISION, count=2):
    target = {(role, "default"): count for role in ROLES}
    return next_step(target=target, revisions=REVISIONS, deployments=live, strategy=strategy)


counts = st.integers(0, 4)


@st.composite
def states(draw: st.DrawFn) -> list[DeploymentState]:
    """Any mixture of old and new Deployments."""
    found = []
    for role in ROLES:
        for revision in ("old", REVISIONS[role, "default"].id):
            if draw(st.booleans()):
                desired, ready = draw(counts), draw(counts)
                compat = draw(st.sampled_from(["", "other"])) if revision == "old" else ""
                found.append(
                    deployment(
                        role,
                        revision,
                        compat,
                        desired=desired,
                        replicas=desired,
                        ready=min(ready, desired),
                    )
                )
    return found


@given(states())
def test_new_revisions_are_always_asked_for_in_full(live: list[DeploymentState]):
    found = step(live)
    for role in ROLES:
        assert found.replicas[role, "default", REVISIONS[role, "default"].id] == 2


@given(states())
def test_no_old_pod_goes_while_its_role_is_behind(live: list[DeploymentState]):
    found = step(live)
    for old in [item for item in live if item.revision == "old"]:
        new = [i for i in live if i.role is old.role and i.revision != "old"]
        if sum(item.ready for item in new) < 2:
            assert found.replicas[old.role, "default", "old"] == old.desired


@given(states())
def test_where_compat_changes_all_roles_go_together(live: list[DeploymentState]):
    assume(any(item.compat == "other" for item in live))
    found = step(live)
    kept = [key for key in found.replicas if key[2] == "old"]
    old = [item for item in live if item.revision == "old"]
    assert len(kept) in (0, len(old))


@given(states())
def test_a_rollout_is_done_exactly_when_nothing_old_is_left(live: list[DeploymentState]):
    assert step(live).done == all(item.revision != "old" for item in live)


def test_recreate_starts_new_pods_only_when_the_old_are_gone():
    live = [deployment(role, "old", desired=2, replicas=2) for role in ROLES]
    found = step(live, RolloutStrategy.RECREATE)
    assert set(found.replicas.values()) == {0}
    gone = [deployment(role, "old", desired=0, replicas=0, ready=0) for role in ROLES]
    new = step(gone, RolloutStrategy.RECREATE).replicas
    assert {count for key, count in new.items() if key[2] != "old"} == {2}


@given(st.integers(0, 12), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_spreading_keeps_to_each_variants_maximum_and_loses_nothing_there_is_room_for(
    count: int, rooms: list[int]
):
    choices = [
        Variant(name=f"v{index}", placement={}, max_replicas=room, preference=index)
        for index, room in enumerate(rooms)
    ]
    found = spread(count, choices)
    assert all(found[item.name] <= (item.max_replicas or 0) for item in choices)
    assert sum(found.values()) == min(count, sum(rooms))


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


def settled(pods: list[PodState], *, want: int, inflight: int = 0, at_once: int = 1, silent=()):
    samples = {p.uid: sample_of(p, inflight=inflight) for p in pods if p.uid not in silent}
    live = deployment(Role.DECODE, "new", desired=len([p for p in pods if not p.deleting]))
    return settle(
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


@given(pools(), st.integers(1, 8), st.integers(1, 3))
def test_no_more_pods_drain_at_once_than_allowed(pods: list[PodState], want: int, at_once: int):
    found, _ = settled(pods, want=want, inflight=1, at_once=at_once)
    closing = [gate for gate in found.gates if gate.accepting is False]
    assert len(closing) <= at_once


@given(pools())
def test_without_a_scale_in_every_running_pod_is_open(pods: list[PodState]):
    found, _ = settled(pods, want=len(pods) + 1)
    told = {gate.uid: gate.accepting for gate in found.gates}
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
    assert [(gate.pod, gate.accepting, gate.cost) for gate in found.gates] == [
        ("pod-1", None, -1000)
    ]


def test_the_least_busy_pod_is_the_victim():
    pods = [pod(0), pod(1), pod(2)]
    samples = {
        item.uid: sample_of(item, inflight=load) for item, load in zip(pods, (5, 1, 3), strict=True)
    }
    live = deployment(Role.DECODE, "new", desired=3)
    found = settle(live, pods, samples, want=2, timeout=600, at_once=1, now=NOW)
    assert found.draining == ("pod-1",)
