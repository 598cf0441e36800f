"""The claim and the Job of `model.cache` on a real API server, without nodes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.live import Live, pass_time
from support.world import body, pool

pytestmark = pytest.mark.cluster


def cached(name: str, revision: str, **claim: Any) -> dict[str, Any]:
    cache = {"claim": {"size": "1Gi", **claim}}
    model = {"uri": "hf://org/name", "revision": revision * 40, "cache": cache}
    manifest = body({"model": model}, name=name, decode=pool())
    return manifest | {"metadata": {"name": name, "namespace": "live"}}


def listed(live: Live, kind: str, name: str) -> list[str]:
    return [item["metadata"]["name"] for item in live.items(kind, name)]


def test_a_download_is_asked_for_once_and_no_pod_before_it(live: Live):
    live.apply(cached("fetched", "a"))
    live.until(lambda: len(live.items("jobs", "fetched")) == 1, seconds=5)
    (claim,) = live.items("pvc", "fetched")
    (job,) = live.items("jobs", "fetched")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for item in (claim, job):
        (owner,) = item["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("VLMService", "fetched")
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["FailJob", "Ignore"]
    live.until(lambda: len(live.items("pods", "fetched")) == 1, seconds=10)
    assert {d["spec"]["replicas"] for d in live.items("deployments", "fetched")} == {0}
    live.until(
        lambda: live.condition("fetched", "ModelReady").get("reason") == "ClaimPending", seconds=10
    )
    assert len(live.items("netpol", "fetched")) == 3
    before = len(live.writes())
    pass_time(12)
    made = [write for write in live.writes()[before:] if write[1] != "vlmservices"]
    assert [str(one) for one in made] == [], "the claim and the Job are written once"


def test_a_deleted_job_is_made_again_and_another_revision_drops_the_first(live: Live):
    live.apply(cached("retried", "a"))
    live.until(lambda: len(live.items("jobs", "retried")) == 1, seconds=5)
    (job,) = live.items("jobs", "retried")
    name = job["metadata"]["name"]
    live.kubectl("-n", "live", "delete", "job", name)
    live.until(
        lambda: (
            [
                item["metadata"]["uid"] != job["metadata"]["uid"]
                for item in live.items("jobs", "retried")
            ]
            == [True]
        ),
        seconds=10,
    )
    live.apply(cached("retried", "b"))
    live.until(lambda: name not in listed(live, "jobs,pvc", "retried"), seconds=15)
    assert len(listed(live, "jobs", "retried")) == len(listed(live, "pvc", "retried")) == 1


def test_a_claim_of_somebody_else_is_not_used(live: Live):
    live.apply(cached("mine", "a"))
    live.until(lambda: len(live.items("jobs", "mine")) == 1, seconds=5)
    (name,) = listed(live, "pvc", "mine")
    live.kubectl("-n", "live", "delete", "vlm", "mine", "--timeout=60s")
    live.until(lambda: not listed(live, "jobs,pvc", "mine"), seconds=20)
    theirs = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name, "namespace": "live"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    live.kubectl("create", "-f", "-", stdin=json.dumps(theirs))
    live.apply(cached("mine", "a"))
    live.until(
        lambda: live.condition("mine", "Stalled").get("reason") == "NameConflict", seconds=10
    )
    assert name in live.condition("mine", "Stalled")["message"]
    live.kubectl("-n", "live", "delete", "pvc", name, "--wait=false")
    live.until(
        lambda: live.condition("mine", "Stalled").get("status") == "False", seconds=20, patience=90
    )
