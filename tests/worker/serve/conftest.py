"""A hub on loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from worker.serve.downloads import serving
from worker.serve.hub import Hub


@pytest.fixture
async def hub() -> AsyncIterator[Hub]:
    hub = Hub()
    async with serving(hub.app) as hub.url:
        yield hub
        hub.resume.set()
