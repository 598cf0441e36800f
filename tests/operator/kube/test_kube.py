"""The client against a real API server: what it sends, what it raises, and the fake beside it."""

import asyncio
import concurrent.futures
import contextlib
import json
import uuid
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from kubernetes.aio import client as kube_client

from support.fakes import FakeCluster, WatchableCluster
from vlm_local.controlplane import ControlPlane
from vlm_operator import kube
from vlm_operator.cluster import CONFIG_MAP, NODE, POD, VLM_POOL, Cluster, Manifest, WatchEventType
from vlm_operator.errors import ClusterError, ConflictError, UnavailableError

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


async def follow(cluster: kube.KubeCluster | WatchableCluster, name: str) -> list[object]:
    """List what carries a label, then watch while it changes; returns what was told."""
    label = f"follow/{name}"

    def labelled(number: int, **labels: str) -> Manifest:
        return config_map(f"{name}-{number}", {"a": str(number)}, labels=labels)

    for number in range(3):
        await cluster.apply(labelled(number, **{label: ""}), manager="one")
    await cluster.apply(labelled(3), manager="one")
    listed, since = [], 0
    async for page in cluster.pages(CONFIG_MAP, "default", labelled=label):
        listed += [item["metadata"]["name"].removeprefix(name) for item in page.items]
        since = page.version
    told: list[object] = [listed]
    watch = cluster.watch(
        CONFIG_MAP, "default", labelled=label, since=since, seconds=20, silence=20
    )
    await cluster.apply(labelled(0, **{label: "b"}), manager="one")
    await cluster.apply(labelled(1), manager="one")  # its label is gone
    await cluster.apply(labelled(3, **{label: ""}), manager="one")
    await cluster.delete(CONFIG_MAP, "default", f"{name}-2", uid=None)
    versions = [since]
    async with contextlib.aclosing(watch):
        async for event in watch:
            meta = event.item["metadata"]
            if event.type is WatchEventType.BOOKMARK:
                continue
            versions.append(int(meta["resourceVersion"]))
            told.append((event.type, meta["name"].removeprefix(name)))
            if event.type is WatchEventType.DELETED and meta["name"].endswith("-2"):
                break
    assert versions == sorted(versions)
    return told


async def test_the_fake_tells_what_the_real_one_tells(real: kube.KubeCluster):
    name = f"case-{uuid.uuid4().hex[:8]}"
    told = await follow(real, name)
    assert told[0] == ["-0", "-1", "-2"]
    happened = [one for one, _ in told[1:]]
    assert happened[:2] == [WatchEventType.MODIFIED, WatchEventType.DELETED]
    # one that comes to carry the label is new to the watch
    assert happened[2:] == [WatchEventType.ADDED, WatchEventType.DELETED]
    assert await follow(WatchableCluster(), name) == told


async def test_cluster_wide_kinds_have_no_namespace(real: kube.KubeCluster):
    assert isinstance(await real.list(NODE), list)
    assert await real.get(NODE, "default", "none") is None


async def test_items_of_a_list_say_what_they_are(real: kube.KubeCluster):
    found = await real.list(CONFIG_MAP, "kube-system")
    assert found
    assert {(item["apiVersion"], item["kind"]) for item in found} == {("v1", "ConfigMap")}


def test_answers_share_their_strings():
    text = '{"metadata": {"labels": {"app": "%s"}}, "args": ["--x=1", "--y"], "n": [1, {"": 2}]}'
    one, two = kube.parsed(text % "vlm-worker"), kube.parsed((text % "vlm-worker").encode())
    assert one == two == json.loads(text % "vlm-worker")
    assert one["metadata"]["labels"]["app"] is two["metadata"]["labels"]["app"]
    assert all(one is two for one, two in zip(one["args"], two["args"], strict=True))
    assert all(one is two for one, two in zip(one["metadata"], two["metadata"], strict=True))


@pytest.mark.parametrize(
    ("server", "proxy"),
    [
        ("https://api.example:6443", "http://user:word@proxy:3128"),
        ("http://api.example", None),
        ("https://10.96.0.1:443", None),
        ("https://10.96.0.2:443", "http://user:word@proxy:3128"),
        ("https://kubernetes.default.svc", None),
        ("https://[fd00::1]:443", None),
        ("https://[fd00::2]:443", "http://user:word@proxy:3128"),
    ],
)
def test_the_proxy_of_the_environment_is_that_of_the_server(
    server: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
):
    for name in ("https_proxy", "http_proxy", "HTTP_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://user:word@proxy:3128")
    monkeypatch.setenv("NO_PROXY", "10.96.0.1,.svc,fd00::1")
    assert kube.proxy_of(server) == proxy


