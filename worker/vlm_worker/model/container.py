"""What the container leaves to this process: memory and CPUs, by cgroup version 2 or 1.

    proc/self/cgroup    0::/pods/a          sys/fs/cgroup/pods/a/memory.max
                        4:memory:/pods/a    sys/fs/cgroup/memory/pods/a/memory.limit_in_bytes

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
    limit, used = _read(root, "memory.max"), _read(root, "memory.current")
    if not limit:
        limit = _read(root, "memory.limit_in_bytes", controller="memory")
        used = _read(root, "memory.usage_in_bytes", controller="memory")
    if not limit.isdigit():
        return machine
    return max(0, min(machine, int(limit) - int(used or 0)))


def num_cpus(root: Path = ROOT) -> int:
    """CPUs that this process may keep busy, at least 1."""
    allowed = len(os.sched_getaffinity(0))
    quota, _, period = _read(root, "cpu.max").partition(" ")
    if not quota:
        quota = _read(root, "cpu.cfs_quota_us", controller="cpu")  # -1 is no limit
        period = _read(root, "cpu.cfs_period_us", controller="cpu")
    if not (quota.isdigit() and period.isdigit()):
        return allowed
    return max(1, min(allowed, math.ceil(int(quota) / int(period))))


def _read(root: Path, name: str, *, controller: str = "") -> str:
    """A value of this process's cgroup, empty where there is none.

    With a controller, of its hierarchy of version 1; a container may see it as if it were the root.
    """
    folder = root / "sys/fs/cgroup" / controller
    for place in (folder / _group(root, controller), folder):
        try:
            return (place / name).read_text().strip()
        except OSError:
            continue
    return ""


def _group(root: Path, controller: str) -> str:
    """This process's group, as `/proc/self/cgroup` has it: lines of number:controllers:path."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    return ""
