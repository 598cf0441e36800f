"""Fixtures of services with real pods.

operator         the operator from install.yaml, as a pod of the session's cluster
endless          the shapes model, made to answer for as long as it may
endless_cluster  that operator's cluster, with that model in the module's NAMESPACE
"""

import json
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from served import place, state_of

from vlm_local.controlplane import ControlPlane
from vlm_local.demo.line import INSTALL, MODEL
from vlm_operator import names


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the cluster's state to the report of a failed test: later, the pods no longer exist."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.when == "call" and report.failed and isinstance(cluster, ControlPlane):
        report.sections.append(("Cluster", state_of(cluster)))
    return report


@pytest.fixture(scope="session")
def operator(cluster: ControlPlane) -> Iterator[ControlPlane]:
    """The cluster, with the operator of install.yaml at work in it."""
    cluster.kubectl("apply", "-f", str(INSTALL))
    cluster.await_crds()
    available = ("wait", "--for=condition=Available", "deployment/triptych-operator")
    cluster.kubectl("-n", names.OPERATOR_NAMESPACE, *available, "--timeout=60s")
    yield cluster
    cluster.kubectl("delete", "namespace", names.OPERATOR_NAMESPACE, "--timeout=60s")


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No token ends an answer of this model, so that a fault can fall into one.

    It computes in float32: in bfloat16, long nonsense has choices so close that the sizes of the
    batches decide them, and answers could not be compared.
    """
    folder = tmp_path_factory.mktemp("endless") / "model"
    shutil.copytree(MODEL, folder)
    for name in ("generation_config.json", "config.json"):
        fields = json.loads((folder / name).read_text())
        assert "eos_token_id" in json.dumps(fields)
        fields["eos_token_id"] = []
        if name == "config.json":
            assert fields["dtype"] == "bfloat16"
            fields["dtype"] = "float32"
        (folder / name).write_text(json.dumps(fields))
    return folder


@pytest.fixture(scope="module")
def endless_cluster(
    operator: ControlPlane, endless: Path, request: pytest.FixtureRequest
) -> Iterator[ControlPlane]:
    """The operator's cluster; the module's namespace has a claim on the endless model."""
    with place(operator, request.module.NAMESPACE, endless):
        yield operator