async def test_requests_use_the_proxy_of_the_environment_and_no_thread(
    monkeypatch: pytest.MonkeyPatch,
):
    """aiohttp's own lookups of .netrc and proxies use a thread for each request."""
    seen = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.host, request.headers.get("Proxy-Authorization")))
        return web.json_response({"items": []})

    async with _server(answer) as proxy:
        for name in ("http_proxy", "no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HTTP_PROXY", proxy.replace("//", "//user:word@"))
        configuration = kube_client.Configuration()
        configuration.host = "http://api.invalid:8080"
        cluster = kube.KubeCluster(configuration)
        loop = asyncio.get_running_loop()
        executor = concurrent.futures.ThreadPoolExecutor(1)
        loop.set_default_executor(executor)
        try:
            assert await cluster.list(VLM_POOL, "ns") == []
        finally:
            await cluster.close()
        assert not executor._threads
    assert seen == [("api.invalid", "Basic dXNlcjp3b3Jk")]


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
    configuration = kube_client.Configuration()
    configuration.host = "http://127.0.0.1:1"
    cluster = kube.KubeCluster(configuration)
    with pytest.raises(UnavailableError):
        await cluster.list(POD)
    await cluster.close()


@pytest.mark.parametrize(
    ("line", "error", "text"),
    [
        (b'{"type":"ERROR","object":{"code":410,"reason":"Expired"}}\n', ClusterError, "Expired"),
        (b'{"type":"ERROR","object":{"code":500}}\n', UnavailableError, "500"),
        (b'{"type":"ADDED","object":{"met', UnavailableError, "a line without its end"),
        (b"<html>\n", UnavailableError, "no JSON"),
        (b"[]\n", UnavailableError, "no event of a watch"),
        (b'{"type":"TOLD","object":{}}\n', UnavailableError, "no event of a watch"),
        (None, UnavailableError, "Unreachable"),
    ],
    ids=["410", "500", "half a line", "garbage", "no event", "unknown event", "silence"],
)
async def test_a_watch_that_breaks_is_a_typed_error(line: bytes | None, error: type, text: str):
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if line is None:
            await asyncio.sleep(60)
        else:
            await response.write(line)
        return response

    async with _served(answer) as cluster:
        with pytest.raises(error, match=text):
            async for _ in cluster.watch(
                VLM_POOL, "ns", labelled="", since=1, seconds=60, silence=0.05
            ):
                pass


async def test_requests_wait_for_no_open_watch():
    async def answer(request: web.Request) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.json_response({"items": []})
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"type":"ADDED","object":{}}\n')
        await asyncio.sleep(60)
        return response

    async with _served(answer) as cluster, contextlib.AsyncExitStack() as stack:
        for _ in range(120):  # nine kinds in a dozen namespaces
            watch = cluster.watch(VLM_POOL, "ns", labelled="", since=1, seconds=60, silence=60)
            await anext(await stack.enter_async_context(contextlib.aclosing(watch)))
        assert await cluster.list(VLM_POOL, "ns") == []


async def _ask(answer, error: type, text: str, status: int) -> None:
    async with _served(answer) as cluster:
        with pytest.raises(error, match=text) as caught:
            await cluster.list(VLM_POOL, "ns")
        assert caught.value.status == status


@contextlib.asynccontextmanager
async def _served(answer) -> AsyncIterator[kube.KubeCluster]:
    """A client of a server that always answers the same."""
    async with _server(answer) as url:
        configuration = kube_client.Configuration()
        configuration.host = url
        cluster = kube.KubeCluster(configuration)
        try:
            yield cluster
        finally:
            await cluster.close()


@contextlib.asynccontextmanager
async def _server(answer) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_log_that_does_not_exist_is_a_typed_error(real: kube.KubeCluster):
    name = f"log-{uuid.uuid4().hex[:8]}"
    spec = {"containers": [{"name": "c", "image": "none"}]}
    metadata = {"name": name, "namespace": "default"}
    await real.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    statuses = []
    for pod, container in ((name, "other"), ("no-such-pod", "c")):
        with pytest.raises(ClusterError) as refused:
            await anext(real.log("default", pod, container, tail_lines=5))
        statuses.append(refused.value.status)
    await real.delete(POD, "default", name, uid=None)
    assert statuses == [400, 404]
