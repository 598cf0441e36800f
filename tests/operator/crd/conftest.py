"""The shared control plane with our CRDs, for every test that asks the API server itself."""

import pathlib

import pytest

from vlm_local.controlplane import ControlPlane

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(scope="session")
def api_server(control_plane: ControlPlane) -> ControlPlane:
    control_plane.kubectl("apply", "-f", str(ROOT / "crds"))
    control_plane.await_crds()
    return control_plane
