"""`model.cache` with real pods: a hub's model, its next revision, and the folder of a bucket."""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest
from served import ANSWER, Served, cached, condition, names_of, place
from worker.serve.bucket import BUCKET, KEY, PREFIX, SECRET, Bucket
from worker.serve.downloads import serving
from worker.serve.hub import COMMIT, LARGE, Hub

from vlm_local.client import Object
from vlm_local.controlplane import ControlPlane
from vlm_local.demo.line import MODEL
from vlm_local.waiting import until
from vlm_operator import names
from vlm_operator.names import Role

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(600)]
NEXT = "f" * 40
SECONDS = 120.0


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    found = Hub(commits={COMMIT, NEXT}, stalls=True)
    async with serving(found.app) as found.url:
        yield found


@pytest.fixture
async def served(operator: ControlPlane) -> AsyncIterator[Served]:
    namespace = f"cached-{uuid.uuid4().hex[:6]}"
    with place(operator, namespace, MODEL):
        async with operator.client() as api:
            yield Served(operator, api, namespace, "colocated")


def manifest(hub: Hub, revision: str) -> Object:
    env = {"HF_ENDPOINT": hub.url}
    return cached("colocated", uri="hf://org/shapes", revision=revision, env=env)


async def test_pods_start_after_the_download_and_stay_until_the_next_one_is_complete(
    served: Served, hub: Hub
):
    async with asyncio.timeout(SECONDS):
        await served.apply(manifest(hub, COMMIT))
        await hub.stalled.wait()
        assert await workers(served) == []
        assert (await state(served))["reason"] == "Downloading"
        awaited = "the progress in the condition"
        await until(lambda: tells_progress(served), seconds=60, every=0.5, awaited=awaited)
        hub.resume.set()
    await served.ready()
    assert await served.ask() == ANSWER
    assert hub.sent.count(LARGE) == 1
    assert (await state(served))["status"] == "True"
    first = await workers(served)
    [claim] = await listed(served, "persistentvolumeclaims")

    hub.resume.clear()
    hub.stalled.clear()
    async with asyncio.timeout(SECONDS):
        await served.apply(manifest(hub, NEXT))
        await hub.stalled.wait()
        assert (await state(served))["reason"] == "Downloading"
        assert names_of(await workers(served)) == names_of(first)
        assert await served.ask() == ANSWER
        hub.resume.set()

    async def replaced() -> bool:
        left = names_of(await workers(served)) & names_of(first)
        return not left and claim not in await listed(served, "persistentvolumeclaims")

    await until(replaced, seconds=180, every=0.5, awaited="the pods and the claim to be replaced")
    await served.ready()
    assert await served.ask() == ANSWER
    assert hub.sent.count(LARGE) == 2
    assert len(await listed(served, "persistentvolumeclaims")) == 1


async def test_a_gated_model_ends_the_job_at_once_and_a_deleted_job_begins_again(
    served: Served, hub: Hub
):
    hub.gated, hub.stalls = True, False
    await served.apply(manifest(hub, COMMIT))
    await until_failed(served)
    message = (await state(served))["message"]
    assert "the model is gated; accept its licence on the hub" in message
    assert condition(await served.service(), "Stalled")["reason"] == "DownloadFailed"
    pods = await served.pods()
    assert len(pods) == 1, "one attempt: another would fail alike"
    hub.gated = False
    await run_again(served)


async def test_a_bucket_is_read_with_the_keys_of_a_secret(served: Served):
    bucket = Bucket()
    keys = (f"--from-literal=AWS_ACCESS_KEY_ID={KEY}", "--from-literal=AWS_SECRET_ACCESS_KEY=no")
    await served.kubectl("create", "secret", "generic", "keys", *keys)
    async with serving(bucket.app) as url:
        env = {"AWS_ENDPOINT_URL": url, "AWS_REGION": "us-east-1"}
        uri, secret = f"s3://{BUCKET}/{PREFIX}", {"name": "keys"}
        await served.apply(cached("colocated", uri=uri, credentialsSecretRef=secret, env=env))
        await until_failed(served)
        assert "the bucket refuses these credentials; give keys" in (await state(served))["message"]
        right = {"stringData": {"AWS_SECRET_ACCESS_KEY": SECRET}}
        await served.kubectl("patch", "secret", "keys", f"--patch={json.dumps(right)}")
        await run_again(served)
        assert (await state(served))["status"] == "True"


async def until_failed(served: Served) -> None:
    async def failed() -> bool:
        return (await state(served)).get("reason") == "DownloadFailed"

    await until(failed, seconds=SECONDS, every=0.2, awaited="the download to fail")


async def run_again(served: Served) -> None:
    """Delete the failed Job, as the docs say; the service gives the true answer."""
    [job] = await listed(served, "jobs", group="/apis/batch/v1")
    await served.kubectl("delete", "job", job)
    await served.ready()
    assert await served.ask() == ANSWER


async def workers(served: Served) -> list[Object]:
    pods = await served.pods()
    roles = [role.value for role in Role]
    return [pod for pod in pods if pod["metadata"]["labels"].get(names.LABEL_ROLE) in roles]


async def tells_progress(served: Served) -> bool:
    return "% of " in (await state(served))["message"]


async def state(served: Served) -> dict[str, Any]:
    return condition(await served.service(), "ModelReady")


async def listed(served: Served, plural: str, *, group: str = "/api/v1") -> list[str]:
    """Names of objects with the label of the service."""
    labels = f"{names.LABEL_SERVICE}={served.name}"
    found = await served.api.get(served.path(plural, group=group), labelSelector=labels)
    return [item["metadata"]["name"] for item in found["items"]]
