"""Memory and CPUs that the container allows this process, from cgroup version 2 or 1.

    proc/self/cgroup    0::/pods/a          sys/fs/cgroup/pods/a/memory.max
                        4:memory:/pods/a    sys/fs/cgroup/memory/pods/a/memory.limit_in_bytes

`root` is the directory that contains `proc` and `sys`; tests pass another one than `/`.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

ROOT = Path("/")


def available_memory_bytes(root: Path = ROOT) -> int:
    """Bytes of available host memory: the lesser of the machine's and the container's."""
    machine = _machine(root, "MemAvailable")
    limit, used = _limit_and_used(root)
    return machine if limit is None else max(0, min(machine, limit - used))


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """The container's memory limit in bytes; None if it has none below the machine's memory."""
    limit, _ = _limit_and_used(root)
    return None if limit is None or limit >= _machine(root, "MemTotal") else limit


def num_cpus(root: Path = ROOT) -> int:
    """CPUs that affinity and CPU quota allow, rounded up, at least 1."""
    allowed = len(os.sched_getaffinity(0))
    quota, _, period = _read(root, "cpu.max").partition(" ")
    if not quota:
        quota = _read(root, "cpu.cfs_quota_us", controller="cpu")  # -1 is no limit
        period = _read(root, "cpu.cfs_period_us", controller="cpu")
    if not (quota.isdigit() and period.isdigit()):
        return allowed
    return max(1, min(allowed, math.ceil(int(quota) / int(period))))


def _machine(root: Path, field: str) -> int:
    """Read a field of /proc/meminfo, in bytes."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields[field].split()[0]) * 1024


def _limit_and_used(root: Path) -> tuple[int | None, int]:
    """Memory limit and usage of this process's cgroup in bytes; the limit is None if unlimited."""
    limit, used = _read(root, "memory.max"), _read(root, "memory.current")
    if not limit:
        limit = _read(root, "memory.limit_in_bytes", controller="memory")
        used = _read(root, "memory.usage_in_bytes", controller="memory")
    return (int(limit), int(used or 0)) if limit.isdigit() else (None, 0)


def _read(root: Path, name: str, *, controller: str = "") -> str:
    """Read a value of this process's cgroup; empty if there is none.

    A `controller` selects its hierarchy of version 1. If a container sees its own cgroup as the
    root of the hierarchy, the value is there.
    """
    folder = root / "sys/fs/cgroup" / controller
    for place in (folder / _group(root, controller), folder):
        try:
            return (place / name).read_text().strip()
        except OSError:
            continue
    return ""


def _group(root: Path, controller: str) -> str:
    """The path of this process's cgroup, from lines `number:controllers:path`."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    return ""
