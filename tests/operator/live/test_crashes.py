"""A process that dies at a write, against the real API server: the next one finishes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import time
import uuid
from typing import Any

import pytest
from operator_live import plain_children
from operator_support import body, pool

from vlm_operator import kube, names
from vlm_operator.cluster import VLM_NODE_CLASS, VLM_POOL, VLM_SERVICE, Manifest
from vlm_operator.errors import UnavailableError
from vlm_operator.local.controlplane import ControlPlane
from vlm_operator.local.waiting import until
from vlm_operator.reconcile import Loop, Options
from vlm_operator.testing import Died, DyingCluster, FakeScraper

pytestmark = pytest.mark.cluster


@pytest.fixture
def namespace() -> str:
    return f"crashes-{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def cluster(control_plane: ControlPlane, namespace: str):
    control_plane.kubectl("apply", "-f", "crds")
    control_plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
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


def loop(cluster: Any, namespace: str, name: str, *, late: float = 0.0) -> Loop:
    return Loop(
        namespace,
        name,
        cluster=cluster,
        scraper=FakeScraper(),
        options=Options(),
        clock=lambda: time.time() + late,
    )


def manifest(namespace: str, name: str, found: Manifest | None = None) -> Manifest:
    found = copy.deepcopy(found or body(decode=pool(2)))
    found["metadata"] = {"name": name, "namespace": namespace, "finalizers": [names.FINALIZER]}
    return found


async def converge(cluster: Any, namespace: str, name: str, *, late: float = 0.0) -> None:
    """Turn until a turn writes nothing; pods stay Pending, their events are awaited elsewhere."""
    await _rest(DyingCluster(cluster, at=None), namespace, name, late=late)


async def die(
    cluster: Any, namespace: str, name: str, *, at: int, committed: bool, late: float = 0.0
) -> bool:
    """Turn until write `at`; tells whether it came."""
    dying = DyingCluster(cluster, at=at, committed=committed)
    with contextlib.suppress(Died):
        await _rest(dying, namespace, name, late=late)
        return False
    return True


async def _rest(counting: DyingCluster, namespace: str, name: str, *, late: float) -> None:
    found = loop(counting, namespace, name, late=late)
    for _ in range(20):
        before = counting.writes
        await found.turn()
        if counting.writes == before:
            return
    raise AssertionError(f"{name} never came to rest")


@dataclasses.dataclass(frozen=True)
class Operation:
    """What is there, what is applied, and how much later its turns are, in seconds."""

    before: Manifest | None
    after: Manifest
    late: float = 0.0


OTHER = {"model": {"uri": "pvc://shapes", "dtype": "Float32"}}
ROLLBACK = {"rollout": {"progressDeadlineSeconds": 60, "onFailure": "Rollback"}}
OPERATIONS = {
    "create": Operation(None, body(decode=pool(2))),
    "scale": Operation(body(decode=pool(1)), body(decode=pool(3))),
    "rollout": Operation(body(decode=pool(2)), body(OTHER, decode=pool(2))),
    "topology": Operation(body(), body(encoder=pool(), decode=pool(2))),
    # no pod has a node here: the new revision runs out of time, and is taken back
    "rollback": Operation(
        body(ROLLBACK, decode=pool(2)), body({**ROLLBACK, **OTHER}, decode=pool(2)), late=3600.0
    ),
}


async def _begin(
    control_plane: ControlPlane,
    cluster: kube.KubeCluster,
    namespace: str,
    name: str,
    operation: Operation,
) -> None:
    if operation.before is None:
        await cluster.create(manifest(namespace, name, operation.after))
        return
    await cluster.create(manifest(namespace, name, operation.before))
    await converge(cluster, namespace, name)
    text = json.dumps(manifest(namespace, name, operation.after))
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=text)
    if operation.late:
        await converge(cluster, namespace, name)  # the rollout has begun, and fails from here on


async def _deaths(
    control_plane: ControlPlane,
    cluster: kube.KubeCluster,
    namespace: str,
    operation: Operation,
    *,
    first: int,
    every: int,
) -> int:
    """Die at each so-manyth write; returns at how many."""

    async def finish(name: str) -> str:
        await converge(cluster, namespace, name, late=operation.late)
        return plain_children(control_plane, namespace, name)

    await _begin(control_plane, cluster, namespace, "k-ref", operation)
    wanted = await finish("k-ref")
    assert len(json.loads(wanted)) > 8
    for at in itertools.count(first, every):
        name = f"k-{at:03d}"
        await _begin(control_plane, cluster, namespace, name, operation)
        died = await die(
            cluster, namespace, name, at=at, committed=at % 2 == 1, late=operation.late
        )
        assert await finish(name) == wanted, f"died at write {at}"
        if not died:
            return (at - first) // every
    raise AssertionError


@pytest.mark.parametrize(
    ("name", "every"),
    [("create", 11), ("scale", 5), ("rollout", 7), ("topology", 9), ("rollback", 4)],
)
async def test_an_operation_converges_from_a_death_at_a_write(
    control_plane: ControlPlane, cluster: kube.KubeCluster, namespace: str, name: str, every: int
):
    operation = OPERATIONS[name]
    count = await _deaths(
        control_plane, cluster, namespace, operation, first=every // 2, every=every
    )
    assert count >= 1


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", OPERATIONS)
async def test_an_operation_converges_from_a_death_at_every_write(
    control_plane: ControlPlane, cluster: kube.KubeCluster, namespace: str, name: str
):
    operation = OPERATIONS[name]
    count = await _deaths(control_plane, cluster, namespace, operation, first=0, every=1)
    assert count >= 3


@pytest.mark.parametrize("at", [1, 2, *(pytest.param(at, marks=pytest.mark.full) for at in (0, 3))])
async def test_deletion_converges_from_a_death_at_every_write(
    control_plane: ControlPlane, cluster: kube.KubeCluster, namespace: str, at: int
):
    name = f"d-{at:03d}"
    await cluster.create(manifest(namespace, name))
    await converge(cluster, namespace, name)
    control_plane.kubectl("-n", namespace, "delete", "vlm", name, "--wait=false")
    with contextlib.suppress(Died):
        dying = DyingCluster(cluster, at=at // 2, committed=at % 2 == 1)
        await loop(dying, namespace, name).drain()
    await _drain(control_plane, cluster, namespace, name)


async def _drain(
    control_plane: ControlPlane, cluster: kube.KubeCluster, namespace: str, name: str
) -> None:
    found = loop(cluster, namespace, name)

    async def drained() -> bool:
        return await found.drain() is None

    await until(drained, seconds=20, awaited=f"{name} to drain")
    patch = '{"metadata": {"finalizers": null}}'
    control_plane.kubectl("-n", namespace, "patch", "vlm", name, "--type=merge", "-p", patch)

    async def gone() -> bool:
        left = json.loads(plain_children(control_plane, namespace, name))
        return not left and await cluster.get(VLM_SERVICE, namespace, name) is None

    # garbage collection discovers a new kind within half a minute
    await until(gone, seconds=75, awaited=f"the children of {name} to go")
