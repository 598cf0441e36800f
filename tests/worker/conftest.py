"""What several parts of the worker are tested with."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from worker.transfer.fetching import nothing_left


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory in memory, as an emptyDir that the containers of a pod mount."""
    path = Path("/dev/shm") / f"triptych-test-{secrets.token_hex(8)}"
    path.mkdir(mode=0o700)
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


@pytest.fixture
async def clean() -> AsyncIterator[None]:
    """What a test of connections runs and opens has ended with it."""
    async with nothing_left():
        yield
