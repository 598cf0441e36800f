"""The image's commands with the default --bind: each port answers at each address of its pod.

A test machine's pods have network namespaces of their own, made without root.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from confined import confined, refused

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples/shapes/model"
UID = 65532
IPV4, IPV6 = "10.11.12.13", "fd00::13"
ROLES = ("encoder", "prefill", "decode")
NETWORKS = {
    "IPv4 only": ((IPV4,), True, (IPV4,)),
    "IPv6 only": ((IPV6,), True, (IPV6,)),
    "dual stack": ((IPV4, IPV6), True, (IPV4, IPV6)),
    "a kernel without IPv6": ((IPV4,), False, (IPV4,)),
}


def image_environment() -> dict[str, str]:
    """What worker/Dockerfile sets, PATH apart, and a pod adds."""
    found = {"PATH": "/usr/local/bin:/usr/bin:/bin", "POD_IP": IPV4, "POD_NAME": "p"}
    for line in (ROOT / "worker/Dockerfile").read_text().rpartition("FROM ")[2].splitlines():
        if line.startswith("ENV "):
            found |= dict(word.split("=", 1) for word in line.split()[1:] if "PATH" not in word)
    return found


def ask(
    command: list[str], ready: str, probes: list[tuple[str, str, int]], **how: Any
) -> dict[str, Any]:
    if why := refused(**how):
        pytest.skip(f"this machine makes no such pod: {why}")
    argv = [sys.executable, "-P", "-m", "vlm_worker", *command, f"--model={MODEL}",
            "--served-name=shapes", "--block-size=4"]  # fmt: skip
    asked = {"argv": argv, "env": image_environment(), "ready": ready, "probes": probes}
    done = subprocess.run(
        confined(sys.executable, "-P", str(Path(__file__).with_name("reached.py")), **how),
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def worker(role: str, reached: tuple[str, ...], **how: Any) -> dict[str, Any]:
    kinds = (("grpc", 9000), ("/healthz", 9001), ("/stats", 9001), ("tcp", 9002))
    probes = [(kind, address, port) for address in reached for kind, port in kinds]
    command = [role, "--runner=checksum", "--max-model-len=1024"]
    found = ask(command, "ready", probes, **how)
    good = {"grpc": "SERVING", "/healthz": 200, "/stats": 200, "tcp": "accepted"}
    assert found["answers"] == {f"{k} {a} {p}": good[k] for k, a, p in probes}
    return found


def gateway(reached: tuple[str, ...], **how: Any) -> dict[str, Any]:
    kinds = (("/v1/models", 8000), ("/healthz", 9001), ("/stats", 9001))
    probes = [(kind, address, port) for address in reached for kind, port in kinds]
    command = ["gateway", "--worker=127.0.0.1:1"]
    found = ask(command, "gateway serves", probes, **how)
    assert found["answers"] == {f"{k} {a} {p}": 200 for k, a, p in probes}
    return found


@pytest.mark.parametrize("network", NETWORKS)
def test_each_port_of_a_worker_answers_at_each_address_of_its_pod(network: str) -> None:
    own, ipv6, reached = NETWORKS[network]
    worker("decode", reached, addresses=own, ipv6=ipv6)


@pytest.mark.parametrize("network", NETWORKS)
def test_each_port_of_a_gateway_answers_at_each_address_of_its_pod(network: str) -> None:
    own, ipv6, reached = NETWORKS[network]
    gateway(reached, addresses=own, ipv6=ipv6)


@pytest.mark.parametrize("role", ROLES)
def test_a_worker_runs_as_a_user_that_no_file_names(role: str) -> None:
    found = worker(role, (IPV4,), addresses=(IPV4,), uid=UID)
    assert found["uid"] == UID


def test_a_gateway_runs_as_a_user_that_no_file_names() -> None:
    assert gateway((IPV4,), addresses=(IPV4,), uid=UID)["uid"] == UID
