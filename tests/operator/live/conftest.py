"""The operator as its own process, under the chart's ServiceAccount, on a real control plane."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
import yaml
from operator_live import Live

from vlm_operator.local.controlplane import ControlPlane

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(scope="module")
def live(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A running operator for the namespaces `live` and `live-gone`; it must end with status 0."""
    folder = tmp_path_factory.mktemp("operator")
    control_plane.kubectl("apply", "-f", str(ROOT / "install.yaml"))
    control_plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    for namespace in ("live", "live-gone"):
        control_plane.kubectl("create", "namespace", namespace)
    token = control_plane.kubectl(
        "-n", "triptych-system", "create", "token", "triptych-operator"
    ).stdout.strip()
    config = yaml.safe_load(control_plane.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    (folder / "kubeconfig").write_text(yaml.safe_dump(config))
    found = Live(control_plane, folder)
    found.start()
    yield found
    assert found.stop() == 0
    for namespace in ("live", "live-gone"):
        control_plane.kubectl(
            "delete", "namespace", namespace, "--ignore-not-found", "--wait=false"
        )
