"""Finds promtool and prometheus in the cache, or builds them with Go.

prometheus.py   builds both if they are missing: 18 minutes of processor time, 200 MB downloaded

    cache/prometheus/<key>/{promtool,prometheus}   key = digest of go.mod, go.sum and tags

Tests that need them are skipped if they are not built. `make test-full` builds them.
"""

import contextlib
import fcntl
import hashlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vlm_local.build import check_go
from vlm_local.errors import LocalError
from vlm_local.settings import LocalSettings

MODULE = Path(__file__).parent / "prometheus"
PACKAGES = {
    name: f"github.com/prometheus/prometheus/cmd/{name}" for name in ("promtool", "prometheus")
}
# without the SDKs of clouds; documented in the README of Prometheus
TAGS = "remove_all_sd,enable_kubernetes_sd"


def folder(settings: LocalSettings) -> Path:
    """Return the folder of the binaries, whether it exists or not."""
    digest = hashlib.sha256(TAGS.encode())
    for name in ("go.mod", "go.sum"):
        digest.update((MODULE / name).read_bytes())
    return settings.cache / "prometheus" / digest.hexdigest()[:12]


def built(settings: LocalSettings) -> dict[str, Path] | None:
    """Return the path of each binary; None if they are not built."""
    found = {name: folder(settings) / name for name in PACKAGES}
    return found if all(path.is_file() for path in found.values()) else None


def build(settings: LocalSettings) -> None:
    """Build both binaries, unless they are built. One process builds at a time.

    Raises:
        LocalError: Go is missing.
        subprocess.CalledProcessError: the build failed; its output is on standard error.
    """
    target = folder(settings)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if built(settings) is not None:
            return
        command = [check_go(settings.environment), "build", "-trimpath", "-mod=readonly"]
        command += ["-buildvcs=false", "-tags", TAGS, "-ldflags", "-s -w"]
        with tempfile.TemporaryDirectory(prefix="building-", dir=target.parent) as building:
            out = Path(building) / "out"
            out.mkdir()
            subprocess.run(
                [*command, "-o", f"{out}/", *PACKAGES.values()],
                cwd=MODULE,
                env={**settings.environment, "CGO_ENABLED": "0"},
                check=True,
            )
            out.rename(target)


def main() -> int:
    """Build what is missing; returns the exit status."""
    settings, begun = LocalSettings.read(), time.monotonic()
    if built(settings) is None:
        print("promtool and prometheus: building, once", flush=True)
    with contextlib.suppress(subprocess.CalledProcessError):
        build(settings)
        print(f"{folder(settings)} ({time.monotonic() - begun:.0f} s)")
        return 0
    return 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LocalError as problem:
        sys.exit(str(problem))
