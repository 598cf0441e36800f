"""Transports, and a thread to make frames in."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from worker.transfer.rows import Make, shared

from vlm_kernels.cpu import native
from vlm_worker.transfer.transport import ByteStream


@pytest.fixture(params=["stream", "shared-memory", "mapped"])
def make(request: pytest.FixtureRequest, directory: Path) -> Make:
    makers: dict[str, Make] = {
        "stream": ByteStream,
        "shared-memory": lambda: shared(directory),
        "mapped": lambda: shared(directory, native_library=native.path()),
    }
    return makers[request.param]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool
