"""`vlm bundle` collects a service for a bug report; canary secrets never get into the archive."""

from __future__ import annotations

import json
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from vlm_cli.bundle.collect import Bundle
from vlm_cli.bundle.command import archive, bundle
from vlm_cli.output import CliError

NAMESPACE = "/api/v1/namespaces/vision"
LABELS = {"triptych.dev/service": "demo", "app.kubernetes.io/name": "triptych"}
CREATED = "2026-11-21T10:00:00Z"


class Canaries:
    """Secrets that are too short to be removed by their length alone."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def new(self) -> str:
        self.given.append(f"cAnary{len(self.given):02d}xQz7wLpRt")
        return self.given[-1]


def named(name: str, *, namespace: str = "vision", **labels: str) -> dict[str, Any]:
    return {
        "name": name, "namespace": namespace, "uid": name, "creationTimestamp": CREATED,
        "labels": {**LABELS, **labels},
    }  # fmt: skip


def pod(name: str, canaries: Canaries, *, role: str, restarts: int = 0) -> dict[str, Any]:
    env = [
        {"name": "HF_TOKEN", "value": canaries.new()},
        {"name": "HARMLESS", "value": canaries.new()},
        {"name": "SHOWN", "value": "4"},
    ]
    last = {"terminated": {"exitCode": 1, "message": f"Authorization: Bearer {canaries.new()}"}}
    status = {
        "name": "worker", "restartCount": restarts, "lastState": last,
        "image": "triptych/worker:1", "imageID": "triptych/worker@sha256:" + "ab" * 32,
    }  # fmt: skip
    return {
        "metadata": named(name, **{"triptych.dev/role": role}),
        "spec": {
            "containers": [{"name": "worker", "env": env, "args": [f"--api-key={canaries.new()}"]}]
        },
        "status": {
            "phase": "Running",
            "containerStatuses": [status],
            "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": CREATED}],
        },
    }


def log_lines(canaries: Canaries) -> list[str]:
    """What a careless process could write."""
    texts = [
        "plain start",
        f"GET /v1 Authorization: Bearer {canaries.new()}",
        f"image data:image/png;base64,{canaries.new()}",
        json.dumps({"level": "info", "message": "request", "prompt": f"a {canaries.new()}"}),
        json.dumps({"level": "error", "message": f"bad {{'content': 'the {canaries.new()}'}}"}),
        json.dumps({"level": "info", "message": "config", "api_key": canaries.new()}),
        f"https://user:{canaries.new()}@registry.example/x",
    ]
    return [f"2026-11-21T10:00:0{number}.5Z {text}" for number, text in enumerate(texts)]


@pytest.fixture
async def world(api: Any, add_service: Any) -> AsyncIterator[Canaries]:
    """A service with all of its objects, each with canaries; its decode pod does not answer."""
    canaries = Canaries()
    copy = "kubectl.kubernetes.io/last-applied-configuration"
    service = add_service()
    service["metadata"]["annotations"] = {copy: json.dumps({"x": canaries.new()})}
    service["spec"]["pools"] = {
        "decode": {"engine": {"env": [{"name": "A_KEY", "value": canaries.new()}]}}
    }
    secret = {"metadata": named("keys"), "data": {"team-a": canaries.new()}}
    api.add(f"{NAMESPACE}/secrets", secret)
    for name, role, restarts in (("demo-decode-0", "decode", 1), ("demo-gateway-0", "gateway", 0)):
        api.add(f"{NAMESPACE}/pods", pod(name, canaries, role=role, restarts=restarts))
        api.logs[f"{name}/worker"] = log_lines(canaries)
    api.logs["demo-decode-0/worker/previous"] = log_lines(canaries)
    template = {"template": {"spec": pod("x", canaries, role="decode")["spec"]}}
    for path, name in (("deployments", "demo-decode"), ("replicasets", "demo-decode-1")):
        item = {"metadata": named(name), "spec": template}
        api.add(f"/apis/apps/v1/namespaces/vision/{path}", item)
    api.add(
        f"{NAMESPACE}/configmaps",
        {
            "metadata": named("demo-gateway"),
            "data": {
                "gateway.json": json.dumps({"token": canaries.new()}),
                "notes": f"password={canaries.new()}",
            },
        },
    )
    api.add(
        "/apis/triptych.dev/v1alpha1/namespaces/vision/vlmpools",
        {"metadata": named("demo-decode"), "spec": {"replicas": 1}},
    )
    for path in (
        f"{NAMESPACE}/services",
        "/apis/networking.k8s.io/v1/namespaces/vision/networkpolicies",
        "/apis/policy/v1/namespaces/vision/poddisruptionbudgets",
        "/apis/batch/v1/namespaces/vision/jobs",
        f"{NAMESPACE}/persistentvolumeclaims",
    ):
        api.add(path, {"metadata": named("demo-decode"), "spec": {}})
    api.add(
        "/apis/triptych.dev/v1alpha1/vlmnodeclasses", {"metadata": {"name": "fast"}, "spec": {}}
    )
    for number, involved in enumerate(("demo-decode-0", "another")):
        event = {
            "metadata": named(f"e{number}"),
            "involvedObject": {"name": involved},
            "message": f"pull https://u:{canaries.new()}@registry.example failed",
        }
        api.add(f"{NAMESPACE}/events", event)
    of_operator = {"app.kubernetes.io/name": "triptych-operator"}
    spec = pod("x", canaries, role="decode")["spec"]
    api.add(
        "/apis/apps/v1/deployments",
        {
            "metadata": named("triptych-operator", namespace="triptych-system", **of_operator),
            "spec": {"template": {"spec": spec}},
        },
    )
    operator = pod("triptych-operator-0", canaries, role="")
    operator["metadata"] = named("triptych-operator-0", namespace="triptych-system", **of_operator)
    api.add("/api/v1/namespaces/triptych-system/pods", operator)
    api.logs["triptych-operator-0/worker"] = log_lines(canaries)

    async def stats(request: web.Request) -> web.Response:
        value = {
            "message": f"Authorization: Bearer {canaries.new()}",
            "ttft": {"text": {"count": 3}},
        }
        return web.json_response(value)

    async def metrics(request: web.Request) -> web.Response:
        return web.Response(
            text=f'triptych_requests_total{{url="http://u:{canaries.new()}@h"}} 3\n'
        )

    app = web.Application()
    app.router.add_get("/stats", stats)
    app.router.add_get("/metrics", metrics)
    server = TestServer(app)
    await server.start_server()
    api.target_ports = {"demo-gateway-0": int(server.port or 0), "demo-decode-0": 1}
    yield canaries
    await server.close()


def unpacked(path: Path) -> dict[str, str]:
    """The files of an archive by path, in its order."""
    with tarfile.open(path) as tar:
        return {
            entry.name.partition("/")[2]: tar.extractfile(entry).read().decode()  # type: ignore[union-attr]
            for entry in tar
        }


async def test_no_canary_is_in_the_archive_and_no_secret_is_read(
    api: Any, world: Canaries, kubeconfig: str, tmp_path: Path
) -> None:
    path = tmp_path / "b.tar.gz"
    await bundle("demo", output=path, kubeconfig=kubeconfig)
    files = unpacked(path)
    leaked = [(one, name) for one in world.given for name, text in files.items() if one in text]
    assert len(world.given) > 40
    assert leaked == []
    # all but the Secret and the Event of another object were read
    assert sum(text.count("REDACTED") for text in files.values()) >= len(world.given) - 2
    assert not [one for one in api.paths if "secret" in one]
    assert path.stat().st_mode & 0o077 == 0


async def test_the_archive_has_what_a_report_needs(
    api: Any, world: Canaries, kubeconfig: str, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "b.tar.gz"
    await bundle("demo", output=path, lines=5, kubeconfig=kubeconfig)
    files = unpacked(path)
    assert list(files) == sorted(files)
    assert set(files) == {
        "configmaps/demo-gateway.yaml",
        "deployments/demo-decode.yaml",
        "doctor.txt",
        "events.yaml",
        "jobs/demo-decode.yaml",
        "logs/demo-decode-0/worker.log",
        "logs/demo-decode-0/worker.previous.log",
        "logs/demo-gateway-0/worker.log",
        "manifest.txt",
        "metrics/demo-gateway-0.txt",
        "networkpolicies/demo-decode.yaml",
        "operator/deployments/triptych-operator.yaml",
        "operator/logs/triptych-operator-0/worker.log",
        "operator/pods/triptych-operator-0.yaml",
        "persistentvolumeclaims/demo-decode.yaml",
        "poddisruptionbudgets/demo-decode.yaml",
        "pods/demo-decode-0.yaml",
        "pods/demo-gateway-0.yaml",
        "replicasets/demo-decode-1.yaml",
        "service.yaml",
        "services/demo-decode.yaml",
        "stats/demo-gateway-0.json",
        "versions.txt",
        "vlmnodeclasses/fast.yaml",
        "vlmpools/demo-decode.yaml",
        "why.txt",
    }
    assert yaml.safe_load(files["service.yaml"])["status"]["conditions"][0]["reason"] == "AllReady"
    assert "plain start" in files["logs/demo-decode-0/worker.previous.log"]
    assert [event["involvedObject"]["name"] for event in yaml.safe_load(files["events.yaml"])] == [
        "demo-decode-0"
    ]
    assert json.loads(files["stats/demo-gateway-0.json"])["ttft"] == {"text": {"count": 3}}
    env = yaml.safe_load(files["pods/demo-decode-0.yaml"])["spec"]["containers"][0]["env"]
    assert [item["value"] for item in env] == ["REDACTED", "REDACTED", "4"]
    assert "v1.34.2" in files["versions.txt"]
    assert "sha256:" + "ab" * 32 in files["versions.txt"]
    assert "API server answers" in files["doctor.txt"]
    assert files["why.txt"].startswith("vision/demo")
    assert {query["tailLines"] for query in api.log_queries} == {"5"}


async def test_the_manifest_lists_files_and_failures(
    api: Any, world: Canaries, kubeconfig: str, tmp_path: Path, capsys: Any
) -> None:
    path = tmp_path / "b.tar.gz"
    del api.objects["/apis/policy/v1/namespaces/vision/poddisruptionbudgets"]
    del api.logs["demo-gateway-0/worker"]
    await bundle("demo", output=path, kubeconfig=kubeconfig)
    files = unpacked(path)
    listed, _, failed = files["manifest.txt"].partition("not collected: ")
    assert [line.split()[1] for line in listed.splitlines() if line.startswith("   ")] == [
        name for name in files if name != "manifest.txt"
    ]
    assert [line.partition(":")[0] for line in failed.splitlines()[1:]] == [
        "logs/demo-gateway-0/worker.log",
        "metrics/demo-decode-0.txt",
        "poddisruptionbudgets",
        "stats/demo-decode-0.json",
    ]
    assert capsys.readouterr().out.endswith("files, 4 not collected: see manifest.txt\n")


async def test_an_unknown_service_gets_no_archive(kubeconfig: str, tmp_path: Path) -> None:
    with pytest.raises(CliError):
        await bundle("demo", output=tmp_path / "b.tar.gz", kubeconfig=kubeconfig)
    assert not (tmp_path / "b.tar.gz").exists()


async def test_a_file_that_cannot_be_written_is_named(
    world: Canaries, kubeconfig: str, tmp_path: Path
) -> None:
    with pytest.raises(CliError) as refused:
        await bundle("demo", output=tmp_path / "no" / "b.tar.gz", kubeconfig=kubeconfig)
    assert "cannot be written" in refused.value.problem


def test_equal_files_give_equal_bytes() -> None:
    first = Bundle({"b": "1", "a": "2"}, {"y": "no", "x": "no"})
    second = Bundle({"a": "2", "b": "1"}, {"x": "no", "y": "no"})
    packed = [archive(one, folder="f", title="t") for one in (first, second)]
    assert packed[0] == packed[1]
