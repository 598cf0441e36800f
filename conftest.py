"""Fixtures that need a cluster, for tests/ and e2e/ alike; and the profile of property tests.

control_plane   a real API server with its controllers and scheduler; no nodes
cluster         the same with nodes of the demo's three types, which run pods as processes
namespace       a fresh one, gone at the end of the test, pods included
"""

import asyncio
import collections
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from vlm_local.agent.container import Backoff
from vlm_local.cluster import NodeAgent
from vlm_local.controlplane import ControlPlane
from vlm_local.waiting import until

# how long an example takes says more about the machine than about the code
hypothesis.settings.register_profile("here", deadline=None)
hypothesis.settings.load_profile("here")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests of this suite were skipped, by reason: what this machine did not show."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = collections.Counter(report.longrepr[2] for report in reports)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped: {count} ({reason.removeprefix('Skipped: ')})")


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A control plane for the whole session; tests keep apart by namespaces of their own."""
    plane = ControlPlane(progress=print)
    asyncio.run(plane.start())
    folder = plane.folder
    yield plane
    plane.stop()
    assert not folder.exists()
    assert _processes_of(folder) == []


@pytest.fixture(scope="session")
def cluster(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """The same control plane, with nodes. Restarts back off by tenths of seconds, not by tens."""
    agent = NodeAgent(control_plane, backoff=Backoff(first_seconds=0.2, longest_seconds=1))
    asyncio.run(agent.start())
    yield control_plane
    agent.stop()
    assert _processes_of(control_plane.folder / "pods") == []


@pytest.fixture
async def namespace(cluster: ControlPlane) -> AsyncIterator[str]:
    """A namespace of the test's own; its pods have ended when the test has."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    pods = f"/api/v1/namespaces/{name}/pods"
    async with cluster.client() as api:
        await api.create("/api/v1/namespaces", {"metadata": {"name": name}})
        yield name
        await api.delete(f"/api/v1/namespaces/{name}")  # from here on nothing new is admitted
        await api.delete(pods, {"gracePeriodSeconds": 0})

        async def empty() -> bool:
            return not (await api.get(pods))["items"]

        await until(empty, seconds=30, awaited=f"the pods of namespace {name} to end")


@pytest.fixture
def processes_of() -> Callable[[Path], list[str]]:
    """Return the function that finds processes by a folder in their command lines."""
    return _processes_of


def _processes_of(folder: Path) -> list[str]:
    """The command lines, zombies apart, that mention `folder`."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in line:
                found.append(line)
    return found
