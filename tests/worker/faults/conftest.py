"""One service of real processes for all fault tests at a tenth of the timers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from worker.faults.figures import MATRIX, NOTES
from worker.faults.harness import Cluster, cluster


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def service() -> AsyncIterator[Cluster]:
    async with cluster(scale=0.1) as served:
        yield served


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The figures of the faults."""
    lines = [*NOTES, *MATRIX.lines()]
    if lines:
        terminalreporter.section("faults")
    for line in lines:
        terminalreporter.write_line(line)
