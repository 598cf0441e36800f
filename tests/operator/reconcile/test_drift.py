"""What others change in our objects is put back; what the API server adds by itself is left."""

from collections.abc import Callable
from typing import Any

import pytest

from support.fakes import FakeCluster
from support.world import World, body, pool
from vlm_operator import names
from vlm_operator.cluster import (
    CONFIG_MAP,
    DEPLOYMENT,
    EVENT,
    NETWORK_POLICY,
    ROLE,
    ROLE_BINDING,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
    Manifest,
)
from vlm_operator.errors import ClusterError

Change = Callable[[Manifest], Any]


def defaults(item: Manifest, new: bool) -> None:
    """Some of what a real API server adds to each kind."""
    del new
    spec = item.get("spec", {})
    if item["kind"] == "Deployment":
        spec.setdefault("progressDeadlineSeconds", 600)
        pod = spec["template"]["spec"]
        pod.setdefault("dnsPolicy", "ClusterFirst")
        pod.setdefault("restartPolicy", "Always")
        for container in pod["containers"]:
            container.setdefault("terminationMessagePath", "/dev/termination-log")
            latest = ":" not in container["image"]
            container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
            container.setdefault("livenessProbe", {}).setdefault("successThreshold", 1)
    if item["kind"] == "Service":
        spec.setdefault("clusterIP", f"10.0.0.{len(item['metadata']['name'])}")
        spec.setdefault("sessionAffinity", "None")


def sidecar(item: Manifest, new: bool) -> None:
    """A mutating webhook that injects a container into new Deployments."""
    if item["kind"] == "Deployment" and new:
        containers = item["spec"]["template"]["spec"]["containers"]
        if all(one["name"] != "mesh" for one in containers):
            containers.append({"name": "mesh", "image": "mesh:1"})


def world(*admission: Callable[[Manifest, bool], None], **pools: Any) -> World:
    found = World(body(**(pools or {"decode": pool(1)})))
    found.cluster.admission.extend(admission or (defaults,))
    found.converge()
    return found


def decode(found: World) -> str:
    return next(
        item["metadata"]["name"]
        for item in found.cluster.all(DEPLOYMENT)
        if item["metadata"]["labels"][names.LABEL_ROLE] == "decode"
    )


def pod(item: Manifest) -> Manifest:
    spec: Manifest = item["spec"]["template"]["spec"]
    return spec


CHANGES: dict[str, tuple[Kind, Change]] = {
    "a key in a Service's selector": (
        SERVICE, lambda item: item["spec"]["selector"].update(x="y")),
    "a key in a policy's podSelector": (
        NETWORK_POLICY, lambda item: item["spec"]["podSelector"]["matchLabels"].update(x="y")),
    "a rule in a policy": (
        NETWORK_POLICY, lambda item: item["spec"]["ingress"].append({})),
    "a peer in a policy's rule": (
        NETWORK_POLICY, lambda item: item["spec"]["ingress"][0]["from"].append(
            {"podSelector": {}})),
    "an external address of a Service": (
        SERVICE, lambda item: item["spec"].update(externalIPs=["192.0.2.1"])),
    "a pause": (DEPLOYMENT, lambda item: item["spec"].update(paused=True)),
    "the host's processes": (DEPLOYMENT, lambda item: pod(item).update(hostPID=True)),
    "a node selector": (DEPLOYMENT, lambda item: pod(item).update(nodeSelector={"nope": "x"})),
    "an init container": (
        DEPLOYMENT, lambda item: pod(item).update(initContainers=[{"name": "x", "image": "x"}])),
    "a container": (
        DEPLOYMENT, lambda item: pod(item)["containers"].append({"name": "x", "image": "x"})),
    "a volume": (
        DEPLOYMENT, lambda item: pod(item)["volumes"].append({"name": "x", "hostPath": {}})),
    "a container's field": (
        DEPLOYMENT, lambda item: pod(item)["containers"][0].update(lifecycle={"preStop": {}})),
    "a variable": (
        DEPLOYMENT, lambda item: pod(item)["containers"][0]["env"].append(
            {"name": "LD_PRELOAD", "value": "x"})),
    "a pod's label": (
        DEPLOYMENT, lambda item: item["spec"]["template"]["metadata"]["labels"].update(x="y")),
    "a pod's annotation": (
        DEPLOYMENT, lambda item: item["spec"]["template"]["metadata"].update(
            annotations={"x": "y"})),
    "a default of the API server": (DEPLOYMENT, lambda item: pod(item).update(dnsPolicy="None")),
    "a value of ours": (
        DEPLOYMENT, lambda item: pod(item)["containers"][0].update(image="other:1")),
    "a rule of the gateway's role": (
        ROLE, lambda item: item["rules"][0]["verbs"].append("delete")),
    "a subject of a binding": (
        ROLE_BINDING, lambda item: item["subjects"].append({"kind": "User", "name": "eve"})),
    "a file in the configuration": (CONFIG_MAP, lambda item: item["data"].update(theirs="1")),
    "the account's token": (
        SERVICE_ACCOUNT, lambda item: item.update(automountServiceAccountToken=True)),
}  # fmt: skip


def target(found: World, kind: Kind) -> str:
    if kind == DEPLOYMENT:
        return decode(found)
    role = "gateway" if kind in (ROLE, ROLE_BINDING, CONFIG_MAP) else "decode"
    return f"demo-{role}"


