"""A process that dies at a write, against the real API server: the next one finishes."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from typing import Any

import pytest
from operator_live import plain_children
from operator_support import body, pool

from vlm_operator import kube, names
from vlm_operator.cluster import VLM_NODE_CLASS, VLM_POOL, VLM_SERVICE
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


def loop(cluster: Any, namespace: str, name: str) -> Loop:
    return Loop(
        namespace,
        name,
        cluster=cluster,
        scraper=FakeScraper(),
        options=Options(),
        clock=time.time,
    )


def manifest(namespace: str, name: str) -> dict[str, Any]:
    found = body(name=name, decode=pool(2))
    found["metadata"] |= {"namespace": namespace, "finalizers": [names.FINALIZER]}
    return found


async def converge(cluster: Any, namespace: str, name: str) -> None:
    """Turn until a turn writes nothing; pods stay Pending, their events are awaited elsewhere."""
    counting = DyingCluster(cluster, at=None)
    found = loop(counting, namespace, name)
    for _ in range(20):
        before = counting.writes
        await found.turn()
        if counting.writes == before:
            return
    raise AssertionError(f"{name} never came to rest")


async def die(cluster: Any, namespace: str, name: str, *, at: int, committed: bool) -> bool:
    found = loop(DyingCluster(cluster, at=at, committed=committed), namespace, name)
    with contextlib.suppress(Died):
        await found.turn()
        return False
    return True


async def test_creation_converges_from_a_death_at_every_write(
    control_plane: ControlPlane, cluster: kube.KubeCluster, namespace: str
):
    await cluster.create(manifest(namespace, "k-ref"))
    await converge(cluster, namespace, "k-ref")
    wanted = plain_children(control_plane, namespace, "k-ref")
    assert len(json.loads(wanted)) > 8
    at = 0
    while True:
        name = f"k-{at:03d}"
        await cluster.create(manifest(namespace, name))
        died = await die(cluster, namespace, name, at=at, committed=at % 2 == 1)
        await converge(cluster, namespace, name)
        assert plain_children(control_plane, namespace, name) == wanted, f"died at write {at}"
        if not died:
            break
        at += 1
    assert at > 10


async def test_deletion_converges_from_a_death_at_every_write(
    control_plane: ControlPlane, cluster: kube.KubeCluster, namespace: str
):
    for at in range(4):
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
