"""Programs of a node and of its pods, built once with Go and cached.

kubelet, kube-proxy     of the release that `vlm_local.build` builds the control plane of
pause, coredns, fakegpu the first process of each pod, DNS, a device plugin without devices
"""

import hashlib
import subprocess
import tempfile
from pathlib import Path

from vlm_local import build
from vlm_local.settings import LocalSettings

GO = Path(__file__).parent / "go"
PACKAGES = {
    GO: [
        "k8s.io/kubernetes/cmd/kubelet",
        "k8s.io/kubernetes/cmd/kube-proxy",
        "./pause",
        "./fakegpu",
    ],
    GO / "coredns": ["."],
}


def find(settings: LocalSettings, *, progress: build.Progress) -> Path:
    """Return the folder of the programs, building what is not cached.

    Raises:
        ToolMissingError: Go is needed and missing or too old.
    """
    folder = settings.cache / "nodes" / "bin" / _key()
    if folder.exists():
        return folder
    go = build.check_go(settings.environment)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=folder.parent) as building:
        for module, packages in PACKAGES.items():
            progress(f"building {', '.join(Path(name).name or 'coredns' for name in packages)}")
            subprocess.run(
                [
                    *(go, "build", "-trimpath", "-mod=readonly", "-buildvcs=false"),
                    *("-ldflags", build.ldflags(), "-o", f"{building}/", *packages),
                ],
                cwd=module,
                env={**settings.environment, "CGO_ENABLED": "0"},
                check=True,
            )
        Path(building).rename(folder)
        Path(building).mkdir()  # what TemporaryDirectory removes
    return folder


def _key() -> str:
    digest = hashlib.sha256(build.ldflags().encode())
    for file in sorted(GO.rglob("*")):
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


if __name__ == "__main__":
    print(find(LocalSettings.read(), progress=lambda line: print(line, flush=True)))
