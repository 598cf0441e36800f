"""A namespace that is being deleted takes nothing new: the operator asks once, and no more."""

import pytest

from support.fakes import run_controllers
from support.world import World, kstatus, rps
from vlm_operator.cluster import CHILD_KINDS, VLM_SERVICE
from vlm_operator.errors import NamespaceEndsError
from vlm_operator.kube import watch_event


def test_nothing_is_applied_again_in_a_namespace_that_ends():
    world = World()
    world.converge()
    world.cluster.ending.add("ns")
    for kind in CHILD_KINDS:
        for item in world.cluster.all(kind):
            world.cluster.remove(kind, "ns", item["metadata"]["name"])
    for _ in range(10):
        world.turn()
    # the first missing Deployment is asked about before anything else is written
    assert len(world.cluster.refused) == 1
    ready = world.condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NamespaceTerminating")
    assert rps(world) == "F/T/F", "nobody has to act"
    assert kstatus(world.cluster.all(VLM_SERVICE)[0]) == "InProgress"


def test_a_new_service_in_it_is_told_so_at_once():
    world = World()
    world.cluster.ending.add("ns")
    world.turn()
    world.turn()
    assert len(world.cluster.refused) == 1
    assert world.condition("Ready")["reason"] == "NamespaceTerminating"


def test_a_deleted_service_still_ends_there():
    world = World()
    world.converge()
    world.cluster.ending.add("ns")
    world.cluster.remove(VLM_SERVICE, "ns", "demo")
    world.turn()
    run_controllers(world.cluster)
    world.turn()
    assert world.cluster.all(VLM_SERVICE) == []
    assert {kind for kind, _ in world.cluster.refused} <= {"Event"}


def test_the_api_servers_own_words_are_understood():
    text = "unable to create new content in namespace ns because it is being terminated"
    said = {"code": 403, "reason": "Forbidden", "message": f"services x is forbidden: {text}"}
    with pytest.raises(NamespaceEndsError):
        watch_event({"type": "ERROR", "object": said})
