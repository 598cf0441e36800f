"""What others change in our objects, with the defaults and the merge rules of a real API server."""

import json
from typing import Any

import pytest

from support.live import Live, pass_time
from support.world import body, pool

pytestmark = pytest.mark.cluster

PROMISED = 10.0  # seconds, of a quiet machine
TICK_SECONDS = 5.0
SIDECAR = {"name": "theirs", "image": "theirs:1"}
POD = "/spec/template/spec"
# what is changed: kind, name, JSON patch
CHANGES: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "a selector": (
        "service", "righted-gateway", [{"op": "add", "path": "/spec/selector/x", "value": "y"}]),
    "a policy": (
        "networkpolicy", "righted-decode",
        [{"op": "add", "path": "/spec/podSelector/matchLabels/x", "value": "y"}]),
    "a rule of a policy": (
        "networkpolicy", "righted-decode", [{"op": "add", "path": "/spec/ingress/-", "value": {}}]),
    "a pause": ("deployment", "decode", [{"op": "add", "path": "/spec/paused", "value": True}]),
    "a pod template": (
        "deployment", "decode",
        [
            {"op": "add", "path": f"{POD}/hostPID", "value": True},
            {"op": "add", "path": f"{POD}/nodeSelector", "value": {"nope": "x"}},
            {"op": "add", "path": f"{POD}/initContainers", "value": [{**SIDECAR, "name": "x"}]},
            {"op": "add", "path": f"{POD}/containers/-", "value": SIDECAR},
            {"op": "add", "path": f"{POD}/volumes/-", "value": {"name": "x", "emptyDir": {}}},
            {"op": "add", "path": f"{POD}/containers/0/stdin", "value": True},
            {"op": "add", "path": "/spec/template/metadata/annotations", "value": {"x": "y"}},
        ]),
    "a binding": (
        "rolebinding", "righted-gateway",
        [{"op": "add", "path": "/subjects/-", "value": {"kind": "User", "name": "eve",
          "apiGroup": "rbac.authorization.k8s.io"}}]),
    "a budget": (
        "poddisruptionbudget", "righted-decode",
        [{"op": "replace", "path": "/spec/maxUnavailable", "value": "100%"}]),
}  # fmt: skip


@pytest.fixture(scope="module")
def righted(live: Live) -> Live:
    """A service whose pods find no node, with nothing left to do."""
    manifest = body(name="righted", decode=pool(2))
    manifest["metadata"] = {"name": "righted", "namespace": "live"}
    live.apply(manifest)
    live.until(lambda: len(live.items("pods", "righted")) == 3, seconds=PROMISED)
    settled(live)
    return live


@pytest.mark.parametrize("name", CHANGES)
def test_what_others_change_is_put_back(righted: Live, name: str):
    kind, target, change = CHANGES[name]
    if target == "decode":
        target = decode(righted)
    before = parts(righted.get(kind, target))
    patch = ("-n", "live", "patch", kind, target, "--type=json", f"--patch={json.dumps(change)}")
    righted.kubectl(*patch)
    righted.until(lambda: parts(righted.get(kind, target)) == before, seconds=PROMISED)
    settled(righted)
    assert parts(righted.get(kind, target)) == before


def test_labels_of_others_are_left_alone(righted: Live):
    righted.kubectl("-n", "live", "label", "service", "righted-gateway", "theirs=1")
    righted.kubectl("-n", "live", "annotate", "deployment", decode(righted), "theirs=1")
    before = righted.writes()
    pass_time(TICK_SECONDS + 1)
    assert righted.writes()[len(before) :] == []
    assert righted.get("service", "righted-gateway")["metadata"]["labels"]["theirs"] == "1"


def test_a_foreign_pod_is_no_replica(righted: Live):
    def replicas() -> int:
        return int(righted.get("vlmp", "righted-decode")["status"]["replicas"])

    # a pod of a template that was put back stays while no other pod is ready: no fixed number
    before = replicas()
    labels = {"triptych.dev/service": "righted", "triptych.dev/role": "decode"}
    container = {"name": "worker", "image": "theirs:1"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "impostor", "namespace": "live", "labels": labels},
        "spec": {"containers": [container]},
    }
    righted.apply(pod)

    def told() -> list[str]:
        text = righted.kubectl(
            "-n", "live", "get", "events", "--field-selector", "reason=ForeignObject", "-o", "json"
        )
        return [item["message"] for item in json.loads(text)["items"]]

    righted.until(told, seconds=PROMISED)
    assert told()[0].startswith("Pod impostor:")
    assert replicas() == before
    righted.kubectl("-n", "live", "delete", "pod", "impostor", "--grace-period=0", "--force")


def decode(live: Live) -> str:
    return next(
        item["metadata"]["name"]
        for item in live.items("deployments", "righted")
        if item["metadata"]["labels"]["triptych.dev/role"] == "decode"
    )


def parts(item: dict[str, Any]) -> dict[str, Any]:
    """What of an object is compared exactly."""
    return {key: value for key, value in item.items() if key not in ("metadata", "status")}


def settled(live: Live) -> None:
    """Wait until a tick, and a bit, passes without a write."""
    while True:
        before = len(live.writes())
        pass_time(TICK_SECONDS + 1)
        if len(live.writes()) == before:
            return
