"""What these nodes need of a machine; `python -m nodes.requires` prints what is missing."""

import os
import shutil
import subprocess
from pathlib import Path

from nodes.cluster import CNI

from vlm_local.settings import LocalSettings

# Debian's package of each program
PROGRAMS = {
    "buildah": "buildah",
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "mmdebstrap": "mmdebstrap",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "openssl": "openssl",
}
FREE_GB, AGAIN_GB = 45, 25  # for the first build of the images, and for another one


def missing() -> str | None:
    """Return what is missing, in one line, or None."""
    if os.geteuid() != 0:
        return "root is needed: kubelet and containerd make namespaces, mounts and cgroups"
    programs = [name for name in PROGRAMS if shutil.which(name) is None]
    if programs or CNI is None:
        packages = {PROGRAMS[name] for name in programs}
        packages |= set() if CNI else {"containernetworking-plugins"}
        return f"not installed: {' '.join(sorted(packages))} (make e2e-nodes ARGS=--install)"
    if refusal := _refusal():
        return refusal
    cache = LocalSettings.read().cache / "nodes"
    needed = AGAIN_GB if (cache / "storage").exists() else FREE_GB
    free = shutil.disk_usage(_existing(cache)).free / 1e9
    if not list(cache.glob("store-*")) and free < needed:
        return f"{needed} GB of free disk are needed at {cache} to build the images, not {free:.0f}"
    return None


def _refusal() -> str | None:
    """Try what the kernel may refuse to root in a container: namespaces, overlayfs, cgroups."""
    script = """
    set -e
    mount -t tmpfs tmpfs /mnt
    cd /mnt
    mkdir a b c d
    mount -t overlay -o lowerdir=a,upperdir=b,workdir=c overlay d
    ip link add try type bridge
    """
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", script]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"the kernel refuses namespaces, overlayfs or a bridge: {tried.stderr.strip()}"
    cgroups = Path("/sys/fs/cgroup")
    trees = (
        [cgroups]
        if (cgroups / "cgroup.controllers").exists()
        else [cgroups / "memory", cgroups / "cpu"]
    )
    if not all(os.access(tree, os.W_OK) for tree in trees):
        return f"{' and '.join(map(str, trees))}: cgroups cannot be made there"
    return None


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.parent)


if __name__ == "__main__":
    print(missing() or "")
