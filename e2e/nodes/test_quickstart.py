"""On real nodes with default settings: install, quickstart, true answers, uninstall."""

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from nodes import typed
from served import Served, elapsed, in_url, num_restarts

from vlm_local.client import Object
from vlm_local.controlplane import ControlPlane
from vlm_local.demo.line import MODEL, model_volume
from vlm_local.waiting import until
from vlm_operator import names

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(900)]
README = typed.QUICKSTART / "README.md"
WAYS = {  # install, what is done while the service runs, uninstall
    "install.yaml": (typed.apply_install_yaml, None, typed.delete_install_yaml),
    "install.yaml again": (typed.apply_install_yaml, None, typed.delete_install_yaml),
    "the chart": (typed.helm_install, typed.helm_upgrade_and_roll_back, typed.helm_uninstall),
}
OURS = re.compile(r"triptych|vlm|shapes")


@pytest.fixture
def claim(cluster: ControlPlane, folder: Path) -> Iterator[None]:
    """The claim of the quickstart's README, bound to a volume with the model."""
    model = shutil.copytree(MODEL, folder / "model", dirs_exist_ok=True)
    volume = model_volume(model)["items"][0]
    volume["spec"]["accessModes"] = ["ReadWriteMany"]
    [wanted] = re.findall(r"```yaml\n(.*?)```", README.read_text(), re.DOTALL)
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(volume))
    cluster.kubectl("apply", "-f", "-", stdin=wanted)
    yield
    delete = ("delete", "--ignore-not-found", "--timeout=60s")
    cluster.kubectl(*delete, "vlm", "shapes", check=False)  # there if the test failed
    cluster.kubectl(*delete, "pvc/shapes", "pv/shapes")


@pytest.mark.parametrize("way", WAYS)
async def test_it_installs_answers_truly_and_leaves_nothing(
    cluster: ControlPlane, claim: None, way: str
):
    before = _all_of_ours(cluster)
    install, meanwhile, uninstall = WAYS[way]
    began = time.monotonic()
    install(cluster)
    print(f"the operator is ready {elapsed(began)} after {way}")
    began = time.monotonic()
    typed.kubectl(cluster, "apply", "-f", typed.QUICKSTART)
    typed.kubectl(cluster, "wait", "--for=condition=Ready", "vlm/shapes", "--timeout=5m")
    print(f"the service is Ready {elapsed(began)} after the quickstart")
    for question, answer in typed.QUESTIONS.items():
        said = typed.vlm(cluster, "chat", "shapes", "--image", typed.IMAGE, question)
        assert re.search(rf"^\s*{answer}\s*$", said, re.MULTILINE), said
    async with cluster.client() as api:
        served = Served(cluster, api, "default", "shapes")
        await _is_healthy(served)
        if meanwhile is not None:
            kept = {pod["metadata"]["uid"] for pod in await served.pods()}
            meanwhile(cluster)
            assert kept == {pod["metadata"]["uid"] for pod in await served.pods()}
            await _is_healthy(served)
    typed.vlm(cluster, "doctor")
    typed.kubectl(cluster, "delete", "-f", typed.QUICKSTART, "--timeout=120s")
    uninstall(cluster)

    async def nothing_is_left() -> bool:
        left = _all_of_ours(cluster) - before
        print("left:", *sorted(left))
        return not left

    # kubelets end the pods of a deleted service in the background
    await until(nothing_is_left, seconds=120, awaited="everything of ours to be gone")


async def _is_healthy(served: Served) -> None:
    """No container was restarted, probes are answered, and the Service is found by name."""
    pods = await served.pods()
    assert len(pods) == 4
    operator = await served.api.get(f"/api/v1/namespaces/{names.OPERATOR_NAMESPACE}/pods")
    async with httpx.AsyncClient(timeout=30) as client:
        for pod in [*pods, *operator["items"]]:
            assert num_restarts(pod) == 0, pod["metadata"]["name"]
            for url in _probes(pod):
                assert (await client.get(url)).status_code == 200, url
    url = (await served.service())["status"]["url"]
    ask = f"import urllib.request as r; print(r.urlopen('{url}/models', timeout=30).status)"
    [gateway] = await served.pods(names.Role.GATEWAY)
    said = await served.kubectl("exec", gateway["metadata"]["name"], "--", "python", "-c", ask)
    assert said.strip() == "200"


def _probes(pod: Object) -> Iterator[str]:
    """URLs of the probes by HTTP, as kubelet asks them."""
    for container in pod["spec"]["containers"]:
        ports = {port.get("name"): port["containerPort"] for port in container.get("ports", [])}
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            if get := container.get(kind, {}).get("httpGet"):
                port = ports.get(get["port"], get["port"])
                yield f"http://{in_url(pod['status']['podIP'])}:{port}{get['path']}"


def _all_of_ours(cluster: ControlPlane) -> set[str]:
    """All objects, Events apart, with a name of ours."""
    kinds = cluster.kubectl("api-resources", "--verbs=list", "-o", "name").stdout.split()
    listed = ",".join(kind for kind in kinds if not kind.startswith("events"))
    shown = cluster.kubectl("get", listed, "-A", "-o", "name", "--ignore-not-found").stdout
    return {line for line in shown.split() if OURS.search(line)}
