"""Rollouts as a service's user sees them: turns of the loop, with controllers at work between."""

from __future__ import annotations

from typing import Any

import pytest

from support.fakes import run_controllers
from support.load import FAST, SLO, Loaded, auto
from support.world import World, body, kstatus, pool, rps
from vlm_operator import names
from vlm_operator.autoscale.constants import Constants
from vlm_operator.cluster import DEPLOYMENT, EVENT, POD, VLM_SERVICE, Manifest
from vlm_operator.names import Role
from vlm_operator.state import Resolved
from vlm_operator.state.deployments import ANNOTATION_RESOLVED
from vlm_operator.status.causes import split

DEADLINE = {"progressDeadlineSeconds": 60}
ROLLBACK = {**DEADLINE, "onFailure": "Rollback"}
BROKEN = {"model": {"uri": "pvc://shapes", "dtype": "Float32"}}  # another compat
FIXED = {"model": {"uri": "pvc://shapes", "dtype": "BFloat16"}}


def pools(**more: Any) -> dict[str, Any]:
    return {"encoder": pool(), "decode": pool(2, **more)}


def revision_of(pod: Manifest) -> str:
    return str(pod["metadata"]["labels"][names.LABEL_REVISION])


def workers(world: World) -> list[Manifest]:
    found = world.cluster.all(POD)
    return [pod for pod in found if pod["metadata"]["labels"][names.LABEL_ROLE] != "gateway"]


class Rollout(World):
    """A world whose pods of unknown revisions crash, or find no node."""

    def __init__(self, manifest: Manifest, **options: Any) -> None:
        super().__init__(manifest, **options)
        self.converge()
        self.good = {revision_of(pod) for pod in self.cluster.all(POD)}
        self.crash = self.homeless = False

    def next(self, *, seconds: float = 3.0) -> None:
        """One turn, then the controllers."""
        self.turn(seconds=seconds)
        run_controllers(self.cluster, crash=self._crashes, start=self._fits)

    def until(self, done, *, turns: int = 80, seconds: float = 3.0, check=lambda: None) -> None:
        """Turn until `done`, asking `check` in between."""
        for _ in range(turns):
            self.next(seconds=seconds)
            check()
            if done():
                return
        raise AssertionError(f"never: {self.status['conditions']} {self.states()}")

    def sizes(self) -> dict[str, int]:
        """Replicas by role of what runs, the memory of failures left out."""
        found: dict[str, int] = {}
        for item in self.states():
            found[item.role.value] = found.get(item.role.value, 0) + item.desired
        return found

    def events(self) -> set[str]:
        return {item["reason"] for item in self.cluster.all(EVENT)}

    def _crashes(self, pod: Manifest) -> bool:
        return self.crash and revision_of(pod) not in self.good

    def _fits(self, pod: Manifest) -> bool:
        return not self.homeless or "nodeName" in pod["spec"] or revision_of(pod) in self.good


def gateways(world: World) -> dict[str, int]:
    return {
        item["metadata"]["name"]: item["spec"]["replicas"]
        for item in world.cluster.all(DEPLOYMENT)
        if item["metadata"]["labels"][names.LABEL_ROLE] == "gateway"
    }


def compats(world: World, role: str) -> set[str]:
    """Compat sets of which a role has ready pods."""
    return {
        pod["metadata"]["labels"][names.LABEL_COMPAT]
        for pod in world.cluster.all(POD)
        if pod["metadata"]["labels"][names.LABEL_ROLE] == role
        and any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"]["conditions"])
    }


def test_another_compat_moves_all_roles_in_steps_and_each_set_with_a_gateway_is_complete():
    world = Rollout(body(**pools()))
    world.apply(body(BROKEN, **pools()))
    seen = []

    def check() -> None:
        asked = world.sizes()
        assert asked["decode"] <= 2 + 1
        assert asked["encoder"] <= 1 + 1
        for role in ("encoder", "decode"):
            assert compats(world, "gateway") <= compats(world, role), role
        seen.append(world.condition("RolloutProgressing")["message"])

    world.until(lambda: world.condition("RolloutProgressing")["status"] == "False", check=check)
    assert world.sizes() == {"encoder": 1, "decode": 2}
    assert any(said.startswith("step 2 of 2: ") for said in seen)
    assert len(gateways(world)) == 1
    assert "demo-gateway" not in gateways(world), "it has its compat in its name"
    world.apply(body(FIXED, **pools()))
    world.until(lambda: "demo-gateway" in gateways(world) and len(gateways(world)) == 1)
    assert {item.revision for item in world.states()} & world.good == set()


