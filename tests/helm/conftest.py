"""Fixtures that run helm with the chart."""

import pathlib
import subprocess
from collections.abc import Callable

import pytest

from helm import binary  # tools/helm.py
from vlm_local.controlplane import ControlPlane

ROOT = pathlib.Path(__file__).parents[2]
CHART = ROOT / "helm" / "triptych"

Helm = Callable[..., subprocess.CompletedProcess[str]]


def helm_of(version: str) -> Helm:
    """Run helm of a major version."""

    def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [str(binary(version)), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=check)

    return run


@pytest.fixture(scope="session")
def helm() -> Helm:
    return helm_of("4")


@pytest.fixture(scope="session", params=["3", "4"], ids=lambda version: f"helm {version}")
def each_helm(request: pytest.FixtureRequest) -> Helm:
    """The oldest and the newest helm that the chart supports."""
    return helm_of(request.param)


@pytest.fixture(scope="session")
def chart() -> str:
    return str(CHART)


@pytest.fixture(scope="session")
def installed(control_plane: ControlPlane) -> ControlPlane:
    """The shared control plane with install.yaml applied; pods run if other tests added nodes."""
    control_plane.kubectl("apply", "-f", str(ROOT / "install.yaml"))
    return control_plane
