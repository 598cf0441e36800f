"""A decode child in the hands of a file, which tries what an attacker would. Run by a test.

    python taken_over.py DIRECTORY [limits]      with `limits`, without the filter of system calls

Prints one JSON object: for each attempt, the name of its error, or "done".
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import resource
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vlm_worker.media import decode_child

_CLONE_NEWUSER = 0x1000_0000


def main() -> None:
    directory, *only_limits = sys.argv[1:]
    report = os.dup(1)  # `confine` leaves it, and forbids more
    os.close(0)
    if only_limits:
        decode_child.allow_only_what_decoding_needs = lambda: "switched off"  # type: ignore[attr-defined]
    said = {"filter": decode_child.confine() or "in force"}
    os.close(1)  # one fewer, under the limit of open files
    for name, attempt in attempts(directory).items():
        said[name] = outcome(attempt)
    os.write(report, json.dumps(said).encode())


def attempts(directory: str) -> dict[str, Callable[[], Any]]:
    libc = ctypes.CDLL(None, use_errno=True)
    executable = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
    parent = os.getppid()
    return {
        "read a file": lambda: os.close(os.open("/etc/passwd", os.O_RDONLY)),
        "write a file": lambda: os.close(os.open(f"{directory}/x", os.O_WRONLY | os.O_CREAT)),
        "remove a directory": lambda: Path(directory, "empty").rmdir(),
        "list a directory": lambda: list(Path(directory).iterdir()),
        "connect by IPv4": lambda: socket.socket(socket.AF_INET).close(),
        "connect on this machine": lambda: socket.socket(socket.AF_UNIX).close(),
        "fork": fork,
        "execute": lambda: os.execv(f"{directory}/not-there", ["x"]),
        "signal its worker": lambda: os.kill(parent, 0),
        "limit its worker": lambda: resource.prlimit(parent, resource.RLIMIT_CORE),
        "make a namespace": lambda: checked_units(libc.unshare(_CLONE_NEWUSER)),
        "run new code": lambda: mmap.mmap(-1, 4096, prot=executable).close(),
    }


def fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def checked_units(returned: int) -> None:
    if returned != 0:
        raise OSError(ctypes.get_errno(), "refused")


def outcome(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


if __name__ == "__main__":
    main()