def annotate(world: World, value: str) -> None:
    """Do what `kubectl annotate --overwrite vlm demo triptych.dev/restarted-at=VALUE` does."""

    def change(item: Manifest) -> None:
        item["metadata"].setdefault("annotations", {})[names.ANNOTATION_RESTARTED_AT] = value

    world.cluster.edit(VLM_SERVICE, "ns", "demo", change)


@pytest.mark.parametrize("refused", [False, True])
def test_the_annotation_restarted_at_replaces_every_pod_once_and_serves_meanwhile(refused: bool):
    world = Rollout(body(**pools()))
    before = {pod["metadata"]["uid"] for pod in world.cluster.all(POD)}
    if refused:
        world.apply(body(decode=pool(2, rollout={"maxSurge": -1})))
        world.next()
    annotate(world, "2026-11-23T12:00:00Z")

    def check() -> None:
        assert world.condition("Ready")["status"] == "True"

    world.until(
        lambda: not before & {pod["metadata"]["uid"] for pod in world.cluster.all(POD)},
        check=check,
    )
    for _ in range(20):
        world.next()
    replaced = {pod["metadata"]["uid"] for pod in world.cluster.all(POD)}
    assert len(replaced) == len(before), "all of them, and none beside"
    # the operator starts anew, the manifest is refused, and nothing restarts again
    world.loop = world.new_loop()
    world.apply(body(decode=pool(2, rollout={"maxSurge": -1})))
    for _ in range(10):
        world.next()
    assert {pod["metadata"]["uid"] for pod in world.cluster.all(POD)} == replaced


def test_pods_count_once_they_have_been_ready_for_a_while():
    patient = {"rollout": {"minReadySeconds": 30, "maxUnavailable": 0}}
    world = Rollout(body(decode=pool(1, **patient)))
    world.apply(body(decode=pool(1, engine={"extraArgs": ["--max-requests=8"]}, **patient)))
    began = world.cluster.clock.now
    world.until(lambda: {item.revision for item in world.states()}.isdisjoint(world.good))
    assert world.cluster.clock.now - began >= 30


def test_a_percentage_of_surge_brings_that_many_pods_at_once():
    world = Rollout(body(decode=pool(4, rollout={"maxSurge": "50%"})))
    changed = pool(4, rollout={"maxSurge": "50%"}, engine={"extraArgs": ["--max-requests=8"]})
    world.apply(body(decode=changed))
    world.next()
    assert sorted(item.desired for item in world.states()) == [2, 4]


