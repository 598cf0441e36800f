"""The operator's process on a real control plane without nodes: pods stay Pending."""

import json
from typing import Any

import pytest

from support.live import Live, anonymous, pass_time
from support.world import body, external, pool

pytestmark = pytest.mark.cluster

# the garbage collector looks for new kinds twice a minute, and ours are as old as the module
COLLECT_SECONDS = 25
NOBODY = "nobody"  # a node without a kubelet


def service(name: str, namespace: str = "live", **pools: Any) -> dict[str, Any]:
    manifest = body(name=name, **(pools or {"encoder": pool(), "decode": pool()}))
    manifest["metadata"] = {"name": name, "namespace": namespace}
    return manifest


def test_pods_exist_within_two_seconds_and_the_status_says_what_blocks(live: Live):
    live.apply(service("fresh"))
    live.until(lambda: len(live.items("pods", "fresh")) == 3, seconds=2)
    live.until(
        lambda: "no nodes available" in live.condition("fresh", "Ready").get("message", ""),
        seconds=2,
    )
    found = live.get("vlm", "fresh")
    assert found["metadata"]["finalizers"] == ["triptych.dev/drain"]
    assert "annotations" not in found["metadata"] or not [
        key for key in found["metadata"]["annotations"] if key.startswith("triptych.dev/")
    ]
    assert found["status"]["observedGeneration"] == 1
    printed = live.kubectl("-n", "live", "get", "vlm", "fresh")
    assert printed.splitlines()[0].split()[:5] == ["NAME", "READY", "MODEL", "ENC", "DEC"] or (
        "ENC" in printed
    )
    assert "0/1" in printed


def test_an_update_makes_another_revision_beside_the_old_one(live: Live):
    live.apply(service("update"))
    live.until(lambda: len(live.items("pods", "update")) == 3, seconds=2)
    changed = service("update")
    changed["spec"]["model"]["dtype"] = "Float32"
    live.apply(changed)
    live.until(lambda: len(live.items("deployments", "update")) == 5, seconds=2)

    def progress() -> str:
        found = live.condition("update", "RolloutProgressing")
        return str(found["message"]) if found.get("status") == "True" else ""

    # the new Deployments are known before their pods are
    live.until(lambda: progress() and "pods are being created" not in progress(), seconds=2)
    # the scheduler may not have reported yet that there is no node
    message = progress()
    assert "not ready yet" in message or "no nodes available" in message, message


def test_kubectl_scale_reaches_the_deployment_of_an_external_pool(live: Live):
    live.apply(service("scale", decode=external(1, 4)))
    live.until(lambda: len(live.items("vlmpools", "scale")) == 1, seconds=2)
    live.until(lambda: live.get("vlmp", "scale-decode").get("status"), seconds=2)
    live.kubectl("-n", "live", "scale", "vlmp/scale-decode", "--replicas=3")

    def decode() -> list[int]:
        found = live.items("deployments", "scale")
        return [i["spec"]["replicas"] for i in found if "-decode-" in i["metadata"]["name"]]

    live.until(lambda: decode() == [3], seconds=2)
    live.kubectl("-n", "live", "scale", "vlmp/scale-decode", "--replicas=9")
    live.until(lambda: decode() == [4], seconds=2)
    assert live.get("vlmp", "scale-decode")["spec"]["replicas"] == 9
    # pods that never served go at once
    live.kubectl("-n", "live", "scale", "vlmp/scale-decode", "--replicas=1")
    live.until(lambda: decode() == [1], seconds=2)


