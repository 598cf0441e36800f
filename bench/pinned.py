"""Virtual environments with pinned packages, made once: other pins make another folder."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

LOG_LINES = 3
NEEDS = (
    "import importlib.metadata, sys; print(*importlib.metadata.requires(sys.argv[1]), sep='\\n')"
)


class UnavailableError(Exception):
    """Something cannot be installed here; the message says why."""


def environment(
    root: Path, pins: tuple[str, ...], *, apart: tuple[str, ...] = (), lent: tuple[str, ...] = ()
) -> Path:
    """The Python of a virtual environment below `root` with these packages; made once.

    Of a package `apart`, what it asks for is installed but torch. A package `lent` is not
    installed: the new environment imports the one of this environment.

    Raises:
        UnavailableError: packages or disk are missing.
    """
    lenders = [_Lender.of(name) for name in lent]
    folder = root / f"environment-{digest(*pins, *apart, *map(str, lenders))}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        install = (str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(sys.executable, "-m", "venv", "--clear", str(folder))
        for lender in lenders:
            lender.announce(_site_packages(python))
        run(*install, *pins)
        for package in apart:
            run(*install, "--no-deps", package)
            needs = run(str(python), "-c", NEEDS, package.partition("==")[0]).splitlines()
            run(*install, *(each for each in needs if not each.startswith("torch")))
        if lenders:
            paths = {str(lender.folder) for lender in lenders}
            (_site_packages(python) / "lent.pth").write_text("\n".join(sorted(paths)))
        (folder / "ready").touch()
    return python


@dataclasses.dataclass(frozen=True, slots=True)
class _Lender:
    """A package of this environment that another one imports."""

    name: str
    version: str
    folder: Path

    @classmethod
    def of(cls, name: str) -> _Lender:
        found = importlib.metadata.distribution(name)
        return cls(
            name, found.version.partition("+")[0], Path(str(found.locate_file(""))).resolve()
        )

    def announce(self, site: Path) -> None:
        """Let pip of the other environment count it as installed, without what it asks for."""
        folder = site / f"{self.name}-{self.version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {self.name}\nVersion: {self.version}\n"
        )
        (folder / "INSTALLER").write_text("pip\n")
        (folder / "RECORD").write_text("")


def _site_packages(python: Path) -> Path:
    return Path(
        run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )


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
