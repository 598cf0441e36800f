"""Limits are the container's where it has any."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vlm_worker.model.cgroup import available_memory_bytes, memory_limit_bytes, num_cpus

ALL = len(os.sched_getaffinity(0))
MACHINE = 8 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A kernel that shows 8 MiB of memory, and a cgroup without limits."""
    for folder in ("proc/self", "sys/fs/cgroup/pods/a"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(
        f"MemTotal: 9999999 kB\nMemAvailable:   {MACHINE >> 10} kB\n"
    )
    (tmp_path / "proc/self/cgroup").write_text("0::/pods/a\n")
    return tmp_path


def limit(root: Path, **values: str) -> None:
    for name, value in values.items():
        (root / "sys/fs/cgroup/pods/a" / name.replace("_", ".")).write_text(value + "\n")


@pytest.mark.parametrize(
    ("quota", "want"),
    [
        pytest.param("max 100000", ALL, id="no limit"),
        pytest.param("50000 100000", 1, id="half a CPU"),
        pytest.param("100000000 100000", ALL, id="more than there are"),
    ],
)
def test_cpus_are_the_fewer_of_machine_and_quota(root: Path, quota: str, want: int) -> None:
    assert num_cpus(root) == ALL
    limit(root, cpu_max=quota)
    assert num_cpus(root) == want


def test_memory_is_the_less_of_machine_and_container(root: Path) -> None:
    assert available_memory_bytes(root) == MACHINE
    limit(root, memory_max="max", memory_current="77")
    assert available_memory_bytes(root) == MACHINE
    limit(root, memory_max="1000")
    assert available_memory_bytes(root) == 923
    limit(root, memory_current="2000")
    assert available_memory_bytes(root) == 0


def test_without_a_cgroup_the_machine_counts(root: Path) -> None:
    (root / "proc/self/cgroup").unlink()
    assert available_memory_bytes(root) == MACHINE
    assert num_cpus(root) == ALL


@pytest.mark.parametrize("namespaced", [False, True])
def test_limits_of_cgroup_version_1_count_too(root: Path, namespaced: bool) -> None:
    (root / "proc/self/cgroup").write_text("5:memory:/pods/b\n4:cpu,cpuacct:/pods/b\n0::/\n")
    for controller, values in {
        "memory": {"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "77"},
        "cpu": {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"},
    }.items():
        # inside a container, its own group is often mounted as the root
        folder = root / "sys/fs/cgroup" / controller / ("" if namespaced else "pods/b")
        folder.mkdir(parents=True)
        for name, value in values.items():
            (folder / name).write_text(value + "\n")
    assert available_memory_bytes(root) == 923
    assert num_cpus(root) == 1


def test_no_limit_of_cgroup_version_1_is_the_machine(root: Path) -> None:
    for controller, name, value in (
        ("memory", "memory.limit_in_bytes", "9223372036854771712"),
        ("cpu", "cpu.cfs_quota_us", "-1"),
    ):
        folder = root / "sys/fs/cgroup" / controller
        folder.mkdir()
        (folder / name).write_text(value + "\n")
    assert available_memory_bytes(root) == MACHINE
    assert num_cpus(root) == ALL


def test_this_machine_can_be_read() -> None:
    assert num_cpus() >= 1
    assert available_memory_bytes() > 0


def test_the_limit_is_the_containers_where_it_is_less_than_the_machine(root: Path) -> None:
    assert memory_limit_bytes(root) is None
    limit(root, memory_max="max", memory_current="77")
    assert memory_limit_bytes(root) is None
    limit(root, memory_max="1000")
    assert memory_limit_bytes(root) == 1000
    limit(root, memory_max=str(1 << 60))
    assert memory_limit_bytes(root) is None