def test_a_manual_pool_is_put_back_with_an_event(live: Live):
    live.apply(service("manual", decode=pool(2)))
    live.until(lambda: len(live.items("vlmpools", "manual")) == 1, seconds=2)
    live.kubectl("-n", "live", "scale", "vlmp/manual-decode", "--replicas=5")
    live.until(lambda: live.get("vlmp", "manual-decode")["spec"]["replicas"] == 2, seconds=5)

    def told() -> list[dict[str, Any]]:
        events = live.kubectl(
            "-n", "live", "get", "events", "--field-selector", "reason=ScalePutBack", "-o", "json"
        )
        return [
            item
            for item in json.loads(events)["items"]
            if item["involvedObject"]["name"] == "manual"
        ]

    live.until(told, seconds=2)
    (event,) = told()
    assert "use mode External" in event["message"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("deployment", "drift-gateway"),
        ("service", "drift-decode"),
        ("configmap", "drift-gateway"),
        ("serviceaccount", "drift-decode"),
        ("rolebinding", "drift-gateway"),
        ("networkpolicy", "drift-decode"),
        ("poddisruptionbudget", "drift-decode"),
        ("vlmpool", "drift-decode"),
    ],
)
def test_a_deleted_child_is_back_within_five_seconds(live: Live, kind: str, name: str):
    live.apply(service("drift", decode=pool(2)))
    live.until(lambda: len(live.items("pods", "drift")) == 3, seconds=2)
    uid = live.get(kind, name)["metadata"]["uid"]
    live.kubectl("-n", "live", "delete", kind, name, "--wait=false")

    def back() -> bool:
        found = live.kubectl(
            "-n", "live", "get", kind, name, "-o", "jsonpath={.metadata.uid}", check=False
        )
        return found not in ("", uid)

    live.until(back, seconds=5)


def test_an_edited_child_is_put_back_within_five_seconds(live: Live):
    live.apply(service("edited", decode=pool(1)))
    live.until(lambda: len(live.items("pods", "edited")) == 2, seconds=2)
    # under our item's own name, which apply alone could not undo
    patch = {"spec": {"ports": [{"name": "http", "port": 81}]}}
    text = json.dumps(patch)
    live.kubectl("-n", "live", "patch", "svc", "edited-gateway", "-p", text, "--type=merge")

    def ports() -> list[int]:
        found = live.get("service", "edited-gateway")["spec"]["ports"]
        return [item["port"] for item in found]

    live.until(lambda: ports() == [80], seconds=5)


def test_an_object_of_another_owner_is_a_conflict_and_is_not_changed(live: Live):
    live.kubectl("-n", "live", "create", "configmap", "taken-gateway", "--from-literal=a=1")
    live.apply(service("taken"))
    live.until(
        lambda: live.condition("taken", "Stalled").get("reason") == "NameConflict", seconds=5
    )
    theirs = live.get("configmap", "taken-gateway")
    assert theirs["data"] == {"a": "1"}
    assert "ownerReferences" not in theirs["metadata"]


def test_a_refused_affinity_names_its_field_and_corrected_is_as_if_never_wrong(live: Live):
    def placed(name: str, affinity: dict[str, Any] | None) -> dict[str, Any]:
        place = {} if affinity is None else {"affinity": affinity}
        return service(name, decode=pool(variants=[{"name": "v", "placement": place}]))

    wrong = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"no": "such"}}}
    live.apply(placed("wrong", wrong))
    live.until(lambda: live.condition("wrong", "Accepted").get("status") == "False", seconds=5)
    message = live.condition("wrong", "Accepted")["message"]
    assert message.startswith("spec.pools.decode.variants[v]: ")
    assert live.items("deployments", "wrong") == []
    live.apply(placed("wrong", None))
    live.apply(placed("right", None))
    live.until(lambda: len(live.items("pods", "wrong")) == 2, seconds=5)
    live.until(lambda: len(live.items("pods", "right")) == 2, seconds=5)

    def plain(name: str) -> str:
        kinds = "deployments,services,configmaps,serviceaccounts,networkpolicies,rolebindings"
        found: list[dict[str, Any]] = [
            {key: item.get(key) for key in ("kind", "data", "roleRef")}
            | {"name": item["metadata"]["name"], "labels": item["metadata"]["labels"]}
            | {"template": item.get("spec", {}).get("template")}
            for item in live.items(kinds, name)
        ]
        return anonymous(found, name)

    assert plain("wrong") == plain("right")


def test_a_cluster_without_image_volumes_refuses_an_oci_model_with_the_reason(live: Live):
    """Kubernetes 1.34 has them behind a feature gate, which is off here."""
    manifest = body(
        {"model": {"uri": "oci://registry.example.com/m:1"}}, name="image", decode=pool()
    )
    manifest["metadata"]["namespace"] = "live"
    live.apply(manifest)
    live.until(lambda: live.condition("image", "Accepted").get("status") == "False", seconds=5)
    accepted = live.condition("image", "Accepted")
    assert accepted["reason"] == "PodTemplateRefused"
    assert "image volumes" in accepted["message"]
    assert "ImageVolume" in accepted["message"]
    live.kubectl("-n", "live", "delete", "vlm", "image")


