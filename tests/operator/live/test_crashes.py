"""A process ends at a write to the real API server: the next one finishes its work.

Pods have no node here and never serve; test_deaths.py has the same operations over a fake cluster
whose pods do, from every state that a death could leave.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence

import pytest

from support.fakes import Died, DyingCluster, FakeScraper
from support.live import plain_children
from support.operations import OPERATIONS, Operation
from vlm_local.controlplane import ControlPlane
from vlm_local.waiting import until
from vlm_operator import kube
from vlm_operator.cluster import (
    VLM_NODE_CLASS,
    VLM_POOL,
    VLM_SERVICE,
    Cluster,
    Manifest,
)
from vlm_operator.errors import UnavailableError
from vlm_operator.reconcile.decisions import Options
from vlm_operator.reconcile.service import ServiceReconciler

pytestmark = pytest.mark.cluster
LATE_SECONDS = 3600.0  # past every deadline of a rollout
BOTH = (False, True)  # before the write, and after it
NOTHING = ""


@pytest.fixture
def namespace() -> str:
    return f"crashes-{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def cluster(control_plane: ControlPlane, namespace: str) -> AsyncIterator[kube.KubeCluster]:
    control_plane.kubectl("apply", "-f", "crds")
    control_plane.await_crds()
    control_plane.kubectl("create", "namespace", namespace)
    found = kube.KubeCluster(await kube.configuration(str(control_plane.kubeconfig)))

    async def served() -> bool:
        with contextlib.suppress(UnavailableError):
            for kind in (VLM_SERVICE, VLM_POOL, VLM_NODE_CLASS):
                await found.list(kind)
            return True
        return False

    await until(served, seconds=30, awaited="the API server to serve our kinds")
    yield found
    await found.close()
    control_plane.kubectl("delete", "namespace", namespace, "--wait=false")


@dataclasses.dataclass(frozen=True)
class Story:
    """One operation on one service of that name."""

    plane: ControlPlane
    cluster: kube.KubeCluster
    namespace: str
    name: str
    operation: Operation

    async def begin(self) -> None:
        """What is there before, at rest, and then what is asked for."""
        before, after = self.operation.before, self.operation.after
        await self.cluster.create(self._manifest(before or after))
        if before is None:
            return
        await self._turn(self.cluster)
        if after is None:
            self._kubectl("delete", "vlm", self.name, "--wait=false")
            return
        text = json.dumps(self._manifest(after))
        self._kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
        if self.operation.fails:
            await self._turn(self.cluster)  # it has begun, and from here on it is late

    async def die(self, *, at: int, committed: bool) -> bool:
        """Run as a process until write `at`; return whether there was such a write."""
        dying = DyingCluster(self.cluster, at=at, committed=committed)
        with contextlib.suppress(Died):
            await self._work(dying)
            return False
        return True

    async def finish(self) -> str:
        """Be the process after it, until nothing is left to do; returns the children."""
        await self._work(self.cluster)
        if self.operation.after is None:

            async def gone() -> bool:
                left = await self.cluster.get(VLM_SERVICE, self.namespace, self.name)
                return left is None and self._children() == NOTHING

            # garbage collection discovers a new kind within half a minute
            await until(gone, seconds=75, every=0.2, awaited=f"{self.name} and all of it to go")
        return self._children()

    def _children(self) -> str:
        return plain_children(self.plane, self.namespace, self.name)

    async def _work(self, cluster: Cluster) -> None:
        if self.operation.after is not None:
            await self._turn(cluster, late=LATE_SECONDS if self.operation.fails else 0.0)
            return
        loop = self._loop(cluster)

        async def drained() -> bool:
            return (await loop.turn()).gone

        await until(drained, seconds=20, awaited=f"{self.name} to drain")

    async def _turn(self, cluster: Cluster, *, late: float = 0.0) -> None:
        """Turn until a turn writes nothing: pods stay Pending, whatever is awaited."""
        counting = DyingCluster(cluster, at=None)
        loop = self._loop(counting, late=late)
        for _ in range(20):
            before = counting.writes
            await loop.turn()
            if counting.writes == before:
                return
        raise AssertionError(f"{self.name} never came to rest")

    def _loop(self, cluster: Cluster, *, late: float = 0.0) -> ServiceReconciler:
        return ServiceReconciler(
            self.namespace,
            self.name,
            cluster=cluster,
            scraper=FakeScraper(),
            options=Options(),
            clock=lambda: time.time() + late,
        )

    def _manifest(self, manifest: Manifest | None) -> Manifest:
        found = copy.deepcopy(manifest)
        assert found is not None
        return {**found, "metadata": {"name": self.name, "namespace": self.namespace}}

    def _kubectl(self, *arguments: str, stdin: str | None = None) -> None:
        self.plane.kubectl("-n", self.namespace, *arguments, stdin=stdin)


async def _deaths(reference: Story, *, first: int, every: int, sides: Sequence[bool]) -> int:
    """Die at each so-manyth write, on each side of it; returns how often."""
    await reference.begin()
    wanted = await reference.finish()
    assert wanted == NOTHING or len(wanted.splitlines()) > 8
    count = 0
    for at in itertools.count(first, every):
        for committed in sides:
            name = f"k-{at:03d}-{'after' if committed else 'before'}"
            story = dataclasses.replace(reference, name=name)
            await story.begin()
            died = await story.die(at=at, committed=committed)
            assert await story.finish() == wanted, name
            if not died:
                return count
            count += 1
    raise AssertionError


def _story(plane: ControlPlane, cluster: kube.KubeCluster, namespace: str, name: str) -> Story:
    return Story(plane, cluster, namespace, "k-ref", OPERATIONS[name])


@pytest.mark.parametrize(
    ("name", "every", "side"),
    [
        ("create", 13, True),
        ("scale", 5, False),
        ("rollout", 8, True),
        ("topology", 9, False),
        ("rollback", 5, True),
        ("delete", 2, False),
    ],
)
async def test_an_operation_converges_from_a_death_at_a_write(
    control_plane: ControlPlane,
    cluster: kube.KubeCluster,
    namespace: str,
    name: str,
    every: int,
    side: bool,
):
    story = _story(control_plane, cluster, namespace, name)
    assert await _deaths(story, first=every // 2, every=every, sides=(side,)) >= 1


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", OPERATIONS)
async def test_an_operation_converges_from_a_death_before_and_after_every_write(
    control_plane: ControlPlane, cluster: kube.KubeCluster, namespace: str, name: str
):
    story = _story(control_plane, cluster, namespace, name)
    count = await _deaths(story, first=0, every=1, sides=BOTH)
    print(f"{name}: {count} deaths")
    assert count >= 4
