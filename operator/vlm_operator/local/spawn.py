"""Child processes that cannot outlive this one, not even when it is killed with SIGKILL.

Each child starts in a group of its own and asks the kernel to be killed when its parent ends. The
kernel watches the thread that forked: start children from a thread that lives as long as they.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .errors import LocalError, StartError

# Run by a bare interpreter (15 ms) before the program: no code of ours runs in a forked child.
_TIE = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)            # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != int(sys.argv[1]):     # the parent ended in between
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Child:
    """One started process and what it prints."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def require_running(self) -> None:
        """Raise `StartError` with the end of its log if it has ended."""
        if not self.running:
            raise StartError(
                f"{self.name} ended with code {self.process.returncode}:\n{tail(self.log)}",
                f"Its log is {self.log}.",
            )

    def stop(self, *, grace_seconds: float) -> None:
        """End it and its group: SIGTERM, then SIGKILL after `grace_seconds`."""
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
    """Start `command` with its output in `log`; it ends when the calling thread does."""
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
    """Return `command` so that, started by this thread, it ends when this thread does."""
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *map(str, command)]


def output_of(
    command: Sequence[str | Path], *, stdin: str | None = None, check: bool = False
) -> str:
    """Run `command` to its end and return what it prints.

    Raises:
        LocalError: `check` is true and it failed; the message is what it printed.
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
        words = " ".join([Path(command[0]).name, *map(str, command[1:])])
        raise LocalError(f"{words} failed:\n{answer.stdout.strip()}", "")
    return answer.stdout


def tail(log: Path, *, lines: int = 12) -> str:
    """Return the last lines of a log, indented."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return ""
    return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])
