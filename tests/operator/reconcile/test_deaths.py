"""A process killed before or after any write, in any operation, leaves what the next one finishes.

One run keeps every state in which a kill could leave the cluster; from each of them a new process
goes on, and must end where the run without a death ended.
"""

from __future__ import annotations

import asyncio
import copy
import random
from collections import Counter
from typing import Any

import pytest

from support.fakes import Deaths, FakeCluster, run_controllers
from support.operations import OPERATIONS, Operation
from support.world import World
from vlm_operator import names
from vlm_operator.cluster import CHILD_KINDS, POD, REPLICA_SET, VLM_SERVICE, Cluster, Manifest

CHILDREN = {kind.kind for kind in CHILD_KINDS}
EXTRA_WRITES = 3  # a status that says what the dead could not, its Event, an Event counted twice


class Story(World):
    """One operation, from where it begins or from where a dead process left it."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        super().__init__(operation.before or operation.after)
        if operation.before is not None:
            self.converge()
        self.good = {_revision(pod) for pod in self.cluster.all(POD)}
        if operation.after is None:
            self.cluster.remove(VLM_SERVICE, "ns", self.name)
        else:
            self.apply(operation.after)

    def left(self, cluster: FakeCluster) -> Story:
        """The same story in what a dead process left, with controllers that went on."""
        found = copy.copy(self)
        found.cluster = copy.deepcopy(cluster)
        found.cluster.writes.clear()
        run_controllers(found.cluster, crash=found._crashes)
        return found

    def run(self, cluster: Cluster | None = None) -> Story:
        """Be a new process until nothing is left to do."""
        if self.operation.after is None:
            self._delete(cluster)
            return self
        self.loop = self.new_loop(cluster)
        quiet = 0
        for _ in range(60):
            before = self.cluster.version
            pause = self.turn(seconds=20.0 if self.operation.fails else 3.0)
            run_controllers(self.cluster, crash=self._crashes)
            quiet = quiet + 1 if self.cluster.version == before and pause > 1.0 else 0
            if quiet and self._ended():
                return self
        raise AssertionError(f"still writing: {self.cluster.writes[-5:]}")

    def created(self) -> Counter[Any]:
        """How often each child came into being."""
        return Counter(key for key in self.cluster.made if key[0] in CHILDREN)

    def orphans(self) -> list[str]:
        """Objects whose owner is gone."""
        uids = {
            item["metadata"]["uid"]
            for kind in (VLM_SERVICE, REPLICA_SET, *CHILD_KINDS)
            for item in self.cluster.all(kind)
        }
        return [
            item["metadata"]["name"]
            for kind in (*CHILD_KINDS, REPLICA_SET, POD)
            for item in self.cluster.all(kind)
            for owner in item["metadata"]["ownerReferences"]
            if owner["uid"] not in uids
        ]

    def _delete(self, cluster: Cluster | None) -> None:
        """Turn until the service is gone."""
        loop = self.new_loop(cluster)
        for _ in range(60):
            self.cluster.clock.now += 1
            outcome = asyncio.run(loop.turn())
            run_controllers(self.cluster)
            if outcome.gone:
                return
        raise AssertionError("the service never went")

    def _ended(self) -> bool:
        if self.operation.ended is None:
            return self.condition("Ready")["status"] == "True"
        return bool(self.condition("RolloutProgressing")["reason"] == self.operation.ended)

    def _crashes(self, pod: Manifest) -> bool:
        return self.operation.fails and _revision(pod) not in self.good


def _revision(pod: Manifest) -> str:
    return str(pod["metadata"]["labels"][names.LABEL_REVISION])


def _same(found: Story, reference: Story, told: str) -> None:
    """The law: the same end, nothing orphaned or made twice, as few writes as in a first run."""
    assert found.snapshot() == reference.snapshot(), told
    assert found.orphans() == [], told
    assert found.created() == reference.created(), told
    most = len(reference.cluster.writes) + EXTRA_WRITES
    assert len(found.cluster.writes) <= most, f"{told}: {found.cluster.writes}"


def _reference(name: str) -> tuple[Story, Story, Deaths]:
    """The story before anything happened, its end without a death, and all deaths."""
    begin = Story(OPERATIONS[name])
    reference = begin.left(begin.cluster)
    deaths = Deaths(reference.cluster)
    reference.run(deaths)
    return begin, reference, deaths


def _deaths(name: str, *, every: int) -> int:
    begin, reference, deaths = _reference(name)
    chosen = list(deaths.left.items())[len(name) % every :: every]
    for told, cluster in chosen:
        _same(begin.left(cluster).run(), reference, f"{name}, died {told}")
    return len(chosen)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_ends_as_ever_from_a_death_at_a_write(name: str):
    assert _deaths(name, every=4) >= (1 if name == "delete" else 2)


@pytest.mark.full
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_ends_as_ever_from_a_death_at_every_write(name: str):
    assert _deaths(name, every=1) >= (3 if name == "delete" else 9)


def _pairs(name: str, *, count: int, seed: int) -> None:
    """Die, and die again while the next process makes up for it."""
    begin, reference, deaths = _reference(name)
    draw = random.Random(seed)
    for _ in range(count):
        first, cluster = draw.choice(list(deaths.left.items()))
        again = begin.left(cluster)
        recovery = Deaths(again.cluster)
        again.run(recovery)
        if not recovery.left:
            continue
        second, cluster = draw.choice(list(recovery.left.items()))
        told = f"{name}, died {first}, then {second} (seed {seed})"
        _same(begin.left(cluster).run(), reference, told)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_second_death_during_recovery_changes_nothing(name: str):
    _pairs(name, count=1, seed=7)


@pytest.mark.full
@pytest.mark.parametrize("name", OPERATIONS)
def test_many_second_deaths_during_recovery_change_nothing(name: str):
    _pairs(name, count=40, seed=random.SystemRandom().randrange(2**32))
