"""One cluster and one namespace, as the tests of local nodes ask for them."""

from collections.abc import AsyncIterator

import pytest

from vlm_local.client import Client
from vlm_local.controlplane import ControlPlane

from .pods import Pods


@pytest.fixture
async def api(cluster: ControlPlane) -> AsyncIterator[Client]:
    async with cluster.client() as client:
        yield client


@pytest.fixture
def pods(api: Client, namespace: str) -> Pods:
    return Pods(api, namespace)
