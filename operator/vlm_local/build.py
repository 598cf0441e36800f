"""Finds the control plane's binaries in $KUBEBUILDER_ASSETS or the cache, or builds them with Go.

`python -m vlm_local.build` finds or builds them, and reports what is missing.

    cache/controlplane/<key>/{etcd,kube-apiserver,…,manifest.json}     key = digest of the sources

A build runs in a temporary folder that is then renamed, so the cache has only complete builds. If
the sizes in the manifest do not match, the cached build is removed and built again.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from .errors import BuildError, LocalError, ToolMissingError
from .settings import LocalSettings

KUBERNETES_VERSION = "v1.34.4"
MODULE = Path(__file__).parent / "go"
PACKAGES = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
}
GO_MINIMUM = (1, 24)
GO_REMEDY = "Install Go 1.24 or newer (https://go.dev/dl), or point KUBEBUILDER_ASSETS at binaries."

Progress = Callable[[str], None]


def find_binaries(
    settings: LocalSettings, *, progress: Progress, module: Path = MODULE
) -> dict[str, Path]:
    """Return the path of each binary in `PACKAGES`; build those that are missing.

    Raises:
        ToolMissingError: Go is needed, and is missing or older than 1.24.
        BuildError: the build failed; the message says if the network was the reason.
    """
    assets = _from_assets(settings.assets)
    if len(assets) == len(PACKAGES):
        return assets
    folder = settings.cache / "controlplane" / cache_key(module)
    if problem := damage(folder):
        with _lock(settings.cache / "controlplane.lock", progress=progress):
            if problem := damage(folder):  # if not, another process has built it meanwhile
                _build_into(folder, module, settings.environment, problem, progress)
    return {name: folder / name for name in PACKAGES} | assets


def is_built(settings: LocalSettings, *, module: Path = MODULE) -> bool:
    """Whether `find_binaries` would find all binaries without a build."""
    if len(_from_assets(settings.assets)) == len(PACKAGES):
        return True
    return damage(settings.cache / "controlplane" / cache_key(module)) is None


def cache_key(module: Path = MODULE) -> str:
    """Return a name for the build's inputs: Kubernetes version, go.mod, go.sum, linker flags."""
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum"):
        digest.update((module / name).read_bytes())
    digest.update(ldflags().encode())
    return f"{KUBERNETES_VERSION}-{digest.hexdigest()[:12]}"


def damage(folder: Path) -> str | None:
    """Return what is wrong with a cached build; None if it is complete."""
    if not folder.exists():
        return "not built yet"
    try:
        sizes = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        return f"{folder} has no readable manifest.json"
    for name in PACKAGES:
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != sizes.get(name) or not os.access(path, os.X_OK):
            return f"{path} is incomplete"
    return None


def check_go(environment: Mapping[str, str]) -> str:
    """Return the path of a Go that can build the control plane.

    Raises:
        ToolMissingError: there is no Go on PATH, or it is too old.
    """
    go = shutil.which("go", path=environment.get("PATH"))
    if go is None:
        raise ToolMissingError("Go is needed to build the control plane, once.", GO_REMEDY)
    answer = subprocess.run(  # noqa: S603
        [go, "env", "GOVERSION"], capture_output=True, text=True, env=dict(environment), check=False
    )
    version = re.search(r"(\d+)\.(\d+)", answer.stdout)
    if version is None or (int(version[1]), int(version[2])) < GO_MINIMUM:
        output = answer.stdout.strip() or answer.stderr.strip() or "nothing"
        raise ToolMissingError(f"Go 1.24 or newer is needed; {go} says {output}.", GO_REMEDY)
    return go


def _from_assets(assets: Path | None) -> dict[str, Path]:
    if assets is None:
        return {}
    return {name: assets / name for name in PACKAGES if os.access(assets / name, os.X_OK)}


def _build_into(
    folder: Path, module: Path, environment: Mapping[str, str], problem: str, progress: Progress
) -> None:
    if folder.exists():
        progress(f"control plane: {problem}; building it again")
        shutil.rmtree(folder)
    go = check_go(environment)
    folder.parent.mkdir(parents=True, exist_ok=True)
    progress(f"control plane {KUBERNETES_VERSION}: building, once (minutes on two cores)")
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder.parent) as building:
        out = Path(building) / "out"
        out.mkdir()
        _go_build(go, module, out, environment, progress)
        (out / "server").rename(out / "etcd")  # go build names it after its package path
        sizes = {name: (out / name).stat().st_size for name in PACKAGES}
        (out / "manifest.json").write_text(json.dumps(sizes, indent=1))
        out.rename(folder)


def _go_build(
    go: str, module: Path, out: Path, environment: Mapping[str, str], progress: Progress
) -> None:
    """Run `go build -v`, and report progress from its output every 5 s.

    Raises:
        BuildError: the build failed.
    """
    env = dict(environment) | {"CGO_ENABLED": "0"}
    command = [go, "build", "-v", "-trimpath", "-mod=readonly", "-buildvcs=false"]
    command += ["-ldflags", ldflags(), "-o", f"{out}/", *PACKAGES.values()]
    start = reported = time.monotonic()
    compiled = 0
    tail: list[str] = []
    with subprocess.Popen(  # noqa: S603
        command, cwd=module, env=env, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as build:
        assert build.stderr is not None
        for line in build.stderr:
            tail = [*tail[-20:], line.rstrip()]
            compiled += not line.startswith("go: ")
            if (now := time.monotonic()) - reported >= 5:
                reported = now
                progress(f"  {now - start:4.0f} s  {compiled:4} packages  {line.strip()}")
    if build.returncode:
        raise BuildError(*_explain("\n".join(tail)))
    progress(f"  control plane built in {time.monotonic() - start:.0f} s")


def _explain(output: str) -> tuple[str, str]:
    network = r"dial tcp|no such host|i/o timeout|connection refused|proxyconnect|TLS handshake"
    if re.search(network, output):
        return (
            f"The sources of the control plane could not be downloaded:\n{output}",
            "The first build needs the network (GOPROXY, by default proxy.golang.org); later ones "
            "do not. Without a network, point KUBEBUILDER_ASSETS at a folder with "
            f"{', '.join(PACKAGES)}.",
        )
    return (
        f"go build failed:\n{output}",
        "Free disk space (about 4 GB are used while building) and memory are the usual reasons.",
    )


def ldflags() -> str:
    """Return the linker flags that set the version; without them binaries report v0.0.0."""
    _, minor, _ = KUBERNETES_VERSION.split(".")
    base, client = "k8s.io/component-base/version", "k8s.io/client-go/pkg/version"
    stamps = {
        f"{base}.gitVersion": KUBERNETES_VERSION,
        f"{base}.gitMajor": "1",
        f"{base}.gitMinor": minor,
        f"{client}.gitVersion": KUBERNETES_VERSION,
    }
    return " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in stamps.items())])


@contextlib.contextmanager
def _lock(path: Path, *, progress: Progress) -> Iterator[None]:
    """Let one process at a time build; the kernel releases the lock of an ended process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("control plane: another process is building it; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        find_binaries(LocalSettings.read(), progress=lambda line: print(line, flush=True))  # noqa: T201
    except LocalError as problem:
        sys.exit(str(problem))
