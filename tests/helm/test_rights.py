"""The operator needs every right of the chart's ServiceAccount, and no other."""

import asyncio
import contextlib
import json
import pathlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import yaml

from vlm_local.controlplane import ControlPlane
from vlm_local.subprocesses import tied
from vlm_local.waiting import until

pytestmark = pytest.mark.cluster

ROOT = pathlib.Path(__file__).parents[2]
NAMESPACE = "rights"
USER = "system:serviceaccount:triptych-system:triptych-operator"
SERVICE = {
    "apiVersion": "triptych.dev/v1alpha1",
    "kind": "VLMService",
    "metadata": {"name": "demo", "namespace": NAMESPACE},
    "spec": {
        "model": {"uri": "pvc://shapes"},
        "identity": {"mode": "OperatorCA"},
        "pools": {
            "encoder": {
                "scaling": {"mode": "Manual", "replicas": 2},
                "variants": [{"name": "cpu", "nodeClassRef": {"name": "rights"}}],
            },
            "decode": {"scaling": {"mode": "Manual", "replicas": 1}},
        },
        # without nodes nothing becomes ready: only this strategy removes the old pods before that
        "rollout": {"strategy": "Recreate"},
    },
}
CACHED = {"uri": "hf://org/name", "cache": {"claim": {"size": "1Gi"}}}
CLASS = {
    "apiVersion": "triptych.dev/v1alpha1",
    "kind": "VLMNodeClass",
    "metadata": {"name": "rights"},
    "spec": {"nodeSelector": {"no-node": "has-this"}},
}
Right = tuple[str, str, str]

# Granted, but not used in this test, with reasons.
ELSEWHERE = {
    "create": "needed by the first server-side apply of an object, which is logged as patch",
    "pods patch": "the deletion cost, written once pods run",
    "pods/status patch": "the accepting gate, written once containers are ready",
    "vlmservices/finalizers update": "OwnerReferencesPermissionEnforcement requires it",
    "secrets update": "the operator replaces its CA after two thirds of a year",
    "certificates patch": "for services that name an issuer of cert-manager",
    "pods get": "held because it is granted to gateways",
    "roles delete": "objects of earlier versions are deleted",
    "configmaps delete": "objects of earlier versions are deleted",
    "rolebindings delete": "objects of earlier versions are deleted",
}


@contextlib.asynccontextmanager
async def operator(cluster: ControlPlane, folder: pathlib.Path) -> AsyncIterator[None]:
    """Run the operator with the ServiceAccount's token, for one namespace."""
    token = cluster.kubectl("-n", "triptych-system", "create", "token", "triptych-operator").stdout
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token.strip()}
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    with (folder / "operator.log").open("w") as log:
        command = (
            sys.executable, "-m", "vlm_operator", f"--kubeconfig={kubeconfig}",
            f"--namespace={NAMESPACE}", "--lease-namespace=triptych-system", "--identity=rights",
            "--bind=127.0.0.1", "--metrics-port=0",
        )  # fmt: skip
        process = await asyncio.create_subprocess_exec(*tied(command), stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            await process.wait()


async def no_other_operator(cluster: ControlPlane) -> None:
    """End the chart's pod, which runs and leads if other tests added nodes."""
    system = ("-n", "triptych-system")
    cluster.kubectl(*system, "scale", "deployment/triptych-operator", "--replicas=0")

    async def gone() -> bool:
        return not cluster.kubectl(*system, "get", "pods", "-o", "name").stdout.strip()

    await until(gone, seconds=60, every=0.5, awaited="the chart's operator to end")


def granted() -> set[Right]:
    """Every (group, resource, verb) of the operator's roles in install.yaml."""
    found = set()
    for item in yaml.safe_load_all((ROOT / "install.yaml").read_text()):
        if item["kind"] in ("Role", "ClusterRole") and item["metadata"]["name"] in (
            "triptych-system:triptych-operator",
            "triptych-operator-lease",
        ):
            for rule in item["rules"]:
                found |= {
                    (group, resource, verb)
                    for group in rule["apiGroups"]
                    for resource in rule["resources"]
                    for verb in rule["verbs"]
                }
    return found


def requests(cluster: ControlPlane, *, since: int) -> list[dict[str, Any]]:
    """Requests of the operator to the API server, from an offset in the audit log on."""
    events, _ = cluster.audited(since=since)
    # requests with an unknown token have no user name
    return [event for event in events if event["user"].get("username") == USER]


def idle_rights(events: list[dict[str, Any]]) -> set[str]:
    """Rights of the chart that these events do not use."""
    used = set()
    for event in events:
        where = event.get("objectRef", {})
        resource = "/".join(filter(None, (where.get("resource"), where.get("subresource"))))
        used.add((where.get("apiGroup", ""), resource, event["verb"]))
    return {
        f"{resource} {verb}"
        for group, resource, verb in granted() - used
        if verb not in ELSEWHERE and f"{resource} {verb}" not in ELSEWHERE
    }


async def test_no_right_is_missing_and_none_is_unused(
    installed: ControlPlane, tmp_path: pathlib.Path
) -> None:
    await no_other_operator(installed)
    installed.kubectl("create", "namespace", NAMESPACE)
    since = installed.audit_log.stat().st_size

    async def listed(kind: str, count: int) -> bool:
        text = installed.kubectl("-n", NAMESPACE, "get", kind, "-o", "name").stdout
        return len(text.split()) == count

    async def fetches(revision: str) -> bool:
        text = installed.kubectl("-n", NAMESPACE, "get", "jobs", "-o", "json").stdout
        jobs = json.loads(text)["items"]
        return len(jobs) == 1 and revision in json.dumps(jobs)

    async def classed() -> bool:
        text = installed.kubectl("get", "vlmnc", "rights", "-o", "jsonpath={.status.nodes}").stdout
        return text == "0"

    installed.kubectl("apply", "-f", "-", stdin=json.dumps(CLASS))
    async with operator(installed, tmp_path):
        await until(classed, seconds=20, awaited="the class's status")
        installed.kubectl("apply", "-f", "-", stdin=json.dumps(SERVICE))
        await until(lambda: listed("deployments", 3), seconds=40, awaited="three Deployments")
        await until(lambda: listed("pdb", 1), seconds=20, awaited="the encoders' PDB")
        patch = json.dumps({"spec": {"pools": {"encoder": None}}})
        installed.kubectl(
            "-n", NAMESPACE, "patch", "vlm", "demo", "--type=merge", f"--patch={patch}"
        )
        for kind, count in (("deployments", 2), ("pdb", 0), ("vlmp", 1)):
            await until(
                lambda kind=kind, count=count: listed(kind, count),
                seconds=30,
                every=0.5,
                awaited=f"the encoders' {kind} to be gone",
            )
        for digit in ("a", "b"):  # the claim and the Job of the first are deleted for the second
            change = json.dumps({"spec": {"model": {**CACHED, "revision": digit * 40}}})
            merge = ("--type=merge", f"--patch={change}")
            installed.kubectl("-n", NAMESPACE, "patch", "vlm", "demo", *merge)
            await until(
                lambda digit=digit: fetches(digit * 40), seconds=30, every=0.5, awaited="one Job"
            )
        await until(lambda: listed("pvc", 1), seconds=30, every=0.5, awaited="one claim")
        installed.kubectl("-n", NAMESPACE, "delete", "vlm", "demo", "--timeout=60s")

    events = requests(installed, since=since)
    refused = [
        (event["verb"], event["requestURI"])
        for event in events
        if event["responseStatus"]["code"] in (401, 403)
    ]
    assert not refused
    idle = idle_rights(events)
    assert not idle
