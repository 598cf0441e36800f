"""Starts child processes that end with this one, even if it ends by SIGKILL.

Each child has its own process group and sets PR_SET_PDEATHSIG, so the kernel kills it when its
parent ends. The parent is the thread that forked: start children from a thread that outlives them.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import LocalError, StartError

# A bare interpreter (15 ms) runs this before the program, so that no code runs in a forked child.
_TIE = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)            # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != int(sys.argv[1]):     # the parent has ended meanwhile
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Child:
    """One started process and its log."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def require_running(self) -> None:
        """Check that the process runs.

        Raises:
            StartError: it has ended; the message has the end of its log.
        """
        if not self.running:
            raise StartError(
                f"{self.name} ended with code {self.process.returncode}:\n{tail(self.log)}",
                f"Its log is {self.log}.",
            )

    def stop(self, *, grace_seconds: float) -> None:
        """End the process group: SIGTERM, then SIGKILL after `grace_seconds`."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_seconds)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def spawn(
    name: str, command: Sequence[str | Path], *, log: Path, environment: Mapping[str, str]
) -> Child:
    """Start `command` with its output in `log`; it ends with the calling thread."""
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603
            tied(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
    return Child(name, process, log)


def tied(command: Sequence[str | Path]) -> list[str]:
    """Return a command that runs `command` and ends with the thread that starts it."""
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *map(str, command)]


def output_of(
    command: Sequence[str | Path], *, stdin: str | None = None, check: bool = False
) -> str:
    """Run `command` to its end and return its output, stderr included.

    Raises:
        LocalError: `check` is true and the command failed; the message has its output.
    """
    answer = subprocess.run(  # noqa: S603
        [*map(str, command)],
        input=stdin,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if check and answer.returncode:
        line = " ".join([Path(command[0]).name, *map(str, command[1:])])
        raise LocalError(f"{line} failed:\n{answer.stdout.strip()}", "")
    return answer.stdout


def tail(log: Path, *, lines: int = 12) -> str:
    """Return the last lines of a log, indented."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])
