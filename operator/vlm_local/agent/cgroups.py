"""CPU and memory limits of containers by cgroup, version 1 or 2, if this process may make cgroups.

<own cgroup>/triptych-<agent pid>/<container>/{memory.max, cpu.max, cgroup.procs}

An agent that starts removes the cgroups of agents that were killed.
"""

import contextlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)
PERIOD_MICROSECONDS = 100_000
_PREFIX = "triptych-"
_V1 = {"memory": "memory.limit_in_bytes", "cpu": "cpu.cfs_quota_us"}
_V2 = {"memory": "memory.max", "cpu": "cpu.max"}


class Cgroups:
    """The cgroups of one agent; `problem` is why there are none, or None."""

    def __init__(self, mount: Path = Path("/sys/fs/cgroup")) -> None:
        self.problem: str | None = None
        self._name = f"{_PREFIX}{os.getpid()}"
        self._parents: dict[str, Path] = {}
        self._unified = (mount / "cgroup.controllers").exists()
        try:
            own = _own_cgroups()
            if self._unified:
                self._parents = dict.fromkeys(_V2, _make_v2(mount, self._name))
            else:
                for controller in _V1:
                    top = _existing(mount / controller, own.get(controller, "/"))
                    _sweep(top)
                    parent = top / self._name
                    parent.mkdir(exist_ok=True)
                    self._parents[controller] = parent
        except OSError as error:
            self._parents = {}
            self.problem = f"CPU and memory limits are not enforced: {error}"

    def create(
        self, name: str, *, memory_bytes: int | None, cpus: float | None
    ) -> "ContainerCgroup":
        """Create the cgroup of one container; it limits CPU only after `limit_cpu`."""
        folders = {controller: parent / name for controller, parent in self._parents.items()}
        for folder in folders.values():
            folder.mkdir(exist_ok=True)
        group = ContainerCgroup(folders, cpus=cpus, unified=self._unified)
        if memory_bytes is not None:
            group.limit_memory(memory_bytes)
        return group

    def close(self) -> None:
        """Remove the cgroups of containers that have ended."""
        for parent in set(self._parents.values()):
            _remove(parent)


class ContainerCgroup:
    def __init__(self, folders: Mapping[str, Path], *, cpus: float | None, unified: bool) -> None:
        self._folders = folders
        self._cpus = cpus
        self._unified = unified

    @property
    def procs(self) -> list[str]:
        """Files into which a process writes 0 to join the cgroup."""
        return sorted({str(folder / "cgroup.procs") for folder in self._folders.values()})

    def limit_memory(self, number_of_bytes: int) -> None:
        """Make the kernel kill the container if it uses more."""
        self._write("memory", str(number_of_bytes))
        swap = "memory.swap.max" if self._unified else "memory.memsw.limit_in_bytes"
        if folder := self._folders.get("memory"):
            with contextlib.suppress(OSError):  # a kernel without swap accounting has no such file
                (folder / swap).write_text("0" if self._unified else str(number_of_bytes))

    def limit_cpu(self) -> None:
        """Limit CPU from now on; callers do not limit the start-up.

        A failure is logged: it must not end the probes, which call this.
        """
        if self._cpus is None:
            return
        quota = max(1000, round(self._cpus * PERIOD_MICROSECONDS))
        try:
            self._write("cpu", f"{quota} {PERIOD_MICROSECONDS}" if self._unified else str(quota))
        except OSError as error:
            logger.warning("a CPU limit is not enforced", extra={"error": str(error)})

    def num_oom_kills(self) -> int:
        """Return the number of its processes that the kernel killed because memory ran out."""
        folder = self._folders.get("memory")
        if folder is None:
            return 0
        file = folder / ("memory.events" if self._unified else "memory.oom_control")
        with contextlib.suppress(OSError):
            for line in file.read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill":
                    return int(count)
        return 0

    def remove(self) -> None:
        for folder in set(self._folders.values()):
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _write(self, controller: str, value: str) -> None:
        if folder := self._folders.get(controller):
            (folder / (_V2 if self._unified else _V1)[controller]).write_text(value)


def _sweep(top: Path) -> None:
    """Remove the cgroups of ended agents below `top` and its siblings, unless they have a process.

    An agent of another session has its cgroup in a sibling.
    """
    for folder in (*top.glob(f"{_PREFIX}*"), *top.parent.glob(f"*/{_PREFIX}*")):
        if not Path("/proc", folder.name.removeprefix(_PREFIX)).exists():
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a cgroup and those in it that have no process."""
    for one in (*folder.glob("*/"), folder):
        with contextlib.suppress(OSError):
            one.rmdir()


def _own_cgroups() -> dict[str, str]:
    """Return this process's cgroup by controller; the unified hierarchy has the empty name."""
    own: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    return own


def _existing(mount: Path, path: str) -> Path:
    """Return the cgroup at `path`; in a container that sees only a part of the tree, its top."""
    folder = mount / path.lstrip("/")
    return folder if folder.is_dir() else mount


def _make_v2(mount: Path, name: str) -> Path:
    """Create a cgroup directly below the top: a cgroup with processes cannot have children."""
    _sweep(mount)
    parent = mount / name
    parent.mkdir(exist_ok=True)
    try:
        for folder in (mount, parent):
            (folder / "cgroup.subtree_control").write_text("+memory +cpu")
    except OSError:
        parent.rmdir()
        raise
    return parent