def test_an_unknown_field_of_a_pod_template_is_refused_before_pods_change(live: Live):
    manifest = body(name="unknown", decode=pool(podTemplate={"spec": {"runtimeClas": "nvidia"}}))
    manifest["metadata"]["namespace"] = "live"
    live.apply(manifest)

    def refused() -> bool:
        conditions = live.get("vlm", "unknown").get("status", {}).get("conditions", [])
        accepted = next((item for item in conditions if item["type"] == "Accepted"), {})
        return (
            accepted.get("reason") == "PodTemplateRefused" and "runtimeClas" in accepted["message"]
        )

    live.until(refused, seconds=5)
    assert live.items("pods", "unknown") == []
    live.kubectl("-n", "live", "delete", "vlm", "unknown")


@pytest.mark.parametrize("cascade", ["background", "foreground"])
def test_deletion_ends_clean(live: Live, cascade: str):
    live.apply(service(cascade))
    live.until(lambda: len(live.items("pods", cascade)) == 3, seconds=2)
    live.kubectl("-n", "live", "delete", "vlm", cascade, f"--cascade={cascade}", "--timeout=30s")
    kinds = "deployments,pods,services,configmaps,serviceaccounts,networkpolicies,vlmpools"
    live.until(lambda: live.items(kinds, cascade) == [], seconds=COLLECT_SECONDS)


def test_deleting_the_namespace_ends_clean(live: Live):
    live.apply(service("gone", "live-gone"))
    live.until(lambda: len(live.items("pods", "gone", "live-gone")) == 3, seconds=2)
    live.kubectl("delete", "namespace", "live-gone", "--timeout=60s")
    assert live.kubectl("get", "ns", "live-gone", "--ignore-not-found") == ""


def test_a_killed_operator_takes_over_what_it_left(live: Live):
    live.apply(service("killed"))
    live.kill()
    live.start()
    live.until(lambda: len(live.items("pods", "killed")) == 3, seconds=20)


@pytest.mark.parametrize("left", ["in the middle", "before its first look"])
def test_a_killed_operator_resumes_the_drain_of_a_deleted_service(live: Live, left: str):
    name = "left-" + left.replace(" ", "-")[:6].strip("-")
    live.apply(service(name))
    live.until(lambda: len(live.items("pods", name)) == 3, seconds=2)
    gateway = next(
        item["metadata"]["name"]
        for item in live.items("pods", name)
        if item["metadata"]["labels"]["triptych.dev/role"] == "gateway"
    )
    _hold(live, gateway)
    if left == "before its first look":
        live.kill()
    live.kubectl("-n", "live", "delete", "vlm", name, "--wait=false")
    if left == "in the middle":
        live.until(lambda: live.condition(name, "Ready").get("reason") == "Deleting", seconds=2)
        live.kill()
    live.start()
    live.until(lambda: live.condition(name, "Ready").get("reason") == "Deleting", seconds=5)
    pass_time(3.0)
    # the gateway's Deployment went first, and everything else waits for its last pod
    assert live.get("vlm", name)["metadata"]["finalizers"] == ["triptych.dev/drain"]
    left_over = live.items("deployments", name)
    kept = {item["metadata"]["labels"]["triptych.dev/role"] for item in left_over}
    assert kept == {"encoder", "decode"}
    _end_pod(live, gateway)
    live.until(
        lambda: live.kubectl("-n", "live", "get", "vlm", name, "--ignore-not-found") == "",
        seconds=5,
    )
    live.until(lambda: live.items("deployments,pods,vlmpools", name) == [], seconds=COLLECT_SECONDS)


def _hold(live: Live, pod: str) -> None:
    """Keep a pod while it is being deleted, as one with open streams keeps itself.

    It is bound to a node where no kubelet ends it: Kubernetes collects pods that have no node.
    """
    target = {"apiVersion": "v1", "kind": "Node", "name": NOBODY}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod}, "target": target}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NOBODY}}
    live.apply(node | {"spec": {"unschedulable": True}})
    path = f"/api/v1/namespaces/live/pods/{pod}/binding"
    live.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(binding))


def _end_pod(live: Live, pod: str) -> None:
    """End the pod, as its kubelet does."""
    live.kubectl("-n", "live", "delete", "pod", pod, "--force", "--grace-period=0")
    live.kubectl("delete", "node", NOBODY)
