"""The operator as its own process, under the chart's ServiceAccount, on a real control plane.

live              one that nothing disturbs
proxy, operator   one behind a fault proxy, started again when it ends
healed            no rule outlives its test
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from support.live import Live, install
from support.live_faults import ProxyThread, Supervised, apply, behind, finished
from vlm_local.controlplane import ControlPlane

NAMESPACES = ("live", "live-gone")


@pytest.fixture(scope="module")
def live(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A running operator for the namespaces `live` and `live-gone`; it must end with status 0."""
    folder = tmp_path_factory.mktemp("operator")
    install(control_plane, folder)
    for namespace in NAMESPACES:
        control_plane.kubectl("create", "namespace", namespace)
    found = Live(control_plane, folder, "--namespace=live", "--namespace=live-gone")
    found.start()
    yield found
    # the next module's operator finds these namespaces new
    for namespace in NAMESPACES:
        control_plane.kubectl("-n", namespace, "delete", "vlm", "--all", "--timeout=60s")
    assert found.stop() == 0
    for namespace in NAMESPACES:
        control_plane.kubectl("delete", "namespace", namespace, "--ignore-not-found")


@pytest.fixture(scope="module")
def proxy(control_plane: ControlPlane) -> Iterator[ProxyThread]:
    found = ProxyThread(control_plane)
    found.start()
    yield found
    found.stop()


@pytest.fixture(scope="module")
def operator(
    control_plane: ControlPlane, proxy: ProxyThread, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Supervised]:
    name = f"faults-{uuid.uuid4().hex[:6]}"
    found = behind(control_plane, proxy, tmp_path_factory.mktemp("faults"), name)
    found.namespace = name
    try:
        found.start()
        apply(found, "reference")
        found.until(lambda: len(found.items("pods", "reference", name)) == 3, seconds=5)
        found.until(lambda: finished(found, "reference"), seconds=5)
        yield found
    finally:
        found.stop()
    control_plane.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def healed(proxy: ProxyThread) -> Iterator[None]:
    yield
    proxy.proxy.clear()
