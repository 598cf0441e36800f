"""A directory in memory, as a pod's emptyDir is."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory in memory, as a pod's emptyDir is."""
    path = Path("/dev/shm") / f"triptych-test-{secrets.token_hex(8)}"
    path.mkdir(mode=0o700)
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