@pytest.mark.parametrize("change", ["compat", "role"])
def test_a_revision_that_crashes_is_rolled_back_once_and_not_tried_again(change: str):
    world = Rollout(body({"rollout": ROLLBACK}, **pools()))
    world.crash = True
    bad = {"engine": {"extraArgs": ["--max-requests=0"]}} if change == "role" else {}
    spec = {"rollout": ROLLBACK, **(BROKEN if change == "compat" else {})}
    world.apply(body(spec, **pools(**bad)))
    world.until(lambda: _rolled_back(world), seconds=20)
    assert world.sizes() == {"encoder": 1, "decode": 2}
    assert {revision_of(pod) for pod in world.cluster.all(POD)} <= world.good
    assert world.condition("Ready")["status"] == "True"
    stalled = world.condition("Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "RolloutFailed")
    assert "CrashLoopBackOff: Error, exit code 1: no such weights" in stalled["message"]
    assert "pod demo-" in stalled["message"]
    assert (rps(world), kstatus(world.cluster.all(VLM_SERVICE)[0])) == ("T/F/T", "Failed")
    assert "RolledBack" in world.events()
    pods = {pod["metadata"]["uid"] for pod in world.cluster.all(POD)}
    for _ in range(3):
        world.next(seconds=100)
        assert {pod["metadata"]["uid"] for pod in world.cluster.all(POD)} == pods
    world.crash = False
    world.apply(body({"rollout": ROLLBACK, **FIXED}, **pools()))
    world.until(lambda: world.condition("RolloutProgressing")["reason"] == "Complete")
    assert world.condition("Stalled")["status"] == "False"
    assert {item.revision for item in world.states()}.isdisjoint(world.good)


def test_a_rollout_that_fails_stays_where_it_is_and_goes_on_when_its_pod_is_ready():
    world = Rollout(body({"rollout": DEADLINE}, **pools()))
    world.crash = True
    world.apply(body({"rollout": DEADLINE, **BROKEN}, **pools()))
    world.until(lambda: world.condition("Stalled")["status"] == "True", seconds=20)
    assert world.condition("Stalled")["reason"] == "CrashLoop"
    world.until(
        lambda: world.condition("RolloutProgressing")["reason"] == "DeadlineExceeded", seconds=20
    )
    assert world.condition("Stalled")["reason"] == "RolloutFailed"
    assert split(world.condition("Stalled")["message"])[1] == "correct what the error names"
    assert world.condition("Ready")["status"] == "True"
    assert "RolloutFailed" in world.events()
    serving = [pod for pod in workers(world) if revision_of(pod) in world.good]
    assert len(serving) == 3, "nothing old is taken"
    world.crash = False
    world.until(lambda: world.condition("RolloutProgressing")["reason"] == "Complete")
    assert world.condition("Stalled")["status"] == "False"


def test_the_old_manifest_again_is_a_way_back_too():
    world = Rollout(body({"rollout": ROLLBACK}, **pools()))
    before = world.snapshot()
    world.crash = True
    world.apply(body({"rollout": ROLLBACK, **BROKEN}, **pools()))
    world.until(lambda: _rolled_back(world), seconds=20)
    world.apply(body({"rollout": ROLLBACK}, **pools()))
    world.until(lambda: world.condition("RolloutProgressing")["reason"] == "Complete")
    assert {key for key in world.snapshot() if key[0] == "Deployment"} == {
        key for key in before if key[0] == "Deployment"
    }


@pytest.mark.parametrize("back", ["manifest", "rollback"])
def test_a_revision_that_crashed_does_not_keep_the_previous_one_from_growing(back: str):
    spec = {"slo": SLO, "autoscaling": FAST, "rollout": ROLLBACK}
    constants = Constants(startup_seconds=5.0, smoothing_seconds=1.0, exhausted_seconds=1e6)
    world = Rollout(body(spec, decode=auto(2)), constants=constants)
    world.scraper = Loaded()
    world.loop = world.new_loop()
    world.next()
    world.crash = True
    world.apply(body(spec, decode=auto(2, engine={"extraArgs": ["--max-requests=0"]})))
    world.until(lambda: "Exhausted" in world.condition("CapacitySufficient")["reason"])
    if back == "manifest":
        world.apply(body(spec, decode=auto(2)))
    else:
        world.until(lambda: _rolled_back(world), seconds=20)
    world.scraper.tokens = 4000
    world.until(lambda: sum(revision_of(pod) in world.good for pod in workers(world)) >= 4)


def _rolled_back(world: World) -> bool:
    found = {item["type"]: item for item in world.status.get("conditions", [])}
    return found.get("RolloutProgressing", {}).get("reason") == "RolledBack"


@pytest.mark.parametrize(
    ("chosen", "size", "goes_on"),
    [(None, 3, True), (None, 1, False), ("DrainFirst", 1, True), ("Wait", 3, False)],
)
def test_without_a_node_for_a_new_pod_an_old_one_is_drained_first(
    chosen: str | None, size: int, goes_on: bool
):
    rollout = {"rollout": {"whenNoSpareCapacity": chosen} if chosen else {}}
    world = Rollout(body(rollout, decode=pool(size)), spare_seconds=10.0)
    world.homeless = True
    world.apply(body(rollout, decode=pool(size, engine={"extraArgs": ["--max-requests=8"]})))
    least = size
    for _ in range(12):
        world.next()
        least = min(least, sum(revision_of(pod) in world.good for pod in workers(world)))
    assert (least < size) is goes_on
    if goes_on:
        assert least == size - 1, "one, and no more until its successor has come"
        # its successor gets the devices that it released
        world.homeless = False
        world.until(lambda: world.condition("RolloutProgressing")["reason"] == "Complete")


def test_a_surge_pod_that_the_budget_has_no_room_for_is_none():
    variant = {
        "name": "gpu",
        "placement": {},
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    budget = {"budget": {"maxAccelerators": 3}}
    decode = pool(3, variants=[variant])
    world = Rollout(body(budget, decode=decode))
    world.apply(body(budget, decode={**decode, "engine": {"extraArgs": ["--max-requests=8"]}}))
    most = 0

    def check() -> None:
        nonlocal most
        most = max(most, len(workers(world)))

    world.until(lambda: world.condition("RolloutProgressing")["reason"] == "Complete", check=check)
    assert most == 3


def test_pods_that_an_older_operator_made_from_another_template_are_left_as_they_are():
    world = Rollout(body(decode=pool(2)))

    def age(item: Manifest) -> None:
        notes = item["metadata"]["annotations"]
        notes[ANNOTATION_RESOLVED] = notes[ANNOTATION_RESOLVED].replace(
            f'"template": {Resolved.template}', '"template": 0'
        )
        item["spec"]["template"]["spec"]["containers"][0]["args"].append("--of-then")

    for item in world.cluster.all(DEPLOYMENT):
        world.cluster.edit(DEPLOYMENT, "ns", item["metadata"]["name"], age)
    run_controllers(world.cluster)
    pods = {pod["metadata"]["uid"] for pod in world.cluster.all(POD)}
    world.loop = world.new_loop()
    for _ in range(3):
        world.next()
    assert {pod["metadata"]["uid"] for pod in world.cluster.all(POD)} == pods
    world.apply(body(decode=pool(3)))
    world.until(lambda: world.sizes() == {"decode": 3})
    args = [pod["spec"]["containers"][0]["args"] for pod in world.cluster.all(POD)]
    assert all("--of-then" in found for found in args), "one more is as the others are"
    world.apply(body(FIXED, decode=pool(3)))
    world.until(lambda: {item.revision for item in world.states()}.isdisjoint(world.good))
    args = [pod["spec"]["containers"][0]["args"] for pod in workers(world)]
    assert not any("--of-then" in found for found in args), "another revision is made anew"


def test_recreate_starts_new_pods_only_when_the_old_are_gone():
    recreate = {"rollout": {"strategy": "Recreate"}}
    world = Rollout(body(recreate, **pools()))
    world.apply(body({**recreate, **BROKEN}, **pools()))

    def check() -> None:
        kinds = {revision_of(pod) in world.good for pod in workers(world)}
        assert kinds != {True, False}
        assert sum(gateways(world).values()) >= 1

    world.until(lambda: world.condition("RolloutProgressing")["reason"] == "Complete", check=check)
    assert world.sizes() == {"encoder": 1, "decode": 2}


def test_a_budget_of_disruption_is_a_fifth_of_the_ready_pods_and_evicts_the_unready():
    def budgets(world: World) -> dict[str, Any]:
        kind = ("PodDisruptionBudget", "demo-decode")
        found = world.snapshot().get(kind)
        return {} if found is None else found["spec"]

    world = Rollout(body(decode=pool(10)))
    assert budgets(world)["maxUnavailable"] == 2
    assert budgets(world)["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    world.apply(body(decode=pool(10, disruption={"maxUnavailable": "40%"})))
    world.next()
    assert budgets(world)["maxUnavailable"] == "40%"
    world.apply(body(decode=pool(10, disruption={"policy": "None"})))
    world.next()
    assert budgets(world) == {}
    world.apply(body(decode=pool(1)))
    world.next()
    assert budgets(world) == {}, "one on a single pod would hold its node for ever"
    assert Role.DECODE.value in world.sizes()
