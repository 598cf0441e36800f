"""No cgroup remains, not even of an agent that was killed."""

import os
from pathlib import Path

import pytest

from vlm_local.agent.cgroups import Cgroups

NOBODY = 2**22 + 1  # above the largest pid that Linux gives


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    """As cgroups of version 1 are mounted. Plain folders, too, go only when they are empty."""
    for controller in ("memory", "cpu"):
        (tmp_path / controller).mkdir()
    return tmp_path


def left(mount: Path) -> list[str]:
    return sorted(str(found.relative_to(mount)) for found in mount.glob("*/**/*"))


def test_an_agent_removes_its_own_at_its_end(mount: Path):
    cgroups = Cgroups(mount)
    assert cgroups.problem is None
    assert len(cgroups.create("ended", memory_bytes=None, cpus=None).procs) == 2
    cgroups.create("removed", memory_bytes=None, cpus=None).remove()
    assert left(mount) == [
        f"{controller}/triptych-{os.getpid()}{name}"
        for controller in ("cpu", "memory")
        for name in ("", "/ended")
    ]
    cgroups.close()
    assert left(mount) == []


def test_the_next_agent_removes_what_a_killed_one_left_and_nothing_that_is_in_use(mount: Path):
    (mount / "cpu" / f"triptych-{NOBODY}" / "container").mkdir(parents=True)
    (mount / "memory" / f"triptych-{NOBODY}" / "container").mkdir(parents=True)
    in_use = mount / "memory" / f"triptych-{NOBODY}" / "container" / "process"
    in_use.touch()
    of_another = mount / "cpu" / f"triptych-{os.getppid()}" / "container"
    of_another.mkdir(parents=True)
    of_somebody = mount / "cpu" / "somebody"
    of_somebody.mkdir()
    beside = mount / "session" / f"triptych-{NOBODY}" / "container"
    beside.mkdir(parents=True)
    Cgroups(mount).close()
    assert in_use.exists()
    assert of_another.exists()
    assert of_somebody.exists()
    assert not (mount / "cpu" / f"triptych-{NOBODY}").exists()
    assert list((mount / "session").iterdir()) == []


def test_a_cpu_limit_that_cannot_be_set_is_logged(mount: Path, caplog: pytest.LogCaptureFixture):
    """It is set by the first passed readiness probe, and must not end the probing."""
    container = Cgroups(mount).create("gone", memory_bytes=None, cpus=1.0)
    container.remove()
    container.limit_cpu()
    assert "a CPU limit is not enforced" in caplog.text