@pytest.mark.parametrize("name", CHANGES)
def test_what_others_change_is_put_back_and_told(name: str):
    kind, change = CHANGES[name]
    found = world()
    before = found.snapshot()
    found.cluster.edit(kind, "ns", target(found, kind), change)
    found.turn()
    assert found.snapshot() == before
    told = [item for item in found.cluster.all(EVENT) if item["reason"] == "ChildRepaired"]
    assert [item["message"].split(":")[0] for item in told] == [
        f"{kind.kind} {target(found, kind)}"
    ]
    writes = found.written()
    found.turn()
    found.turn()
    assert found.written() == writes, "and that is all"


@pytest.mark.parametrize("name", CHANGES)
def test_a_new_process_puts_it_back_too(name: str):
    kind, change = CHANGES[name]
    found = world()
    before = found.snapshot()
    found.cluster.edit(kind, "ns", target(found, kind), change)
    found.loop = found.new_loop()
    found.turn()
    assert found.snapshot() == before


@pytest.mark.parametrize("kind", [DEPLOYMENT, SERVICE, NETWORK_POLICY, CONFIG_MAP])
def test_labels_and_annotations_of_others_are_left_alone(kind: Kind):
    found = world()
    name = "demo-gateway"

    def change(item: Manifest) -> None:
        item["metadata"]["labels"]["theirs"] = "1"
        item["metadata"].setdefault("annotations", {})["theirs"] = "1"

    found.cluster.edit(kind, "ns", name, change)
    writes = found.written()
    found.turn()
    assert found.written() == writes
    (item,) = (one for one in found.cluster.all(kind) if one["metadata"]["name"] == name)
    assert item["metadata"]["labels"]["theirs"] == "1"
    assert item["metadata"]["annotations"]["theirs"] == "1"


@pytest.mark.parametrize("admission", [(defaults,), (defaults, sidecar)], ids=["plain", "webhook"])
def test_defaults_and_injections_are_no_drift_also_to_a_new_process(admission: Any):
    found = world(*admission)
    writes = found.written()
    found.loop = found.new_loop()
    for _ in range(3):
        found.turn()
    assert [item for item in found.cluster.writes[writes:] if item[1] != "VLMService"] == []


def test_an_idle_loop_asks_nothing():
    found = world(defaults)
    found.turn()
    asked = len(found.cluster.dry_runs)
    for _ in range(5):
        found.turn()
    assert len(found.cluster.dry_runs) == asked


def test_a_dry_run_leaves_nothing_behind():
    found = world(defaults)
    assert any(name.startswith("triptych-dry-run-") for _, name in found.cluster.dry_runs)
    assert not any("dry-run" in key[2] for key in found.cluster.made)


def test_a_webhook_that_always_adds_wins_and_is_written_once():
    def insists(item: Manifest, new: bool) -> None:
        if item["kind"] == "Deployment" and not new:
            pod(item)["schedulerName"] = "theirs"

    found = world(defaults)
    found.cluster.admission.append(insists)
    name = decode(found)
    found.cluster.edit(DEPLOYMENT, "ns", name, lambda item: pod(item).update(hostPID=True))
    found.turn()
    writes = found.written()
    for _ in range(5):
        found.turn()
    assert found.written() == writes
    (item,) = (one for one in found.cluster.all(DEPLOYMENT) if one["metadata"]["name"] == name)
    assert "hostPID" not in pod(item)
    assert pod(item)["schedulerName"] == "theirs"


def test_a_writer_that_keeps_adding_is_corrected_less_and_less_often():
    found = world(defaults)
    name = "demo-decode"
    for _ in range(20):
        found.cluster.edit(SERVICE, "ns", name, lambda item: item["spec"]["selector"].update(x="y"))
        found.turn()
    repairs = [item for item in found.cluster.writes if item[:3] == ("merge", "Service", name)]
    assert 5 <= len(repairs) < 12
    assert any(item["reason"] == "ChildContested" for item in found.cluster.all(EVENT))


class NoDryRuns(FakeCluster):
    """A namespace whose quota, or a webhook, refuses dry runs under other names."""

    async def apply(
        self, manifest: Manifest, *, manager: str, subresource: str = "", dry_run: bool = False
    ) -> Manifest:
        if dry_run and "dry-run" in manifest["metadata"]["name"]:
            raise ClusterError(403, "Forbidden", "exceeded quota")
        return await super().apply(
            manifest, manager=manager, subresource=subresource, dry_run=dry_run
        )


def test_without_dry_runs_selectors_are_still_exact_and_nothing_loops():
    found = World(body(decode=pool(1)))
    found.cluster = NoDryRuns(found.cluster.clock)
    found.cluster.admission.append(defaults)
    found.apply(body(decode=pool(1)))
    found.loop = found.new_loop()
    found.converge()
    before = found.snapshot()
    writes = found.written()
    found.turn()
    assert found.written() == writes
    found.cluster.edit(
        SERVICE, "ns", "demo-decode", lambda item: item["spec"]["selector"].update(x="y")
    )
    found.turn()
    assert found.snapshot() == before


def test_a_binding_of_version_0_1_is_made_anew_for_the_services_own_role():
    """Its role cannot be changed, and the ClusterRole that it names goes with the chart."""
    found = world(defaults)
    before = found.snapshot()

    def old(item: Manifest) -> None:
        item["roleRef"] = {**item["roleRef"], "kind": "ClusterRole", "name": "triptych-gateway"}
        item["metadata"]["annotations"]["triptych.dev/applied"] = "of-0-1"

    found.cluster.edit(ROLE_BINDING, "ns", "demo-gateway", old)
    found.cluster.remove(ROLE, "ns", "demo-gateway")
    found.loop = found.new_loop()
    found.turn()
    assert found.snapshot() == before
    assert not [item for item in found.cluster.all(EVENT) if item["type"] == "Warning"]
