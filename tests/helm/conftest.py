"""Fixtures that run helm with the chart."""

import pathlib
import subprocess
import sys
from collections.abc import Callable

import pytest

from vlm_local.controlplane import ControlPlane

ROOT = pathlib.Path(__file__).parents[2]
CHART = ROOT / "helm" / "triptych"

Helm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def helm() -> Helm:
    def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "tools" / "helm.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=check)

    return run


@pytest.fixture(scope="session")
def chart() -> str:
    return str(CHART)


@pytest.fixture(scope="session")
def installed(control_plane: ControlPlane) -> ControlPlane:
    """The shared control plane with install.yaml applied; pods run if other tests added nodes."""
    control_plane.kubectl("apply", "-f", str(ROOT / "install.yaml"))
    return control_plane
