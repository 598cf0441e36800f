"""Starts one container; a script for a bare interpreter: `python -I -S sandbox.py SPEC`.

    agent ─▶ launcher ─fork▶ process 1 of a pid namespace, in its own mount namespace ─exec▶ argv
              │ reports {"pid": …} or {"error": …}, keeps the pid until the agent closes the socket,
              │ waits, ends with the container's exit code
              └ each is killed with its parent, and a namespace with its process 1

The container's root has the entries of the machine's root, bound into a tmpfs. So a mount path that
does not exist on the machine can be created without a change of the machine. `--enter PID SPEC`
runs argv in a started container. A container's uid and gid belong to an inner user namespace: the
container may open the same files as the agent.
This module imports the standard library only: `-I -S` hides our packages.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 1, 2, 4, 32, 4096
MS_MOVE, MS_REC, MS_PRIVATE = 8192, 16384, 1 << 18
PR_SET_PDEATHSIG = 1
NS_GET_USERNS = 0xB701
CANNOT_START = 128  # a kubelet's exit code for a container that never ran

libc = ctypes.CDLL(None, use_errno=True)


def main(argv: list[str]) -> int:
    """Start the container of a spec file, enter one, or check; return the exit code."""
    if argv[0] in ("--check", "--check-user"):
        return check(with_user=argv[0] == "--check-user")
    if argv[0] == "--enter":
        return enter(int(argv[1]), json.loads(Path(argv[2]).read_text()))
    return launch(json.loads(Path(argv[0]).read_text()))


def launch(spec: dict[str, Any]) -> int:
    """Run a container to its end: {argv, env, cwd, stage, mounts, read_only, cgroups, …}.

    `agent` is the pid that must be the parent, `report` the descriptor of a socket for the answer,
    `user` the uid and gid, or None for root.
    """
    tie_to(spec["agent"])
    answer = spec["report"]
    try:
        separate()
    except OSError as error:
        report(answer, {"error": f"cannot make namespaces: {error}"})
        return CANNOT_START
    errors, ready = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(errors)
        os.close(answer)
        become(spec, ready)
    os.close(ready)
    with os.fdopen(errors) as file:
        problem = file.read()  # ends at exec
    report(answer, {"error": problem} if problem else {"pid": child})
    # until the agent closes the socket, the pid of an ended child must not be reused
    os.read(answer, 1)
    _, status = os.waitpid(child, 0)
    return CANNOT_START if problem else exit_code(status)


def become(spec: dict[str, Any], ready: int) -> NoReturn:
    """Turn this process into the container; if that fails, write the reason to `ready`."""
    try:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        for file in spec["cgroups"]:
            Path(file).write_text("0")  # 0 means the process that writes
        build_root(spec)
        os.chdir(spec["cwd"])
        if spec.get("user"):
            take_identity(*spec["user"])
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # repeated: a change of identity clears it
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(spec["argv"][0], spec["argv"], spec["env"])  # noqa: S606
    except OSError as error:
        with contextlib.suppress(OSError):
            os.write(ready, str(error).encode())
    os._exit(CANNOT_START)


def enter(pid: int, spec: dict[str, Any]) -> int:
    """Run argv in the container whose process 1 is `pid`; return its exit code."""
    tie_to(spec["agent"])
    root = os.open(f"/proc/{pid}/root", os.O_RDONLY)
    user, mounts, pids = (
        os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("user", "mnt", "pid")
    )
    # the mounts belong to the user namespace that made them, the program to one inside
    owner = fcntl.ioctl(mounts, NS_GET_USERNS)
    for space in (*([owner] if not is_ours(owner) else []), mounts, pids):
        checked(libc.setns(space, 0), "setns")
    child = os.fork()
    if child == 0:
        try:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            for file in spec["cgroups"]:
                with contextlib.suppress(OSError):  # not mounted in there
                    Path(file).write_text("0")
            os.fchdir(root)
            os.chroot(".")
            os.chdir(spec["cwd"])
            if not os.path.sameopenfile(user, owner):
                checked(libc.setns(user, 0), "setns")
                # repeated: a change of identity clears it
                libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.execvpe(spec["argv"][0], spec["argv"], spec["env"])  # noqa: S606
        except OSError as error:
            os.write(2, f"{error}\n".encode())
        os._exit(126)
    _, status = os.waitpid(child, 0)
    return exit_code(status)


def check(*, with_user: bool) -> int:
    """Print why this machine cannot run containers, or those with their own uid; else nothing."""
    try:
        separate()
        if with_user:
            take_identity(65532, 65532)
    except OSError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


def is_ours(user_namespace: int) -> bool:
    """Whether this process is in the namespace."""
    return os.path.samestat(os.fstat(user_namespace), Path("/proc/self/ns/user").stat())


def take_identity(uid: int, gid: int) -> None:
    """Become this user and group in a new user namespace, which maps no others."""
    within = os.geteuid(), os.getegid()
    checked(libc.unshare(CLONE_NEWUSER), "unshare")
    map_ids(outside=within, inside=(uid, gid))


def map_ids(*, outside: tuple[int, int], inside: tuple[int, int]) -> None:
    """Map this process's ids in the user namespace that it has just created."""
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{inside[0]} {outside[0]} 1")
    Path("/proc/self/gid_map").write_text(f"{inside[1]} {outside[1]} 1")


