"""What a user types: kubectl apply, explain, get, scale, on a real API server."""

import json
import pathlib
from collections.abc import Iterator

import pytest
import yaml

from vlm_local.controlplane import ControlPlane
from vlm_operator import api, names

pytestmark = pytest.mark.cluster

HERE = pathlib.Path(__file__).parent
NAMESPACE = "kubectl-words"
STATUS = "/apis/triptych.dev/v1alpha1/namespaces/{}/vlmservices/maximal/status"


@pytest.fixture(scope="module")
def words(api_server: ControlPlane) -> Iterator[ControlPlane]:
    api_server.kubectl("create", "namespace", NAMESPACE)
    yield api_server
    api_server.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture(scope="module")
def maximal(words: ControlPlane) -> ControlPlane:
    words.kubectl("-n", NAMESPACE, "apply", "-f", str(HERE / "maximal.yaml"))
    return words


def test_a_maximal_manifest_is_read_as_it_was_written(maximal: ControlPlane) -> None:
    written = yaml.safe_load((HERE / "maximal.yaml").read_text())
    stored = json.loads(
        maximal.kubectl("-n", NAMESPACE, "get", "vlm", "maximal", "-o", "json").stdout
    )
    assert stored["spec"] == written["spec"]
    service = api.parse(stored)
    assert (
        service.spec.to_dict()["pools"]["prefill"]["kv"]
        == written["spec"]["pools"]["prefill"]["kv"]
    )


def test_applying_client_side_twice_changes_nothing(maximal: ControlPlane) -> None:
    again = maximal.kubectl("-n", NAMESPACE, "apply", "-f", str(HERE / "maximal.yaml")).stdout
    assert again.strip() == "vlmservice.triptych.dev/maximal unchanged"


def test_a_misspelt_field_is_refused_with_its_path(words: ControlPlane) -> None:
    manifest = yaml.safe_load((HERE / "maximal.yaml").read_text())
    manifest["spec"]["pools"]["decode"]["scalin"] = {}
    answer = words.kubectl(
        "-n", NAMESPACE, "apply", "-f", "-", stdin=yaml.safe_dump(manifest), check=False
    )
    assert answer.returncode != 0
    assert 'unknown field "spec.pools.decode.scalin"' in answer.stderr


def test_explain_says_default_and_example(api_server: ControlPlane) -> None:
    text = api_server.kubectl("explain", "vlm.spec.pools.decode.drain.timeoutSeconds").stdout
    assert "Seconds that a pod has to finish its requests." in text
    assert "Default: 600. E.g. 120." in text


async def test_get_prints_the_columns_of_the_summary(maximal: ControlPlane) -> None:
    status = {
        "url": "http://maximal-gateway.kubectl-words.svc",
        "conditions": [
            {
                "type": "Ready",
                "status": "False",
                "reason": "Loading",
                "message": "decode 1/2",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
        ],
        "summary": {
            "encoder": "2/2",
            "prefill": "1/1",
            "decode": "1/2",
            "ttftP95": "820ms",
            "kvOccupancyPercent": "35",
            "dominantStage": "prefill_queue",
            "costPerHour": "3.40",
        },
    }
    async with maximal.client() as client:
        await client.patch(STATUS.format(NAMESPACE), {"status": status})
    narrow = maximal.kubectl("-n", NAMESPACE, "get", "vlm").stdout.splitlines()
    assert narrow[0].split() == [
        "NAME", "READY", "MODEL", "ENC", "PRE", "DEC", "TTFT-P95", "KV%", "URL", "AGE",
    ]  # fmt: skip
    assert narrow[1].split()[:-1] == [
        "maximal", "False", "hf://org/name", "2/2", "1/1", "1/2", "820ms", "35", status["url"],
    ]  # fmt: skip
    wide = maximal.kubectl("-n", NAMESPACE, "get", "vlm", "-o", "wide").stdout.splitlines()
    assert wide[0].split()[-3:] == ["STAGE", "COST/H", "REASON"]
    assert wide[1].split()[-3:] == ["prefill_queue", "3.40", "Loading"]


def test_a_pool_scales_by_kubectl(words: ControlPlane) -> None:
    pool = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND_POOL,
        "metadata": {"name": "demo-decode", "namespace": NAMESPACE},
        "spec": {"replicas": 1},
    }
    words.kubectl("apply", "-f", "-", stdin=json.dumps(pool))
    words.kubectl("-n", NAMESPACE, "scale", "vlmp/demo-decode", "--replicas=3")
    header, line = words.kubectl("-n", NAMESPACE, "get", "vlmp").stdout.splitlines()
    assert header.split() == ["NAME", "ROLE", "DESIRED", "CURRENT", "READY", "MODE", "AGE"]
    assert line.split()[:2] == ["demo-decode", "3"]


def test_a_pool_without_a_number_is_refused(words: ControlPlane) -> None:
    pool = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND_POOL,
        "metadata": {"name": "empty", "namespace": NAMESPACE},
        "spec": {"role": "decode"},
    }
    answer = words.kubectl("apply", "-f", "-", stdin=json.dumps(pool), check=False)
    assert "spec.replicas: Required value" in answer.stderr


def test_a_node_class_is_stored_as_written(api_server: ControlPlane) -> None:
    written = {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND_NODE_CLASS,
        "metadata": {"name": "l40s"},
        "spec": {
            "nodeSelector": {"triptych.dev/node-type": "gpu-memory"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
            "accelerator": {"resourceName": "nvidia.com/gpu", "count": 1, "memory": "48Gi"},
            "cost": {"perHour": "1.20", "spotPerHour": "0.45"},
            "spot": True,
            "expectedStartupSeconds": 240,
            "roles": ["encoder", "decode"],
            "speed": [{"role": "encoder", "relativePercent": 180}],
        },
    }
    api_server.kubectl("apply", "-f", "-", stdin=json.dumps(written))
    stored = json.loads(api_server.kubectl("get", "vlmnc", "l40s", "-o", "json").stdout)
    assert stored["spec"] == written["spec"]
    api_server.kubectl("delete", "vlmnc", "l40s")


def test_the_kinds_stand_in_the_category_inference(api_server: ControlPlane) -> None:
    listed = api_server.kubectl("api-resources", "--categories=inference", "-o", "name").stdout
    assert set(listed.split()) == {
        f"{plural}.{names.GROUP}"
        for plural in (names.PLURAL_SERVICE, names.PLURAL_POOL, names.PLURAL_NODE_CLASS)
    }
