"""Whole turns of a service that scales to zero: pods, status, Events, restarts and rollouts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest

from support.fakes import Died, DyingCluster, FakeScraper, run_controllers
from support.load import FAST, QUICK, SLO, auto, replicas, run, said, seen
from support.world import World, body
from vlm_operator import names
from vlm_operator.cluster import CONFIG_MAP, DEPLOYMENT, EVENT, POD, VLM_POOL, VLM_SERVICE
from vlm_operator.metrics import REGISTRY
from vlm_operator.names import Role
from vlm_operator.pods.gateway import CONFIG_KEY
from vlm_operator.state import PodState, Sample

IDLE = 30
ROLES = ("prefill", "decode")


class Fronts(FakeScraper):
    """Gateways that count: idle since `active`, with `waiting` requests."""

    def __init__(self, clock: Any) -> None:
        super().__init__()
        self.clock, self.active, self.waiting = clock, clock.now, 0

    async def scrape(self, pods: Iterable[PodState]) -> dict[str, Sample]:
        found = await super().scrape(pods)
        return {uid: self._told(item) for uid, item in found.items()}

    def _told(self, sample: Sample) -> Sample:
        if sample.role is not Role.GATEWAY:
            return sample
        idle = 0.0 if self.waiting else self.clock.now - self.active
        return dataclasses.replace(
            sample,
            inflight=self.waiting,
            waiting_for_wake=self.waiting,
            idle_seconds=max(0.0, idle),
        )

    def ask(self) -> None:
        self.waiting = 1

    def answer(self) -> None:
        self.waiting, self.active = 0, self.clock.now


def sleeping_world(spec: dict[str, Any] | None = None, **pools: Any) -> World:
    """A converged service that sleeps after `IDLE` seconds."""
    base = {"slo": SLO, "autoscaling": FAST, "scaleToZero": {"idleSeconds": IDLE}}
    pools = pools or {role: auto() for role in ROLES}
    world = World(body({**base, **(spec or {})}, **pools), constants=QUICK)
    world.scraper = Fronts(world.cluster.clock)
    world.loop = world.new_loop()
    run(world, turns=8, seconds=3.0)
    return world


def asleep(world: World) -> World:
    run(world, turns=20)
    assert {role: replicas(world, role) for role in ROLES} == dict.fromkeys(ROLES, 0)
    return world


def ready(world: World) -> tuple[str, str]:
    found = world.condition("Ready")
    return found["status"], found["reason"]


def posted(world: World) -> list[str]:
    return [item["reason"] for item in world.cluster.all(EVENT)]


def edit(world: World, **changes: Any) -> None:
    spec = world.cluster.all(VLM_SERVICE)[0]["spec"]
    kept = {key: value for key, value in {**spec, **changes}.items() if value is not None}
    world.apply(body(kept))


def test_it_sleeps_wakes_and_sleeps_again_and_says_so():
    world = asleep(sleeping_world())
    assert {name: count for name, count in world.deployments().items() if count} == {
        "demo-gateway": 1
    }
    assert [pod.role for pod in seen(world)] == [Role.GATEWAY]
    assert ready(world) == ("True", "ScaledToZero")
    assert (
        "a request at http://demo-gateway.ns.svc.cluster.local/v1 starts them"
        in world.condition("Ready")["message"]
    )
    assert [world.condition(kind)["status"] for kind in ("Reconciling", "Stalled")] == ["False"] * 2
    assert said(world)["lastDecision"]["reason"] == "ScaledToZero"
    assert world.status["summary"]["decode"] == "0/0"
    assert "NotReady" not in posted(world)
    world.scraper.ask()
    world.turn(seconds=1.0)
    assert {role: replicas(world, role) for role in ROLES} == dict.fromkeys(ROLES, 1)
    assert ready(world) == ("False", "Waking")
    assert "the service starts from zero: prefill 0/1" in world.condition("Ready")["message"]
    assert said(world)["lastDecision"]["reason"] == "WokenByRequest"
    run(world, turns=3, seconds=1.0)
    assert ready(world) == ("True", "Serving")
    world.scraper.answer()
    assert {"Waking", "Ready", "ScaledUp", "ScaledDown"} <= set(posted(world))
    assert "NotReady" not in posted(world)
    asleep(world)


def test_a_wake_up_is_measured_until_a_user_must_act():
    def waking(world: World) -> float | None:
        labels = {"namespace": "ns", "service": "demo"}
        return REGISTRY.get_sample_value("triptych_waking", labels)

    world = asleep(sleeping_world())
    assert waking(world) == 0
    world.scraper.ask()
    world.turn()
    assert waking(world) == 1
    for _ in range(20):  # no pod becomes ready
        run(world, turns=1, seconds=60.0, start=False)
    assert world.condition("Stalled")["status"] == "True"
    assert waking(world) == 0
    edit(world, scaleToZero=None)
    world.turn()
    assert waking(world) is None


def test_a_pod_that_cannot_start_is_the_cause_and_not_waking():
    world = asleep(sleeping_world())
    world.scraper.ask()
    world.turn()
    assert ready(world) == ("False", "Waking")
    for _ in range(3):
        run_controllers(world.cluster, crash=lambda pod: "decode" in pod["metadata"]["name"])
        world.turn()
    assert ready(world) == ("False", "CrashLoop")
    assert world.condition("Stalled")["status"] == "True"


def test_an_operator_of_a_sleeping_service_looks_every_second_and_writes_nothing():
    world = asleep(sleeping_world())
    run(world, turns=3)
    before = world.written()
    for _ in range(200):
        assert world.turn(seconds=1.0) <= 1.0
    assert world.cluster.writes[before:] == []


def test_the_gateway_is_told_that_it_may_hold_requests():
    world = sleeping_world({"scaleToZero": {"idleSeconds": IDLE, "wakeTimeoutSeconds": 90}})

    def told() -> str:
        maps = world.cluster.all(CONFIG_MAP)
        return next(m["data"][CONFIG_KEY] for m in maps if CONFIG_KEY in m["data"])

    assert '"wake_timeout_seconds": 90' in told()
    edit(world, scaleToZero=None)
    world.converge()
    assert '"wake_timeout_seconds": null' in told()


def test_without_the_field_an_idle_service_stays():
    world = sleeping_world({"scaleToZero": None})
    run(world, turns=60)
    assert {role: replicas(world, role) for role in ROLES} == dict.fromkeys(ROLES, 1)


def test_removing_the_field_of_a_sleeping_service_starts_it():
    world = asleep(sleeping_world())
    edit(world, scaleToZero=None)
    world.converge()
    assert ready(world) == ("True", "Serving")


def test_stopping_a_sleeping_service_and_starting_it_again():
    world = asleep(sleeping_world())
    edit(world, stopped=True)
    world.scraper.ask()  # a request of a gateway that ends
    run(world, turns=5)
    assert ready(world) == ("True", "Stopped")
    assert not world.cluster.all(POD)
    edit(world, stopped=False)
    world.scraper.answer()
    run(world, turns=8, seconds=3.0)
    assert ready(world) == ("True", "Serving")
    asleep(world)


def test_a_request_in_a_worker_is_finished_before_its_pod_ends():
    world = sleeping_world()
    busy = [pod.name for pod in seen(world) if pod.role is Role.DECODE]
    world.scraper.busy = dict.fromkeys(busy, 1)
    run(world, turns=30)
    assert replicas(world) == 1, "a worker with a request keeps the service awake"
    world.scraper.busy = {}
    asleep(world)


def test_silent_gateways_keep_it_awake():
    world = sleeping_world()
    world.scraper.silent = {pod.name for pod in seen(world) if pod.role is Role.GATEWAY}
    run(world, turns=60)
    assert replicas(world) == 1


def test_a_new_operator_wakes_what_an_earlier_one_put_to_sleep():
    world = asleep(sleeping_world())
    since = world.condition("Ready")["message"]
    world.loop = world.new_loop()
    run(world, turns=20)
    assert world.condition("Ready")["message"] == since
    world.scraper.ask()
    world.loop = world.new_loop()
    world.turn()
    assert said(world)["lastDecision"]["reason"] == "WokenByRequest"


def test_a_new_operator_counts_the_idle_time_anew():
    world = sleeping_world()
    for _ in range(10):
        world.loop = world.new_loop()
        run(world, turns=4)  # 20 s, less than IDLE
    assert replicas(world) == 1
    asleep(world)


@pytest.mark.parametrize("wakes", [False, True])
def test_a_death_at_every_fifth_write_leaves_no_half_of_a_service(wakes):
    at = 0
    while True:
        world = asleep(sleeping_world()) if wakes else sleeping_world()
        if wakes:
            world.scraper.ask()
        world.loop = world.new_loop(DyingCluster(world.cluster, at=at, committed=at % 2 == 0))
        with contextlib.suppress(Died):
            run(world, turns=20)
            break
        run_controllers(world.cluster)
        world.loop = world.new_loop()
        if wakes:
            run(world, turns=8)
            assert ready(world) == ("True", "Serving"), f"died at write {at}"
        else:
            asleep(world)
            assert ready(world) == ("True", "ScaledToZero"), f"died at write {at}"
        at += 5
    assert at > 4


def test_a_change_of_the_pods_is_rolled_out_while_it_sleeps():
    world = asleep(sleeping_world())
    old = {item["metadata"]["name"] for item in world.cluster.all(DEPLOYMENT)}
    edit(world, image="registry/worker:2")
    run(world, turns=12)
    assert ready(world) == ("True", "ScaledToZero")
    assert world.condition("Reconciling")["status"] == "False"
    assert world.condition("RolloutProgressing")["status"] == "False"
    names_now = {item["metadata"]["name"] for item in world.cluster.all(DEPLOYMENT)}
    assert names_now != old
    world.scraper.ask()
    run(world, turns=6)
    assert ready(world) == ("True", "Serving")
    images = {
        item["spec"]["template"]["spec"]["containers"][0]["image"]
        for item in world.cluster.all(DEPLOYMENT)
        if item["spec"]["replicas"] and item["metadata"]["labels"][names.LABEL_ROLE] != "gateway"
    }
    assert images == {"registry/worker:2"}


def test_a_paused_service_is_not_woken():
    world = asleep(sleeping_world())
    edit(world, paused=True)
    world.scraper.ask()
    run(world, turns=5)
    assert replicas(world) == 0
    edit(world, paused=None)
    run(world, turns=6)
    assert ready(world) == ("True", "Serving")


def test_kubectl_scale_wakes_the_whole_service():
    world = asleep(sleeping_world())
    world.scale("decode", 1)
    run(world, turns=6)
    assert ready(world) == ("True", "Serving")
    assert replicas(world, "prefill") == 1


def test_a_deleted_pool_of_a_sleeping_service_is_created_at_zero():
    world = asleep(sleeping_world())
    world.cluster.remove(VLM_POOL, "ns", "demo-decode")
    run(world, turns=3)
    assert replicas(world) == 0
    assert ready(world) == ("True", "ScaledToZero")


def test_the_least_of_a_wake_up_must_fit_the_budget():
    zero = auto(0, 2)
    zero["scaling"]["scaleToZero"] = {"idleSeconds": 20, "whileAtZero": "Queue"}
    device = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    place = [{"name": "a", "placement": {}, **device}]
    pools = {"encoder": {**zero, "variants": place}, "decode": {**auto(), "variants": place}}
    spec = {"slo": SLO, "autoscaling": FAST, "scaleToZero": {}, "budget": {"maxAccelerators": 1}}
    world = World(body(spec, **pools))
    run(world, turns=2)
    assert world.condition("Accepted")["status"] == "False"
    assert (
        "less than the 2 that the pools' least replicas hold"
        in world.condition("Accepted")["message"]
    )
