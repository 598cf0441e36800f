"""What tests of workers with identities share."""

from __future__ import annotations

import pytest
from worker.authority import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The CA of the service under test."""
    return Authority(tmp_path_factory.mktemp("certificates") / "own")
