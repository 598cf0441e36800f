"""The chart's admission policies bound what RBAC cannot, on a real API server."""

import asyncio
import dataclasses
import json
import subprocess
from typing import Any

import pytest

from vlm_local.client import STRATEGIC, ApiError, Client
from vlm_local.controlplane import ControlPlane
from vlm_local.waiting import until

pytestmark = pytest.mark.cluster

SPACE = "bounded"
OPERATOR = "system:serviceaccount:triptych-system:triptych-operator"
OWNER = {
    "apiVersion": "triptych.dev/v1alpha1",
    "kind": "VLMService",
    "name": "demo",
    "uid": "5f0b4c2e-0000-4000-8000-000000000000",
}
LABELS = {"triptych.dev/service": "demo"}
COST = "controller.kubernetes.io/pod-deletion-cost"
GATE = {"type": "triptych.dev/accepting", "status": "True"}


def config_map(name: str, *owners: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": SPACE, "ownerReferences": list(owners)}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}


def pod(name: str, labels: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": SPACE, "labels": labels},
        "spec": {
            "containers": [{"name": "c", "image": "x:1"}],
            "nodeSelector": {"no-node": "has-this"},
        },
    }


@pytest.fixture(scope="module")
def cluster(installed: ControlPlane) -> ControlPlane:
    """With two pods and an object of somebody else, and the policies in force."""
    installed.kubectl("create", "namespace", SPACE)
    for item in (pod("own", LABELS), pod("theirs", {"app": "x"}), config_map("theirs")):
        installed.kubectl("create", "-f", "-", stdin=json.dumps(item))

    async def refuses() -> bool:
        return "that a VLMService owns" in create(installed, config_map("probe")).stderr

    awaited = "the policies to be in force"
    asyncio.run(until(refuses, seconds=60, awaited=awaited))
    return installed


def create(cluster: ControlPlane, item: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    return cluster.kubectl(
        "create", "--dry-run=server", "-f", "-", f"--as={OPERATOR}",
        stdin=json.dumps(item), check=False,
    )  # fmt: skip


def patch(cluster: ControlPlane, name: str, change: dict[str, Any], *, status: bool = False) -> str:
    """Patch as the operator, by a dry run; returns the error, "" if it is accepted."""
    token = cluster.kubectl("-n", "triptych-system", "create", "token", "triptych-operator").stdout
    access = dataclasses.replace(cluster.access, token=token.strip(), certificate=None, key=None)
    path = f"/api/v1/namespaces/{SPACE}/pods/{name}" + ("/status" if status else "")

    async def ask() -> str:
        async with Client(access) as api:
            try:
                await api.patch(path, change, kind=STRATEGIC, dryRun="All")
            except ApiError as error:
                return str(error)
        return ""

    return asyncio.run(ask())


def test_only_children_of_services_are_created_changed_and_deleted(cluster: ControlPlane):
    assert create(cluster, config_map("child", OWNER)).returncode == 0
    stranger = {**OWNER, "kind": "Other"}
    for owners in ((), (stranger,)):
        assert "that a VLMService owns" in create(cluster, config_map("x", *owners)).stderr
    deleted = cluster.kubectl(
        "-n", SPACE, "delete", "configmap", "theirs", "--dry-run=server", f"--as={OPERATOR}",
        check=False,
    )  # fmt: skip
    assert "that a VLMService owns" in deleted.stderr


def claim(*owners: dict[str, Any]) -> dict[str, Any]:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    return {**config_map("model", *owners), "kind": "PersistentVolumeClaim", "spec": spec}


def job(*owners: dict[str, Any]) -> dict[str, Any]:
    containers = [{"name": "fetch", "image": "x:1"}]
    template = {"spec": {"restartPolicy": "Never", "containers": containers}}
    made = {**config_map("model", *owners), "kind": "Job", "spec": {"template": template}}
    return {**made, "apiVersion": "batch/v1"}


@pytest.mark.parametrize("make", [claim, job])
def test_only_claims_and_jobs_of_services_are_created(cluster: ControlPlane, make: Any):
    assert create(cluster, make(OWNER)).returncode == 0
    assert "that a VLMService owns" in create(cluster, make()).stderr


def test_the_deletion_cost_and_the_gate_of_its_pods_are_written(cluster: ControlPlane):
    for change in ({"metadata": {"annotations": {COST: "-1"}}}, {"metadata": {"annotations": {}}}):
        assert patch(cluster, "own", change) == ""
    assert patch(cluster, "own", {"status": {"conditions": [GATE]}}, status=True) == ""


@pytest.mark.parametrize(
    ("name", "change", "status", "says"),
    [
        ("theirs", {"metadata": {"annotations": {COST: "-1"}}}, False, "only pods of a VLMService"),
        ("own", {"metadata": {"annotations": {"a": "b"}}}, False, "only the deletion cost"),
        ("own", {"metadata": {"labels": {"a": "b"}}}, False, "only the deletion cost"),
        (
            "own",
            {"spec": {"containers": [{"name": "c", "image": "evil:1"}]}},
            False,
            "only the deletion cost",
        ),
        (
            "own",
            {"status": {"conditions": [{"type": "Ready", "status": "True"}]}},
            True,
            "only its own condition",
        ),
        ("own", {"status": {"podIP": "10.0.0.9"}}, True, "its own condition"),
        (
            "theirs",
            {"status": {"conditions": [GATE]}},
            True,
            "only pods of a VLMService",
        ),
    ],
)
def test_every_other_change_of_a_pod_is_refused(
    cluster: ControlPlane, name: str, change: dict[str, Any], status: bool, says: str
):
    assert says in patch(cluster, name, change, status=status)


def test_others_are_not_bounded(cluster: ControlPlane):
    cluster.kubectl("-n", SPACE, "label", "pod", "own", "x=y", "--dry-run=server")


CA = "triptych-operator-ca"
MANUAL = {"scaling": {"mode": "Manual", "replicas": 1}}
CERTIFIED = {"triptych.dev/identity": "decode"}


def secret(
    name: str,
    *owners: dict[str, Any],
    space: str = SPACE,
    labels: dict[str, str] = CERTIFIED,
    kind: str = "kubernetes.io/tls",
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": name,
            "namespace": space,
            "labels": labels,
            "ownerReferences": list(owners),
        },
        "type": kind,
        "data": {"tls.crt": "eA==", "tls.key": "eA=="},
    }


@pytest.fixture(scope="module")
def with_secrets(cluster: ControlPlane) -> ControlPlane:
    """With Secrets of a service, of somebody else, and one that only wears the label."""
    # an owner that does not exist would let the garbage collector delete its Secrets
    spec = {"model": {"uri": "pvc://shapes"}, "pools": {"decode": MANUAL}, "stopped": True}
    head = {key: OWNER[key] for key in ("apiVersion", "kind")}
    service = {**head, "metadata": {"name": "demo", "namespace": SPACE}, "spec": spec}
    made = cluster.kubectl("create", "-o", "json", "-f", "-", stdin=json.dumps(service)).stdout
    owner = {**OWNER, "uid": json.loads(made)["metadata"]["uid"]}
    # of an operator that other tests ran
    cluster.kubectl("-n", "triptych-system", "delete", "secret", CA, "--ignore-not-found")
    for item in (
        secret("own", owner),
        secret("password", labels={}, kind="Opaque"),
        secret("labelled"),
        secret("owned", owner, labels={}),
    ):
        cluster.kubectl("create", "-f", "-", stdin=json.dumps(item))

    async def refuses() -> bool:
        return "with certificates of VLMServices" in create(cluster, secret("probe")).stderr

    asyncio.run(until(refuses, seconds=60, awaited="the policy of Secrets to be in force"))
    return cluster


def patch_secret(cluster: ControlPlane, name: str, *, dry_run: bool, change: Any) -> str:
    """Patch a Secret as the operator; returns the error, or the answer's data if it is accepted."""
    token = cluster.kubectl("-n", "triptych-system", "create", "token", "triptych-operator").stdout
    access = dataclasses.replace(cluster.access, token=token.strip(), certificate=None, key=None)
    path = f"/api/v1/namespaces/{SPACE}/secrets/{name}"

    async def ask() -> str:
        async with Client(access) as api:
            try:
                extra = {"dryRun": "All"} if dry_run else {}
                answer = await api.patch(path, change, kind=STRATEGIC, **extra)
            except ApiError as error:
                return str(error)
        return str(sorted(answer["data"]))

    return asyncio.run(ask())


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize("name", ["password", "labelled", "owned"])
def test_another_secret_is_not_read_by_a_patch(
    with_secrets: ControlPlane, name: str, dry_run: bool
):
    for change in (
        {},
        {"metadata": {"annotations": {"a": "b"}}},
        {"metadata": {"ownerReferences": [OWNER], "labels": CERTIFIED}},
    ):
        answer = patch_secret(with_secrets, name, dry_run=dry_run, change=change)
        assert "with certificates of VLMServices" in answer
    change = {"metadata": {"annotations": {"a": "b"}}}
    assert "tls.key" in patch_secret(with_secrets, "own", dry_run=dry_run, change=change)


def test_no_other_type_of_secret_is_created(with_secrets: ControlPlane):
    assert create(with_secrets, secret("new", OWNER)).returncode == 0
    token = secret("new", OWNER, kind="kubernetes.io/service-account-token")
    token["metadata"]["annotations"] = {"kubernetes.io/service-account.name": "default"}
    for item in (secret("new"), secret("new", OWNER, labels={}), token):
        refused = create(with_secrets, item)
        assert "with certificates of VLMServices" in refused.stderr
    away = secret("other", space="triptych-system", labels={}, kind="Opaque")
    assert "with certificates" in create(with_secrets, away).stderr
    own = create(with_secrets, {**away, "metadata": {**away["metadata"], "name": CA}})
    # another test's operator may have created it, which the API server finds after the policy
    assert own.returncode == 0 or "AlreadyExists" in own.stderr


def test_no_secret_of_a_service_is_read_or_deleted(with_secrets: ControlPlane):
    for verb in ("get", "list", "watch", "delete", "update"):
        asked = with_secrets.kubectl(
            "-n", SPACE, "auth", "can-i", verb, "secrets/own", f"--as={OPERATOR}", check=False
        )
        assert asked.stdout.strip() == "no"
