"""One real control plane with our CRDs, for every test that asks the API server itself."""

import asyncio
import pathlib
from collections.abc import Iterator

import pytest

from vlm_operator.local.controlplane import ControlPlane

ROOT = pathlib.Path(__file__).parents[3]


@pytest.fixture(scope="session")
def api_server() -> Iterator[ControlPlane]:
    cluster = ControlPlane()
    asyncio.run(cluster.start())
    try:
        cluster.kubectl("apply", "-f", str(ROOT / "crds"))
        cluster.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        yield cluster
    finally:
        cluster.stop()
