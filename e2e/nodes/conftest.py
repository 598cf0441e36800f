"""Fixtures of real nodes.

real_nodes  the nodes of the quickstart, in the namespaces of run.sh
cluster     their control plane; fixtures of e2e/ that ask for a cluster get this one here
operator    that of install.yaml
"""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from nodes import binaries, images, requires, typed
from nodes.cluster import QUICKSTART, RealNodes
from nodes.network import IPV4, Network

from vlm_local import flags
from vlm_local.controlplane import ControlPlane
from vlm_local.settings import LocalSettings

MANIFESTS = Path(__file__).parent / "manifests"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--real-nodes", action="store_true", help="set by e2e/nodes/run.sh")
    parser.addoption(
        "--families",
        choices=[network.name for network in Network],
        default=Network.ipv4.name,
        help="address families of the cluster of e2e/nodes",
    )


@pytest.fixture(scope="session")
def folder(pytestconfig: pytest.Config) -> Iterator[Path]:
    """State of the run; logs are kept until the next one."""
    if reason := requires.missing():
        pytest.skip(reason)
    if not pytestconfig.getoption("--real-nodes", default=False):
        pytest.skip("needs namespaces of its own: make e2e-nodes")
    cache = LocalSettings.read().cache / "nodes"
    path = cache / "run"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(cache / "logs", ignore_errors=True)
    for log in [*path.glob("*/log"), *path.glob("plane/*.log")]:
        kept = cache / "logs" / log.relative_to(path)
        kept.parent.mkdir(parents=True, exist_ok=True)
        log.rename(kept)
    print(f"logs are in {cache / 'logs'}")


@pytest.fixture(scope="session")
def network(pytestconfig: pytest.Config) -> Network:
    return Network[pytestconfig.getoption("--families")]


@pytest.fixture(scope="session")
def real_nodes(folder: Path, network: Network) -> Iterator[tuple[ControlPlane, RealNodes]]:
    settings = LocalSettings.read()
    programs = binaries.find(settings, progress=print)
    store = images.Builder(settings.cache / "nodes", programs=programs).store
    plane = ControlPlane(
        settings=settings,
        folder=folder / "plane",
        address=network.primary.plane,
        port=6443,
        services=network.services,
        progress=print,
    )
    updates = images.Updates(store)
    print(f"images: {', '.join(updates.roles) or 'none'} with a layer of newer code")
    nodes = RealNodes(plane, network, folder=folder, programs=programs, store=store, update=updates)
    nodes.make_bridge()
    asyncio.run(plane.start())
    try:
        for node in QUICKSTART:
            nodes.start(node)
        for node in QUICKSTART:
            nodes.ready(node)
        _set_up(plane, network)
        yield plane, nodes
    finally:
        nodes.stop()
        plane.stop()


@pytest.fixture(scope="session")
def cluster(real_nodes: tuple[ControlPlane, RealNodes]) -> ControlPlane:
    return real_nodes[0]


def _set_up(plane: ControlPlane, network: Network) -> None:
    """What distributions of Kubernetes bring: the API server's rights on kubelets, and DNS."""
    binding = ("create", "clusterrolebinding", "kubelets", "--clusterrole=system:kubelet-api-admin")
    plane.kubectl(*binding, f"--user={flags.KUBELET_CLIENT}")
    dns_server = (MANIFESTS / "coredns.yaml").read_text().replace(IPV4.dns, network.primary.dns)
    plane.kubectl("apply", "-f", "-", stdin=dns_server)
    dns = ("-n", "kube-system", "rollout", "status", "deployment/coredns", "--timeout=120s")
    plane.kubectl(*dns)


@pytest.fixture(scope="module")
def operator(cluster: ControlPlane) -> Iterator[ControlPlane]:
    """The cluster with the operator of install.yaml; each module installs its own."""
    typed.apply_install_yaml(cluster)
    yield cluster
    typed.delete_install_yaml(cluster)
