"""How often a status is written: once for each change of meaning, and once in 30 s beside."""

from __future__ import annotations

import dataclasses
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from support.fakes import run_controllers
from support.world import World, body, pool
from vlm_operator import names
from vlm_operator.cluster import POD, VLM_SERVICE
from vlm_operator.names import Role
from vlm_operator.status.build import MEASURED_SECONDS, WritePacing, meaning


def status_writes(world: World) -> int:
    return sum(
        (verb, kind, manager) == ("apply", VLM_SERVICE.kind, names.MANAGER_STATUS)
        for verb, kind, _, manager in world.cluster.writes
    )


def busy_world(seed: int) -> World:
    """A service whose pods report another load each time they are asked."""
    world = World(body(decode=pool(2)))
    plain, rng = world.scraper.scrape, random.Random(seed)

    async def scrape(pods):
        found = {}
        for uid, item in (await plain(pods)).items():
            kv = item.kv and dataclasses.replace(item.kv, running=rng.randrange(1000))
            if item.role is Role.GATEWAY:
                kv = None
            found[uid] = dataclasses.replace(
                item,
                kv=kv,
                inflight=rng.randrange(100),
                queued_requests=rng.randrange(50),
                queued_work_seconds=rng.random() * 30,
                started_work_seconds=world.cluster.clock.now % 1e6,
            )
        return found

    world.scraper.scrape = scrape
    world.converge()
    return world


def test_five_minutes_of_steady_traffic_write_the_status_once_in_30_seconds():
    world = busy_world(seed=1)
    before, seconds = status_writes(world), 300
    for _ in range(seconds // 5):
        world.turn(seconds=5)
    assert 1 <= status_writes(world) - before <= seconds / MEASURED_SECONDS + 1


def test_a_changed_meaning_is_written_in_the_same_turn():
    world = busy_world(seed=2)
    world.turn(seconds=5)
    name = next(
        item["metadata"]["name"]
        for item in world.cluster.all(POD)
        if "decode" in item["metadata"]["name"]
    )
    world.cluster.remove(POD, "ns", name)
    before = status_writes(world)
    world.turn(seconds=5)
    assert world.condition("DecodeReady")["status"] == "False"
    assert status_writes(world) == before + 1
    run_controllers(world.cluster)
    world.turn(seconds=5)
    run_controllers(world.cluster)
    world.turn(seconds=5)
    assert world.condition("DecodeReady")["status"] == "True"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.5, 20.0), st.sampled_from("ab"), st.integers(0, 3)), max_size=60)
)
def test_writes_are_bounded_by_changes_of_meaning_and_by_time(steps):
    spaced, there, now, writes, changes = WritePacing(), {}, 0.0, 0, 0
    for seconds, reason, load in steps:
        now += seconds
        after = {
            "conditions": [{"type": "Ready", "status": "True", "reason": reason}],
            "pools": {"decode": {"replicas": 1, "load": {"inflight": load}}},
        }
        changes += meaning(there) != meaning(after)
        written = spaced.due(there, after, now=now)
        assert written in (there, after)
        assert meaning(written) == meaning(after), "meaning never waits"
        writes += written != there
        there = written
    assert writes <= changes + now / MEASURED_SECONDS + 1


def test_the_measured_figures_are_there_at_most_30_seconds_late():
    world = busy_world(seed=3)
    for _ in range(7):
        world.turn(seconds=5)
    (service,) = world.cluster.all(VLM_SERVICE)
    assert service["status"]["pools"]["decode"]["load"]["inflight"] > 0
