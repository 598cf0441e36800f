"""Virtual environments with pinned packages, made once: other pins make another folder."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

LOG_LINES = 3
NEEDS = (
    "import importlib.metadata, sys; print(*importlib.metadata.requires(sys.argv[1]), sep='\\n')"
)


class UnavailableError(Exception):
    """Something cannot be installed here; the message says why."""


def environment(root: Path, pins: tuple[str, ...], apart: tuple[str, ...] = ()) -> Path:
    """The Python of a virtual environment below `root` with these packages; made once.

    Of a package `apart`, what it asks for is installed but torch.

    Raises:
        UnavailableError: packages or disk are missing.
    """
    folder = root / f"environment-{digest(*pins, *apart)}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        install = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(sys.executable, "-m", "venv", "--clear", str(folder))
        run(*install, *pins)
        for package in apart:
            run(*install, "--no-deps", package)
            needs = run(str(python), "-c", NEEDS, package.partition("==")[0]).splitlines()
            run(*install, *(each for each in needs if not each.startswith("torch")))
        (folder / "ready").touch()
    return python


def run(*command: str) -> str:
    """What a command prints.

    Raises:
        UnavailableError: it failed.
    """
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        last = " | ".join(done.stdout.strip().splitlines()[-LOG_LINES:])
        raise UnavailableError(f"{Path(command[0]).name} ended with {done.returncode}: {last}")
    return done.stdout


def digest(*texts: str) -> str:
    return hashlib.sha256("\n".join((*texts, sys.version)).encode()).hexdigest()[:12]
