"""The manifest changes while a change is carried out: deleted, made again, flipped; or cut off."""

from __future__ import annotations

import contextlib

import pytest

from support.fakes import Died, DyingCluster, run_controllers
from support.world import World, body, pool
from vlm_operator import names
from vlm_operator.cluster import CHILD_KINDS, POD, VLM_SERVICE, Manifest

OTHER = {"model": {"uri": "pvc://shapes", "dtype": "Float32"}}


def revisions(world: World) -> set[str]:
    return {
        item["metadata"]["labels"][names.LABEL_REVISION]
        for item in world.cluster.all(POD)
        if item["metadata"]["labels"][names.LABEL_ROLE] != "gateway"
    }


@pytest.mark.parametrize("at", [0, 4, 9])
def test_a_service_made_again_in_the_middle_of_a_rollout_keeps_nothing_of_the_old(at: int):
    reference = World(body(decode=pool(2)))
    reference.converge()
    world = World(body(decode=pool(2)))
    world.converge()
    world.apply(body(OTHER, decode=pool(2)))
    world.loop = world.new_loop(DyingCluster(world.cluster, at=at))
    with contextlib.suppress(Died):
        world.converge(turns=20)
        raise AssertionError(f"write {at} never came")
    old = {
        item["metadata"]["uid"]
        for kind in (*CHILD_KINDS, POD, VLM_SERVICE)
        for item in world.cluster.all(kind)
    }
    # deleted without its drain, as `kubectl vlm release-finalizers` lets it be
    world.cluster.edit(VLM_SERVICE, "ns", "demo", lambda i: i["metadata"].update(finalizers=[]))
    world.cluster.remove(VLM_SERVICE, "ns", "demo")
    world.apply(body(decode=pool(2)))
    run_controllers(world.cluster)
    world.loop = world.new_loop()
    world.converge(turns=20)
    assert world.snapshot() == reference.snapshot()
    left = {
        item["metadata"]["uid"]
        for kind in (*CHILD_KINDS, POD, VLM_SERVICE)
        for item in world.cluster.all(kind)
    }
    assert not left & old


def test_a_manifest_that_flips_has_one_rollout_at_a_time_and_the_last_one_wins():
    world = World(body(decode=pool(2)))
    world.converge()
    before = world.written()
    for flip in range(20):
        world.apply(body(OTHER if flip % 2 == 0 else {}, decode=pool(2)))
        world.turn(seconds=0.1)
        run_controllers(world.cluster)
        assert len(revisions(world)) <= 2
    assert world.written() - before < 20 * 20
    world.apply(body(OTHER, decode=pool(2)))
    world.converge(turns=30)
    reference = World(body(OTHER, decode=pool(2)))
    reference.converge()
    assert len(revisions(world)) == 1
    pods = ("Deployment", "PodDisruptionBudget", "ConfigMap")
    assert _named(world, pods) == _named(reference, pods)


def _named(world: World, kinds: tuple[str, ...]) -> dict[tuple[str, str], Manifest]:
    """What runs, by kind; which of two gateways is the plain one depends on who came first."""
    return {
        key: item
        for key, item in world.snapshot().items()
        if key[0] in kinds and "gateway" not in key[1]
    }
