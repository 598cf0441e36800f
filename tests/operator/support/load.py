"""Pods of a `World` under load, for tests of pools in mode Auto."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from support.fakes import FakeScraper, run_controllers
from support.world import World, body
from vlm_operator.autoscale.constants import Constants
from vlm_operator.cluster import POD, VLM_POOL
from vlm_operator.names import Role
from vlm_operator.observe import pod_states
from vlm_operator.state import PodState, Sample

SLO = {"ttftP95Milliseconds": 1000}
FAST: dict[str, Any] = {"intervalSeconds": 5}
QUICK = Constants(startup_seconds=5.0, smoothing_seconds=1.0, exhausted_seconds=60.0)


class Loaded(FakeScraper):
    """Pods that share the KV tokens that requests hold or wait for, `tokens` in all.

    `held` requests wait at the gateway for an encoder.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0
        self.held = 0

    async def scrape(self, pods: Iterable[PodState]) -> dict[str, Sample]:
        """See `Scraper.scrape`."""
        pods = tuple(pods)
        plain = await super().scrape(pods)
        decodes = [item.uid for item in pods if item.role is Role.DECODE and item.uid in plain]
        return {uid: self._loaded(item, len(decodes)) for uid, item in plain.items()}

    def _loaded(self, sample: Sample, count: int) -> Sample:
        if sample.role is Role.GATEWAY:
            return dataclasses.replace(sample, held_for={Role.ENCODER: self.held})
        if sample.role is not Role.DECODE or sample.kv is None:
            return sample
        share, capacity = self.tokens // max(count, 1), sample.kv.capacity
        each = min(share, capacity)
        kv = dataclasses.replace(sample.kv, running=each, free=capacity - each, queued=share - each)
        return dataclasses.replace(sample, kv=kv)


def auto(minimum: int = 1, maximum: int = 6, *, down: int = 60, **more: Any) -> dict[str, Any]:
    """A pool that the autoscaler sizes."""
    behavior = {"scaleDown": {"stabilizationWindowSeconds": down, "maxPodsPerMinute": 4}}
    scaling = {"mode": "Auto", "minReplicas": minimum, "maxReplicas": maximum}
    targets = {"kvOccupancyPercent": 80}
    return {"scaling": {**scaling, "behavior": behavior, "targets": targets}, **more}


def loaded_world(
    spec: dict[str, Any] | None = None, constants: Constants = QUICK, **pools: Any
) -> World:
    """A converged service whose pods are under a load that tests set."""
    base = {"slo": SLO, "autoscaling": FAST}
    world = World(
        body({**base, **(spec or {})}, **(pools or {"decode": auto()})), constants=constants
    )
    world.scraper = Loaded()
    world.loop = world.new_loop()
    run(world, turns=8, seconds=3.0)
    return world


def run(world: World, *, turns: int, seconds: float = 5.0, start: bool = True) -> None:
    """Take turns, with controllers at work in between."""
    for _ in range(turns):
        world.turn(seconds=seconds)
        run_controllers(world.cluster, start=start)


def replicas(world: World, role: str = "decode") -> int:
    """What the role's VLMPool asks for."""
    return next(
        int(item["spec"]["replicas"])
        for item in world.cluster.all(VLM_POOL)
        if item["metadata"]["name"] == f"demo-{role}"
    )


def said(world: World, role: str = "decode") -> dict[str, Any]:
    """The status of one pool."""
    found: dict[str, Any] = world.status["pools"][role]
    return found


def seen(world: World) -> tuple[PodState, ...]:
    """All pods there are."""
    return pod_states(world.cluster.all(POD))
