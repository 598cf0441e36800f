"""What the container leaves to this process: memory and CPUs, by cgroup version 2.

`root` stands for `/`, where the kernel shows its files.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

ROOT = Path("/")


def available_memory_bytes(root: Path = ROOT) -> int:
    """Host memory left: the machine's, or the container's where that is less."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    machine = int(fields["MemAvailable"].split()[0]) * 1024
    limit = _read(root, "memory.max")
    if not limit.isdigit():
        return machine
    used = _read(root, "memory.current")
    return max(0, min(machine, int(limit) - int(used or 0)))


def num_cpus(root: Path = ROOT) -> int:
    """CPUs that this process may keep busy, at least 1."""
    allowed = len(os.sched_getaffinity(0))
    quota, _, period = _read(root, "cpu.max").partition(" ")
    if not (quota.isdigit() and period.isdigit()):
        return allowed
    return max(1, min(allowed, math.ceil(int(quota) / int(period))))


def _read(root: Path, name: str) -> str:
    """A value of this process's cgroup, empty where there is none."""
    try:
        line = (root / "proc/self/cgroup").read_text().splitlines()[-1]
        group = line.split("::", 1)[1].lstrip("/")
        return (root / "sys/fs/cgroup" / group / name).read_text().strip()
    except (OSError, IndexError):
        return ""
