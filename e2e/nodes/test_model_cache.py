"""`model.cache` on real nodes: a Job fills a claim, which pods of all nodes mount read-only."""

import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from nodes.network import Network
from served import ANSWER, Served, cached, condition
from worker.serve.downloads import serving
from worker.serve.hub import COMMIT, LARGE, Hub

from vlm_local.controlplane import ControlPlane
from vlm_local.waiting import until

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(900)]
NAMESPACE = "cached"
STORAGE_CLASS = "shared-disk"
SECONDS = 120.0


@pytest.fixture
async def hub(network: Network) -> AsyncIterator[Hub]:
    """A hub at the address of the bridge, which pods reach."""
    found = Hub(stalls=True)
    async with serving(found.app, network.primary.plane) as found.url:
        yield found


@pytest.fixture
def volume(operator: ControlPlane, folder: Path) -> Iterator[Path]:
    """An empty volume that every node can mount."""
    path = folder / "cache"
    path.mkdir()
    path.chmod(0o777)  # kubelets change no owner of a hostPath
    spec = {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": STORAGE_CLASS,
        "persistentVolumeReclaimPolicy": "Retain",
        "capacity": {"storage": "1Gi"},
        "hostPath": {"path": str(path), "type": "Directory"},
    }
    manifest = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": "cache"},
        "spec": spec,
    }
    operator.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    yield path
    operator.kubectl("delete", "pv", "cache", "--timeout=60s")


@pytest.fixture
async def served(operator: ControlPlane, volume: Path) -> AsyncIterator[Served]:
    operator.kubectl("create", "namespace", NAMESPACE)
    async with operator.client() as api:
        yield Served(operator, api, NAMESPACE, "shapes")
    operator.kubectl("delete", "namespace", NAMESPACE, "--timeout=120s")


async def test_a_job_downloads_once_and_pods_of_three_nodes_serve_from_its_claim(
    served: Served, hub: Hub, volume: Path
):
    env, claim = {"HF_ENDPOINT": hub.url}, {"storageClassName": STORAGE_CLASS}
    manifest = cached("quickstart", uri="hf://org/shapes", revision=COMMIT, env=env, claim=claim)
    await served.apply(manifest)

    async def tells_progress() -> bool:
        ready = condition(await served.service(), "ModelReady")
        return ready.get("reason") == "Downloading" and "% of " in ready["message"]

    await until(tells_progress, seconds=SECONDS, every=0.5, awaited="the progress of the download")
    [job_pod] = await served.pods()
    print(await served.kubectl("get", "vlm,job,pvc,pod", "-o", "wide"))
    hub.resume.set()
    await served.ready()
    assert await served.ask() == ANSWER
    assert hub.sent.count(LARGE) == 1
    assert condition(await served.service(), "ModelReady")["status"] == "True"
    [marked] = [found for found, _, names in os.walk(volume) if LARGE in names]
    pods = [
        pod for pod in await served.pods() if pod["metadata"]["uid"] != job_pod["metadata"]["uid"]
    ]
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 3
    print(f"{len(pods)} pods serve from {Path(marked).relative_to(volume)}")