def tie_to(agent: int) -> None:
    """Ask the kernel to kill this process when the agent ends."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:
        os._exit(CANNOT_START)


def separate() -> None:
    """Enter new mount and pid namespaces; without root, through a user namespace."""
    flags = CLONE_NEWNS | CLONE_NEWPID
    uid, gid = os.geteuid(), os.getegid()
    checked(libc.unshare(flags | (CLONE_NEWUSER if uid else 0)), "unshare")
    if uid:
        map_ids(outside=(uid, gid), inside=(0, 0))


def build_root(spec: dict[str, Any]) -> None:
    """Assemble the container's file system under `stage` and move into it."""
    root = Root(Path(spec["stage"]))
    for bind in sorted(spec["mounts"], key=lambda bind: bind["path"].count("/")):
        root.bind(bind["source"], bind["path"], read_only=bind["read_only"])
    root.own_proc()
    root.own_shm()
    if spec["read_only"]:
        root.freeze(writable=[bind["path"] for bind in spec["mounts"]])
    os.chdir(root.stage)
    mount(".", "/", flags=MS_MOVE)
    os.chroot(".")


class Root:
    """A tmpfs with the entries of the machine's root, and the binds over it."""

    def __init__(self, stage: Path) -> None:
        mount("none", "/", flags=MS_REC | MS_PRIVATE)
        mount("root", stage, kind="tmpfs", options="mode=755")
        self.stage = stage
        self._ours = {stage}
        self._show(Path("/"), stage)

    def bind(self, source: str, path: str, *, read_only: bool) -> None:
        """Mount the machine's `source` at the container's `path`."""
        target = self._point(path, directory=Path(source).is_dir())
        mount(source, target, flags=MS_BIND | MS_REC)
        if read_only:
            remount_read_only(target)

    def own_proc(self) -> None:
        """Mount a /proc of this pid namespace. If that is forbidden, the machine's /proc stays."""
        with contextlib.suppress(OSError):
            mount("proc", self.stage / "proc", kind="proc")

    def own_shm(self) -> None:
        """Mount a /dev/shm that ends with the container."""
        if (self.stage / "dev/shm").is_dir():
            mount("shm", self.stage / "dev/shm", kind="tmpfs", flags=MS_NOSUID | MS_NODEV)

    def freeze(self, *, writable: list[str]) -> None:
        """Make everything read-only except `writable`, /proc and /dev: readOnlyRootFilesystem."""
        kept = [f"{self.stage}{path.rstrip('/')}" for path in [*writable, "/proc", "/dev"]]
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            point = line.split()[4].encode().decode("unicode_escape")
            inside = point == str(self.stage) or point.startswith(f"{self.stage}/")
            if inside and not any(point == path or point.startswith(f"{path}/") for path in kept):
                remount_read_only(Path(point))

    def _point(self, path: str, *, directory: bool) -> Path:
        """Return the mount point of `path`; if the machine has none, create it in a tmpfs."""
        here, todo = self.stage, path.strip("/").split("/")
        while todo:
            following = here / todo[0]
            if following.is_symlink():
                target = following.readlink()
                here = self.stage if target.is_absolute() else here
                todo = [*(part for part in target.parts if part != "/"), *todo[1:]]
                continue
            if todo[0] == "..":
                here, todo = (here.parent if here != self.stage else here), todo[1:]
                continue
            if not following.exists():
                self._make_ours(here)
                last = len(todo) == 1
                following.touch() if last and not directory else following.mkdir()
                self._ours.add(following)
            here, todo = following, todo[1:]
        return here

    def _make_ours(self, folder: Path) -> None:
        """Mount a tmpfs over `folder` with the same entries, so that new ones can be created."""
        if folder in self._ours:
            return
        cover = self.stage / f".cover-{len(self._ours)}"
        cover.mkdir()
        mount("cover", cover, kind="tmpfs", options="mode=755")
        self._show(folder, cover)
        mount(cover, folder, flags=MS_MOVE)
        cover.rmdir()
        self._ours.add(folder)

    def _show(self, source: Path, target: Path) -> None:
        for entry in os.scandir(source):
            shown = target / entry.name
            if entry.is_symlink():
                shown.symlink_to(Path(entry.path).readlink())
                continue
            shown.mkdir() if entry.is_dir() else shown.touch()
            with contextlib.suppress(OSError):  # an unreadable entry stays empty
                mount(entry.path, shown, flags=MS_BIND | MS_REC)


def mount(
    source: str | Path, target: str | Path, *, kind: str = "", flags: int = 0, options: str = ""
) -> None:
    arguments = [str(part).encode() for part in (source, target, kind)]
    data = options.encode() if options else None
    checked(libc.mount(*arguments, ctypes.c_ulong(flags), data), f"mount at {target}")


def remount_read_only(target: Path) -> None:
    """Make one bind mount read-only. A user namespace must keep the flags of the original mount."""
    have = os.statvfs(target).f_flag
    kept = have & (MS_NOSUID | MS_NODEV | 8 | 1024 | 2048)  # noexec, noatime, nodiratime
    mount("none", target, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | kept)


def checked(result: int, what: str) -> None:
    """Raise OSError if a call of libc failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def exit_code(status: int) -> int:
    """Return the exit code of a wait status, 128 + number for a signal."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def report(descriptor: int, message: dict[str, Any]) -> None:
    """Send one JSON line to the agent."""
    os.write(descriptor, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
