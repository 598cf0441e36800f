"""`vlm doctor` against a real API server: its reads, its rights and its findings."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import typer
import yaml

from support.live import install
from support.world import body, pool
from vlm_cli.doctor.command import doctor
from vlm_cli.output import Format
from vlm_local.controlplane import ControlPlane

pytestmark = pytest.mark.cluster

SPACE = "doctor"


@pytest.fixture(scope="module")
def plane(
    control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    """Installed, with a service that lacks nodes, a claim and an operator that leads."""
    kubectl = control_plane.kubectl
    install(control_plane, tmp_path_factory.mktemp("doctor"))
    kubectl("-n", "triptych-system", "delete", "lease", "triptych-operator", "--ignore-not-found")
    kubectl("create", "namespace", SPACE)
    kubectl("-n", SPACE, "create", "serviceaccount", "reader")
    kubectl("-n", SPACE, "create", "rolebinding", "reader", "--clusterrole=view",
            f"--serviceaccount={SPACE}:reader")  # fmt: skip
    manifest = body(name="sick", decode=pool())
    manifest["metadata"] = {"name": "sick", "namespace": SPACE}
    kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
    yield control_plane
    kubectl("delete", "namespace", SPACE, "--wait=false")


async def examined(
    kubeconfig: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[dict[str, Any]]]:
    """The exit status, and the findings as `-o json` prints them."""
    status = 0
    try:
        await doctor(SPACE, probe=True, output=Format.JSON, kubeconfig=str(kubeconfig))
    except typer.Exit as ended:
        status = ended.exit_code
    return status, json.loads(capsys.readouterr().out)


def of(found: list[dict[str, Any]], check: str) -> list[tuple[str, str]]:
    return [(item["level"], item["message"]) for item in found if item["check"] == check]


async def test_it_finds_what_is_there_and_what_is_missing(
    plane: ControlPlane, capsys: pytest.CaptureFixture[str]
):
    status, found = await examined(plane.kubeconfig, capsys)
    assert status == 1
    assert {level for level, _ in of(found, "crds")} == {"ok"}, found
    assert [level for level, _ in of(found, "rights")] == ["ok"]
    ((level, rights),) = of(found, "operator-rights")
    assert (level, "triptych-system/triptych-operator has the" in rights) == ("ok", True)
    ((level, role),) = of(found, "gateway")  # no operator runs that would make it
    assert (level, "is missing" in role) == ("fail", True)
    assert ("fail", "PersistentVolumeClaim doctor/shapes does not exist") in of(found, "claims")
    assert "fail" in {level for level, _ in of(found, "services")}
    assert [level for level, _ in of(found, "metrics")] == ["warn"]
    ((level, lease),) = of(found, "lease")
    assert (level, lease) == (
        "fail",
        "Lease triptych-system/triptych-operator is missing: no operator leads",
    )
    assert of(found, "access") == []


async def test_who_may_only_look_is_told_what_was_not_judged(
    plane: ControlPlane, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
):
    token = plane.kubectl("-n", SPACE, "create", "token", "reader").stdout.strip()
    config = yaml.safe_load(plane.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    _, found = await examined(tmp_path / "kubeconfig", capsys)
    unread = [message.split()[0] for _, message in of(found, "access")]
    assert {"nodes", "customresourcedefinitions", "deployments", "leases"} <= set(unread)
    assert of(found, "operator-rights")[0][0] == "warn"
    assert (
        "warn",
        "you may not create pods/portforward, which vlm chat, vlm bench, vlm top needs",
    ) in of(found, "rights")
    assert of(found, "crds") == of(found, "nodes") == []
    assert "fail" in {level for level, _ in of(found, "claims")}
