"""Fixtures that need a cluster, for tests/ and e2e/ alike.

control_plane   a real API server with its controllers and scheduler; no nodes
"""

import asyncio
from collections.abc import Iterator

import pytest

from vlm_operator.local.controlplane import ControlPlane


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A control plane for the whole session; tests keep apart by namespaces of their own."""
    cluster = ControlPlane(progress=print)
    asyncio.run(cluster.start())
    yield cluster
    cluster.stop()
    assert not cluster.folder.exists()
