"""What a user types against the cluster of these nodes."""

import subprocess
import sys
from pathlib import Path

from vlm_local.controlplane import ControlPlane
from vlm_local.demo.line import VLM
from vlm_local.settings import LocalSettings

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "install.yaml"
QUICKSTART = ROOT / "examples/quickstart"
IMAGE = QUICKSTART / "image.png"
CHART = ROOT / "helm/triptych"
SYSTEM = "triptych-system"
QUESTIONS = {
    "What shape is yellow?": "square",
    "What colour is the circle?": "red",
    "What is to the right of the circle?": "blue triangle",
}


def run(cluster: ControlPlane, *command: str | Path) -> str:
    """Run a command with the cluster's kubeconfig, print and return its output."""
    environment = {**LocalSettings.read().environment, "KUBECONFIG": str(cluster.kubeconfig)}
    ended = subprocess.run(
        [*map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**environment, "COLUMNS": "160"},
        cwd=ROOT,
        check=False,
    )
    words = [str(word).removeprefix(f"{ROOT}/") for word in command[1:]]
    print(f"$ {Path(command[0]).name} {' '.join(words)}\n{ended.stdout}")
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def kubectl(cluster: ControlPlane, *arguments: str | Path) -> str:
    return run(cluster, cluster.binaries["kubectl"], *arguments)


def vlm(cluster: ControlPlane, *arguments: str | Path) -> str:
    return run(cluster, VLM, *arguments)


def apply_install_yaml(cluster: ControlPlane) -> None:
    kubectl(cluster, "apply", "-f", INSTALL)
    rollout = ("rollout", "status", "deployment/triptych-operator", "--timeout=60s")
    kubectl(cluster, "-n", SYSTEM, *rollout)


def delete_install_yaml(cluster: ControlPlane) -> None:
    kubectl(cluster, "delete", "-f", INSTALL, "--timeout=120s")


def helm_install(cluster: ControlPlane) -> None:
    """With no values of our own."""
    place = ("--namespace", SYSTEM, "--create-namespace", "--wait", "--timeout", "60s")
    _helm(cluster, "install", "triptych", CHART, *place)


def helm_upgrade_and_roll_back(cluster: ControlPlane) -> None:
    """`helm test` before, between and after: each operator answers at its Service."""
    place = ("--namespace", SYSTEM, "--wait", "--timeout", "60s")
    _helm(cluster, "test", "triptych", "--namespace", SYSTEM, "--timeout", "60s")
    _helm(cluster, "upgrade", "triptych", CHART, *place, "--set", "log.level=DEBUG")
    _helm(cluster, "test", "triptych", "--namespace", SYSTEM, "--timeout", "60s")
    _helm(cluster, "rollback", "triptych", "1", *place)
    _helm(cluster, "test", "triptych", "--namespace", SYSTEM, "--timeout", "60s")


def helm_uninstall(cluster: ControlPlane) -> None:
    """The chart keeps its CRDs: an uninstall deletes no service."""
    _helm(cluster, "uninstall", "triptych", "--namespace", SYSTEM, "--wait")
    kubectl(cluster, "delete", "namespace", SYSTEM, "--timeout=60s")
    kubectl(cluster, "delete", "-f", ROOT / "crds", "--timeout=60s")


def _helm(cluster: ControlPlane, *arguments: str | Path) -> str:
    return run(cluster, sys.executable, ROOT / "tools/helm.py", *arguments)
