"""The client against a real API server: what it sends, what it raises, and the fake beside it."""

import uuid
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from vlm_operator import kube
from vlm_operator.cluster import CONFIG_MAP, NODE, POD, VLM_POOL, Cluster, Manifest
from vlm_operator.errors import ClusterError, ConflictError, UnavailableError
from vlm_operator.local.controlplane import ControlPlane
from vlm_operator.testing import FakeCluster

pytestmark = pytest.mark.cluster


@pytest.fixture
async def real(control_plane: ControlPlane) -> AsyncIterator[kube.KubeCluster]:
    cluster = kube.KubeCluster(await kube.configuration(str(control_plane.kubeconfig)))
    yield cluster
    await cluster.close()


def config_map(name: str, data: dict[str, str], **meta: object) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "default", **meta},
        "data": data,
    }


async def tell(cluster: Cluster, name: str) -> list[object]:
    """Use every method once; returns what was seen, without what differs from run to run."""
    seen: list[object] = []

    async def data() -> object:
        found = await cluster.get(CONFIG_MAP, "default", name)
        return None if found is None else found.get("data", {})

    async def refused(call) -> None:
        try:
            await call
            seen.append("taken")
        except ClusterError as error:
            seen.append((type(error).__name__.lstrip("_"), error.status))

    labels = {"case": name}
    seen.append(await data())
    await cluster.apply(config_map(name, {"a": "1"}, labels=labels), manager="one", dry_run=True)
    seen.append(await data())
    first = await cluster.apply(
        config_map(name, {"a": "1", "b": "1"}, labels=labels), manager="one"
    )
    await cluster.apply(config_map(name, {"c": "2"}), manager="two")
    seen.append(await data())
    again = await cluster.apply(config_map(name, {"a": "1"}, labels=labels), manager="one")
    seen.append(await data())
    same = await cluster.apply(config_map(name, {"a": "1"}, labels=labels), manager="one")
    versions = [item["metadata"]["resourceVersion"] for item in (first, again, same)]
    seen.append([versions[0] != versions[1], versions[1] == versions[2]])
    seen.append(len(await cluster.list(CONFIG_MAP, "default", labels)))
    seen.append(len(await cluster.list(CONFIG_MAP, None, labels)))
    uid = "00000000-0000-0000-0000-000000000000"
    await refused(cluster.apply(config_map(name, {"a": "3"}, uid=uid), manager="one"))
    await refused(cluster.apply(config_map(f"{name}-none", {}, uid=uid), manager="one"))
    await refused(cluster.create(config_map(name, {})))
    await refused(cluster.replace({**again, "data": {"z": "9"}}))
    seen.append(await data())
    stale = {**same["metadata"], "resourceVersion": versions[0]}
    await refused(cluster.replace({**same, "metadata": stale}))
    await refused(cluster.delete(CONFIG_MAP, "default", name, uid=uid))
    await cluster.merge(config_map(name, {"y": "8"}), manager="one")
    seen.append(await data())
    await cluster.delete(CONFIG_MAP, "default", name, uid=again["metadata"]["uid"])
    await cluster.delete(CONFIG_MAP, "default", name, uid=None)
    seen.append(await data())
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"}}
    await refused(cluster.apply(pod, manager="one"))
    await refused(cluster.apply({**pod, "status": {}}, manager="one", subresource="status"))
    return seen


async def test_the_fake_answers_as_the_real_one_does(real: kube.KubeCluster):
    name = f"case-{uuid.uuid4().hex[:8]}"
    assert await tell(FakeCluster(), name) == await tell(real, name)


async def test_cluster_wide_kinds_have_no_namespace(real: kube.KubeCluster):
    assert isinstance(await real.list(NODE), list)
    assert await real.get(NODE, "default", "none") is None


async def test_items_of_a_list_say_what_they_are(real: kube.KubeCluster):
    found = await real.list(CONFIG_MAP, "kube-system")
    assert found
    assert {(item["apiVersion"], item["kind"]) for item in found} == {("v1", "ConfigMap")}


async def test_a_missing_kubeconfig_says_which_was_tried():
    with pytest.raises(ClusterError, match=r"--kubeconfig=/none"):
        await kube.configuration("/none")


@pytest.mark.parametrize(
    ("status", "error"),
    [(409, ConflictError), (429, UnavailableError), (503, UnavailableError), (403, ClusterError)],
)
async def test_a_refusal_becomes_a_typed_error_with_the_servers_words(status: int, error: type):
    async def answer(_: web.Request) -> web.Response:
        said = {"kind": "Status", "reason": "Because", "message": "no, and why"}
        return web.json_response(said, status=status)

    await _ask(answer, error, "no, and why", status)


async def test_garbage_and_silence_are_unavailability():
    async def garbage(_: web.Request) -> web.Response:
        return web.Response(text="<html>")

    await _ask(garbage, UnavailableError, "no JSON", 0)
    configuration = kube.kube_client.Configuration()
    configuration.host = "http://127.0.0.1:1"
    cluster = kube.KubeCluster(configuration)
    with pytest.raises(UnavailableError):
        await cluster.list(POD)
    await cluster.close()


async def _ask(answer, error: type, text: str, status: int) -> None:
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = kube.kube_client.Configuration()
    configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    cluster = kube.KubeCluster(configuration)
    try:
        with pytest.raises(error, match=text) as caught:
            await cluster.list(VLM_POOL, "ns")
        assert caught.value.status == status
    finally:
        await cluster.close()
        await runner.cleanup()
