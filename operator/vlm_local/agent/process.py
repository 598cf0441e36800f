"""Runs a container as a process: starts it in its sandbox, signals it by pidfd, awaits its end."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .logs import ContainerLog

SANDBOX = Path(__file__).with_name("sandbox.py")
KILLED = 128 + signal.SIGKILL


class StartFailedError(Exception):
    """The process could not be started; the message is the kernel's."""


@dataclasses.dataclass(frozen=True)
class Bind:
    """A path of this machine, mounted in the container at `path`."""

    source: Path
    path: str
    read_only: bool = False


@dataclasses.dataclass(frozen=True)
class ProcessSpec:
    """What is needed to start a process; `user` is its uid and gid, None for root."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    stage: Path
    mounts: Sequence[Bind] = ()
    read_only: bool = False
    cgroups: Sequence[str] = ()
    user: tuple[int, int] | None = None

    def sandbox(self, **more: int) -> dict[str, object]:
        """Return the specification for the sandbox script."""
        mounts = [
            {"source": str(one.source), "path": one.path, "read_only": one.read_only}
            for one in self.mounts
        ]
        plain = {"argv": [*self.argv], "env": dict(self.env), "cwd": self.cwd, "mounts": mounts}
        limits = {"read_only": self.read_only, "cgroups": [*self.cgroups], "user": self.user}
        return {**plain, **limits, "stage": str(self.stage), "agent": os.getpid(), **more}


class Process:
    """A started container; it and its descendants end with this process."""

    def __init__(
        self,
        launcher: asyncio.subprocess.Process,
        pid: int,
        spec: ProcessSpec,
        pumping: asyncio.Task[None],
    ) -> None:
        self.pid = pid
        self.spec = spec
        self._launcher = launcher
        self._pumping = pumping  # a reference is needed: the event loop holds tasks weakly
        self._handle: int | None = os.pidfd_open(pid)

    @classmethod
    async def start(cls, spec: ProcessSpec, log: ContainerLog) -> "Process":
        """Start it and return when its program runs.

        Raises:
            StartFailedError: there is no such program or folder, or a mount failed.
            OSError: this machine refused a file, a descriptor or a process.
        """
        spec.stage.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            with theirs:
                launcher = await _launch(_write(spec, report=theirs.fileno()), theirs.fileno())
            assert launcher.stdout is not None
            pumping = asyncio.create_task(log.pump(launcher.stdout))
            try:
                report = await reader.readline()
                answer = json.loads(report) if report else {"error": "the sandbox ended early"}
                if "pid" in answer:
                    return cls(launcher, int(answer["pid"]), spec, pumping)
            except (asyncio.CancelledError, OSError):
                launcher.kill()
                raise
        finally:
            writer.close()  # the launcher may reap the pid now, because this process has a pidfd
        await launcher.wait()
        await pumping
        raise StartFailedError(answer["error"])

    async def wait(self) -> int:
        """Wait for its end and that of its log; return the exit code, 128 + number for a signal."""
        code = await self._launcher.wait()
        await asyncio.shield(self._pumping)
        return code if code >= 0 else KILLED

    @property
    def running(self) -> bool:
        return self._launcher.returncode is None

    def handles(self, number: int) -> bool:
        """Whether its program has a handler for a signal."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (number - 1) & 1)
        return False

    def signal(self, number: int) -> None:
        """Send a signal; do nothing if the process has ended."""
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    async def run_inside(self, argv: Sequence[str]) -> tuple[int, bytes]:
        """Run another program in it to its end; return its exit code and output."""
        inside = await self.enter(
            argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        try:
            output, _ = await inside.communicate()
        finally:
            if inside.returncode is None:
                inside.kill()
                await inside.wait()
        return inside.returncode or 0, output

    async def enter(
        self,
        argv: Sequence[str],
        *,
        stdin: int = asyncio.subprocess.DEVNULL,
        stdout: int = asyncio.subprocess.DEVNULL,
        stderr: int = asyncio.subprocess.DEVNULL,
    ) -> asyncio.subprocess.Process:
        """Start another program in its namespaces, with its environment and limits."""
        spec = _write(dataclasses.replace(self.spec, argv=argv), name=f"exec-{os.urandom(4).hex()}")
        return await asyncio.create_subprocess_exec(
            *_interpreter("--enter", str(self.pid), spec),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

    def close(self) -> None:
        """Release the handles of a process that has ended or was signalled to end."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def no_identities() -> str:
    """Return why containers cannot have their own uid on this machine; "" if they can."""
    done = subprocess.run(  # noqa: S603
        _interpreter("--check-user"), capture_output=True, text=True, check=False
    )
    return (done.stdout + done.stderr).strip() if done.returncode else ""


async def _launch(spec: str, report: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *_interpreter(spec),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        pass_fds=(report,),
        start_new_session=True,
    )


def _interpreter(*arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", str(SANDBOX), *arguments]


def _write(spec: ProcessSpec, *, name: str = "spec", **more: int) -> str:
    """Write the specification with mode 0600: the environment may contain secrets."""
    path = spec.stage.with_name(f"{spec.stage.name}.{name}.json")
    path.touch(mode=0o600)
    path.write_text(json.dumps(spec.sandbox(**more)))
    return str(path)
