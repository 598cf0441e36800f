"""The operator as its own process, under the chart's ServiceAccount, on a real control plane."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from operator_live import Live, install

from vlm_operator.local.controlplane import ControlPlane

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
