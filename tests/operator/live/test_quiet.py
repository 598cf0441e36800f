"""Who has nothing to do writes nothing: idle services, the same manifest again, what was put right.

This holds for all services of the module, also those of earlier tests.
"""

import json
from typing import Any

import pytest

from support.live import Live
from support.world import body, external, pool

pytestmark = pytest.mark.cluster

TICK_SECONDS = 5.0  # in which each service has a turn without an event
TEMPLATE = {
    "metadata": {"labels": {"team": "vision"}, "annotations": {"example.com/note": "x"}},
    "spec": {
        "serviceAccountName": "reader",
        "shareProcessNamespace": True,
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one"}],
        "topologySpreadConstraints": [
            {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway"}
        ],
        "initContainers": [
            {"name": "first", "image": "tools:1"},
            {"name": "side", "image": "tools:1", "restartPolicy": "Always"},
        ],
        "containers": [
            {
                "name": "worker",
                "resources": {"claims": [{"name": "gpu"}]},
                "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
                "lifecycle": {"preStop": {"sleep": {"seconds": 1}}},
            },
            {
                "name": "other",
                "image": "tools:1",
                "ports": [{"containerPort": 8081}],
                "readinessProbe": {"httpGet": {"path": "/", "port": 8081}},
                "resources": {"limits": {"cpu": "1", "memory": "64Mi"}},
            },
        ],
        "volumes": [
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}},
            {"name": "any", "projected": {"sources": [{"configMap": {"name": "c"}}]}},
        ],
    },
}
AUTO = {"scaling": {"mode": "Auto", "minReplicas": 1, "maxReplicas": 4}}


def apply(live: Live, name: str, decode: dict[str, Any], *, pods: int) -> None:
    """A service with its pods, which find no node."""
    manifest = body({"slo": {"ttftP95Milliseconds": 2000}}, name=name, decode=decode)
    manifest["metadata"] = {"name": name, "namespace": "live"}
    live.apply(manifest)
    live.until(lambda: len(live.items("pods", name)) == pods, seconds=2)


@pytest.mark.parametrize("rounds", [1, pytest.param(12, marks=pytest.mark.full)])
def test_an_idle_operator_writes_nothing(live: Live, rounds: int):
    apply(live, "idle", pool(2), pods=3)
    apply(live, "follows", external(1, 4), pods=2)
    apply(live, "sizes", AUTO, pods=2)
    live.kubectl("-n", "live", "create", "serviceaccount", "reader", check=False)
    apply(live, "overlaid", pool(2, podTemplate=TEMPLATE), pods=3)
    settled(live)
    writes_nothing(live, rounds=rounds)


def test_a_pod_template_reaches_the_pods_as_it_is_rendered(live: Live):
    """What the API server adds to the user's parts is no difference: see the test above."""
    (pod, *_) = [
        item
        for item in live.items("pods", "overlaid")
        if item["metadata"]["labels"]["triptych.dev/role"] == "decode"
    ]
    assert pod["metadata"]["labels"]["team"] == "vision"
    spec = pod["spec"]
    assert spec["serviceAccountName"] == "reader"
    assert [item["name"] for item in spec["initContainers"]] == ["first", "side"]
    worker, other = spec["containers"]
    assert (worker["name"], other["name"]) == ("worker", "other")
    assert worker["resources"]["claims"] == [{"name": "gpu"}]
    assert {"name": "shm", "mountPath": "/dev/shm"} in worker["volumeMounts"]
    (spread,) = spec["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"]["triptych.dev/role"] == "decode"


def test_a_vlmpool_that_was_deleted_is_back_with_its_status(live: Live):
    apply(live, "righted", pool(2), pods=3)
    settled(live)
    # the watch event of a write may arrive before its answer: try more than once
    for _ in range(4):
        before = live.get("vlmp", "righted-decode")
        live.kubectl("-n", "live", "delete", "vlmp", "righted-decode")

        def back(before: dict[str, Any] = before) -> bool:
            return any(
                item["metadata"]["uid"] != before["metadata"]["uid"]
                and item.get("status") == before["status"]
                for item in live.items("vlmpools", "righted")
            )

        # sooner than the next turn is due, which would put it right as well
        live.until(back, seconds=0.3 * TICK_SECONDS, patience=0)
    settled(live)
    writes_nothing(live)


def test_applying_the_same_manifest_again_writes_nothing(live: Live):
    apply(live, "again", pool(), pods=2)
    settled(live)
    before = live.writes()
    live.kubectl("-n", "live", "annotate", "vlm", "again", "note=1")
    apply(live, "again", pool(), pods=2)
    writes_nothing(live)
    assert live.writes() == before


def settled(live: Live) -> None:
    """Wait until each service has a turn without a write."""
    while True:
        before = len(live.writes())
        let_turns_pass(live)
        if len(live.writes()) == before:
            return


def writes_nothing(live: Live, *, rounds: int = 1) -> None:
    """There is no write during several turns of each service."""
    before = live.writes()
    for _ in range(rounds):
        let_turns_pass(live)
    assert live.writes()[len(before) :] == []


def let_turns_pass(live: Live) -> None:
    """Wait until each service has had a turn.

    All have the same interval: after a mean of two turns, each service has had one.
    """
    # in this operator's namespace: other modules leave services in theirs
    services = json.loads(live.kubectl("-n", "live", "get", "vlm", "-o", "json"))["items"]
    enough = live.turns() + 2 * len(services)
    live.until(lambda: live.turns() >= enough, seconds=2 * TICK_SECONDS)
