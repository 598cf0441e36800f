"""`model.cache`: one download into a claim; no pod of a revision runs before its model is there."""

import copy
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings

from support.fakes import run_downloads
from support.fakes.downloads import GATED
from support.world import World, body, empty, external, kstatus, pool, rps, service, specs
from vlm_operator import names
from vlm_operator.autoscale.decide import Memory
from vlm_operator.cluster import CLAIM, DEPLOYMENT, JOB, NETWORK_POLICY, POD, VLM_SERVICE, Manifest
from vlm_operator.names import Role
from vlm_operator.observe import pod_states
from vlm_operator.plan.model_cache import plan_cache
from vlm_operator.pods.parts import Images
from vlm_operator.reconcile.decisions import Options, TurnPlan, plan_turn
from vlm_operator.state import Observed
from vlm_operator.state.cluster_view import DownloadProgress

MODEL: dict[str, Any] = {
    "uri": "hf://org/name",
    "revision": "a" * 40,
    "cache": {"claim": {"size": "50Gi"}},
}
NEXT = {**MODEL, "revision": "b" * 40}


def cached(model: dict[str, Any] | None = None, **pools: Any) -> Manifest:
    return body({"model": model or MODEL}, **pools)


def owned(world: World) -> list[tuple[str, str]]:
    return [(k.kind, i["metadata"]["name"]) for k in (CLAIM, JOB) for i in world.cluster.all(k)]


def names_of(world: World, kind: Any) -> list[str]:
    return [item["metadata"]["name"] for item in world.cluster.all(kind)]


def downloaded(world: World) -> World:
    """The service after its model was downloaded and all pods have started."""
    world.converge()
    run_downloads(world.cluster, end=True)
    world.converge(turns=40)
    return world


def workers(world: World) -> list[Manifest]:
    roles = [role.value for role in Role]
    pods = world.cluster.all(POD)
    return [pod for pod in pods if pod["metadata"]["labels"].get(names.LABEL_ROLE) in roles]


# laws


def after(first: TurnPlan, *, complete: bool) -> Observed:
    """The cluster right after a plan was carried out, with a complete or a new Job."""
    children = {
        (item["kind"], item["metadata"]["name"]): json.loads(json.dumps(item))
        for item in first.plan.objects
    }
    for role in first.service.spec.pools.present:
        key = (names.KIND_POOL, names.child(first.service.name, role))
        children[key]["spec"]["replicas"] = first.pool_replicas[role]
    for (kind, _), item in children.items():
        if kind == JOB.kind and complete:
            item["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
        if kind == CLAIM.kind:
            item["status"] = {"phase": "Bound"}
    return dataclasses.replace(empty(), children=children)


def planned(manifest: Manifest, observed: Observed | None = None) -> TurnPlan:
    return plan_turn(service(manifest), observed or empty(), Memory(), options=Options())


def replicas(plan: TurnPlan) -> list[int]:
    items = plan.plan.objects
    return [item["spec"]["replicas"] for item in items if item["kind"] == DEPLOYMENT.kind]


def with_cache(manifest: Manifest) -> Manifest:
    found = copy.deepcopy(manifest)
    found["spec"]["model"] = MODEL
    return found


@given(specs())
@settings(max_examples=40, deadline=None)
def test_no_pod_is_asked_for_until_the_model_is_complete_and_planning_is_stable(manifest: Manifest):
    manifest = with_cache(manifest)
    first = planned(manifest)
    assert first.plan == planned(manifest).plan
    assert replicas(first)
    assert not any(replicas(first))
    again = planned(manifest, after(first, complete=False))
    assert not any(replicas(again))
    assert again.plan.named == first.plan.named
    stopped = manifest["spec"].get("stopped", False)
    assert first.held
    assert first.step.done == stopped
    done = planned(manifest, after(first, complete=not stopped))
    assert done.held == stopped
    assert any(replicas(done)) != stopped


@given(specs())
@settings(max_examples=40, deadline=None)
def test_the_job_asks_for_no_device_and_no_worker_is_selected_in_its_place(manifest: Manifest):
    manifest = with_cache({**manifest, "spec": {**manifest["spec"], "stopped": False}})
    found = planned(manifest).plan.objects
    job = next(item for item in found if item["kind"] == JOB.kind)
    labels = job["spec"]["template"]["metadata"]["labels"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    resources = container["resources"]
    assert {*resources["requests"], *resources["limits"]} <= {"cpu", "memory"}
    for item in found:
        spec = item.get("spec", {})
        selector = spec.get("selector") or spec.get("podSelector") or {}
        wanted = selector.get("matchLabels", selector)
        if item["kind"] != "NetworkPolicy" and wanted:
            assert any(labels.get(key) != value for key, value in wanted.items()), item["kind"]


# a new service


def test_a_new_service_downloads_first_and_then_starts_its_pods():
    world = World(cached(decode=pool(2)))
    world.converge()
    assert world.deployments() == {"demo-decode": 0, "demo-gateway": 0}
    assert len(owned(world)) == 2
    run_downloads(world.cluster)
    world.converge()
    assert workers(world) == []
    assert rps(world) == "F/T/F"
    assert world.condition("Ready")["reason"] == "WaitsForModel"
    assert "downloads it" in world.condition("Ready")["message"]
    assert world.condition("ModelReady")["reason"] == "Downloading"
    run_downloads(world.cluster, end=True)
    world.converge()
    assert world.deployments() == {"demo-decode": 2, "demo-gateway": 1}
    assert world.condition("ModelReady")["status"] == "True"
    assert kstatus(world.cluster.all(VLM_SERVICE)[0]) == "Current"
    for pod in workers(world):
        (volume,) = [v for v in pod["spec"]["volumes"] if v["name"] == "triptych-model"]
        claim = names_of(world, CLAIM)[0]
        assert volume["persistentVolumeClaim"] == {"claimName": claim, "readOnly": True}
        assert "--model=/models/model/checkpoint" in pod["spec"]["containers"][0]["args"]
        assert not any(e["name"] == "HF_TOKEN" for e in pod["spec"]["containers"][0]["env"])


def test_the_claim_and_the_job_are_as_the_manifest_says():
    claim = {"size": "1Ti", "storageClassName": "fast", "accessModes": ["ReadWriteOnce"]}
    template = {"spec": {"containers": [{"name": "fetch", "env": [{"name": "A", "value": "b"}]}]}}
    cache = {"claim": claim, "podTemplate": template}
    model = {**MODEL, "credentialsSecretRef": {"name": "hub"}, "cache": cache}
    world = World(body({"model": model, "imagePullSecrets": [{"name": "pull"}]}))
    world.converge()
    (made,) = world.cluster.all(CLAIM)
    assert made["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "1Ti"}},
        "storageClassName": "fast",
    }
    (job,) = world.cluster.all(JOB)
    assert job["metadata"]["name"] == made["metadata"]["name"]
    pod = job["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    assert pod["automountServiceAccountToken"] is False
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    (container,) = pod["containers"]
    env = {item["name"]: item for item in container["env"]}
    assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    assert env["A"]["value"] == "b"
    assert f"--model-revision={'a' * 40}" in container["args"]


def test_the_progress_is_told_in_steps_and_keeps_the_deadline_away():
    world = World(cached())
    world.converge()
    run_downloads(world.cluster)
    (pod,) = [p for p in world.cluster.all(POD) if p["metadata"]["name"].startswith("demo-model")]

    def told(share: float, *, left: float | None, checking: bool = False) -> str:
        done = int(share * 16 * 2**30)
        progress = DownloadProgress(done, 16 * 2**30, checking, left)
        world.scraper.progress[pod["metadata"]["name"]] = progress
        world.turn(seconds=500)
        assert rps(world) == "F/T/F"
        message: str = world.condition("ModelReady")["message"]
        assert message in world.condition("Ready")["message"]
        return message.partition(": ")[2]

    assert told(0.621, left=38.2) == "60 % of 16.0 GiB, 40 s left"
    assert told(0.639, left=31.0) == "60 % of 16.0 GiB, 40 s left"
    assert told(0.701, left=1500) == "70 % of 16.0 GiB, 25 min left"
    assert told(0.801, left=None) == "80 % of 16.0 GiB"
    assert told(0.301, left=None, checking=True) == "30 % of 16.0 GiB are checked"
    world.turn(seconds=700)
    assert rps(world) == "F/F/T", "no byte for longer than the deadline"


def test_a_download_that_reports_nothing_has_no_deadline():
    world = World(cached())
    world.converge()
    run_downloads(world.cluster)
    world.turn(seconds=7200)
    assert rps(world) == "F/T/F"


# another revision


def test_old_pods_stay_at_full_strength_until_the_new_revision_is_downloaded():
    world = downloaded(World(cached(decode=pool(2))))
    before = {pod["metadata"]["uid"] for pod in workers(world)}
    old = names_of(world, CLAIM)
    world.apply(cached(NEXT, decode=pool(2)))
    world.converge()
    assert {pod["metadata"]["uid"] for pod in workers(world)} == before
    assert len(names_of(world, CLAIM)) == len(names_of(world, JOB)) == 2
    assert rps(world) == "T/T/F"
    assert world.condition("RolloutProgressing")["reason"] == "WaitsForModel"
    run_downloads(world.cluster, end=True)
    world.converge(turns=60)
    assert not before & {pod["metadata"]["uid"] for pod in workers(world)}
    assert len(workers(world)) == 3
    assert len(names_of(world, CLAIM)) == len(names_of(world, JOB)) == 1
    assert names_of(world, CLAIM) != old


def test_the_serving_revision_is_scaled_during_a_download():
    world = downloaded(World(cached(decode=external(1, 4))))
    world.apply(cached(NEXT, decode=external(1, 4)))
    world.converge()
    world.scale("decode", 3)
    world.converge()
    assert world.deployments() == {"demo-decode": 3, "demo-gateway": 1}
    assert world.condition("ModelReady")["status"] == "False"


def test_a_revision_that_was_never_downloaded_is_dropped_for_the_next_one():
    world = World(cached(decode=pool()))
    world.converge()
    first = names_of(world, JOB)
    world.apply(cached(NEXT, decode=pool()))
    world.converge()
    assert not set(first) & {*names_of(world, JOB), *names_of(world, CLAIM)}
    assert world.deployments() == {"demo-decode": 0, "demo-gateway": 0}
    run_downloads(world.cluster, end=True)
    world.converge()
    assert world.deployments() == {"demo-decode": 1, "demo-gateway": 1}


def test_a_service_that_gets_a_cache_keeps_its_pods_and_their_way_to_the_hub():
    plain = {key: value for key, value in MODEL.items() if key != "cache"}
    world = World(cached(plain, decode=pool()))
    world.converge()
    before = {pod["metadata"]["uid"] for pod in workers(world)}

    def hub_ports(name: str) -> bool:
        (policy,) = [p for p in world.cluster.all(NETWORK_POLICY) if p["metadata"]["name"] == name]
        return any({"protocol": "TCP", "port": 443} in r["ports"] for r in policy["spec"]["egress"])

    world.apply(cached(decode=pool()))
    world.converge()
    assert {pod["metadata"]["uid"] for pod in workers(world)} == before
    assert hub_ports("demo-decode")
    run_downloads(world.cluster, end=True)
    world.converge(turns=60)
    assert not before & {pod["metadata"]["uid"] for pod in workers(world)}
    assert not hub_ports("demo-decode")
    assert hub_ports("demo-model")


def test_a_service_without_its_cache_drops_the_claim_after_the_rollout():
    world = downloaded(World(cached(decode=pool())))
    world.apply(body({"model": {"uri": "pvc://shapes"}}, decode=pool()))
    world.turn()
    assert len(owned(world)) == 2
    world.converge(turns=60)
    assert owned(world) == []
    assert "ModelReady" not in {item["type"] for item in world.status["conditions"]}


# failures


def test_a_failed_download_says_why_and_begins_again_when_its_job_is_deleted():
    world = World(cached())
    world.converge()
    run_downloads(world.cluster, end=True, error=GATED)
    world.converge()
    assert rps(world) == "F/F/T"
    assert kstatus(world.cluster.all(VLM_SERVICE)[0]) == "Failed"
    (job,) = names_of(world, JOB)
    message = world.condition("ModelReady")["message"]
    assert world.condition("Stalled")["reason"] == "DownloadFailed"
    assert message == (
        f"Job {job}: hf://org/name: the model is gated; accept its licence on the hub, and give "
        "a token (HF_TOKEN, in a VLMService, x), then delete the Job: "
        f"kubectl -n ns delete job {job}"
    )
    world.cluster.remove(JOB, "ns", job)
    world.converge()
    assert names_of(world, JOB) == [job]
    assert rps(world) == "F/T/F"
    run_downloads(world.cluster, end=True)
    world.converge()
    assert rps(world) == "T/F/F"


def test_another_pod_template_replaces_a_failed_job_but_not_a_complete_one():
    mirror = {"name": "HF_ENDPOINT", "value": "https://mirror"}
    template = {"spec": {"containers": [{"name": "fetch", "env": [mirror]}]}}
    world = World(cached())
    world.converge()
    run_downloads(world.cluster, end=True, error=GATED)
    world.converge()
    before = world.cluster.all(JOB)[0]["metadata"]["uid"]
    model = {**MODEL, "cache": {**MODEL["cache"], "podTemplate": template}}
    world.apply(cached(model))
    world.converge()
    (job,) = world.cluster.all(JOB)
    assert job["metadata"]["uid"] != before
    assert mirror in job["spec"]["template"]["spec"]["containers"][0]["env"]
    run_downloads(world.cluster, end=True)
    world.converge()
    world.apply(cached())
    world.converge()
    assert world.cluster.all(JOB)[0]["metadata"]["uid"] == job["metadata"]["uid"]


def test_a_new_job_waits_until_no_pod_writes_into_the_claim():
    world = World(cached())
    world.converge()
    run_downloads(world.cluster)
    (pod,) = [p for p in world.cluster.all(POD) if p["metadata"]["name"].startswith("demo-model")]
    name = pod["metadata"]["name"]
    world.cluster.edit(POD, "ns", name, lambda item: item["metadata"].update(finalizers=["x/y"]))
    world.cluster.remove(JOB, "ns", names_of(world, JOB)[0])
    world.turn()
    assert names_of(world, JOB) == []
    world.cluster.edit(POD, "ns", name, lambda item: item["metadata"].update(finalizers=[]))
    world.converge()
    assert len(names_of(world, JOB)) == 1


def test_a_claim_without_a_class_is_named_and_needs_a_user():
    world = World(cached())
    world.converge()
    run_downloads(world.cluster, bind=False)
    world.converge()
    assert world.condition("ModelReady")["reason"] == "ClaimPending"
    assert "has no default StorageClass" in world.condition("Ready")["message"]
    assert rps(world) == "F/T/F"
    world.turn(seconds=61)
    assert rps(world) == "F/F/T"
    run_downloads(world.cluster)
    world.converge()
    assert rps(world) == "F/T/F"


def test_a_class_that_gives_no_volume_is_named_until_the_deadline():
    world = World(
        cached({**MODEL, "cache": {"claim": {"size": "1Gi", "storageClassName": "slow"}}})
    )
    world.converge()
    run_downloads(world.cluster, bind=False)
    world.turn(seconds=61)
    assert "StorageClass slow has given it no volume" in world.condition("ModelReady")["message"]
    assert rps(world) == "F/T/F"
    world.turn(seconds=600)
    assert rps(world) == "F/F/T"
    assert "describe pvc" in world.condition("Stalled")["message"]


# what others delete


def test_a_deleted_job_of_a_running_revision_changes_no_pod():
    world = downloaded(World(cached()))
    before = {pod["metadata"]["uid"] for pod in workers(world)}
    world.cluster.remove(JOB, "ns", names_of(world, JOB)[0])
    world.converge()
    assert {pod["metadata"]["uid"] for pod in workers(world)} == before
    assert world.condition("ModelReady")["status"] == "False"
    assert world.condition("Ready")["status"] == "True"
    run_downloads(world.cluster, end=True)
    world.converge()
    assert world.condition("ModelReady")["status"] == "True"


def test_a_claim_that_was_deleted_is_filled_again_by_a_new_job():
    world = downloaded(World(cached()))
    before = world.cluster.all(JOB)[0]["metadata"]["uid"]
    world.cluster.remove(CLAIM, "ns", names_of(world, CLAIM)[0])
    assert world.turn() <= 5, "the new Job is made in the next turn"
    world.converge()
    assert len(owned(world)) == 2
    assert world.cluster.all(JOB)[0]["metadata"]["uid"] != before
    assert world.condition("ModelReady")["status"] == "False"


def test_a_stopped_service_downloads_nothing_and_keeps_what_it_has():
    world = World(cached())
    world.converge()
    run_downloads(world.cluster)
    stopped = cached()
    stopped["spec"]["stopped"] = True
    world.apply(stopped)
    world.converge()
    assert [kind for kind, _ in owned(world)] == [CLAIM.kind]
    assert world.condition("ModelReady")["reason"] == "Stopped"
    assert kstatus(world.cluster.all(VLM_SERVICE)[0]) == "Current"
    world.apply(cached())
    world.converge()
    assert len(owned(world)) == 2
    complete = downloaded(world)
    complete.apply(stopped)
    complete.converge(turns=40)
    assert len(owned(complete)) == 2


@pytest.mark.parametrize("finished", [False, True])
def test_a_claim_stays_while_a_pod_mounts_it(finished: bool):
    world = downloaded(World(cached(decode=pool())))
    (claim,) = world.cluster.all(CLAIM)
    (job,) = world.cluster.all(JOB)
    pods = tuple(dataclasses.replace(pod, finished=finished) for pod in pod_states(workers(world)))
    children = {
        (item["kind"], item["metadata"]["name"]): item for item in (claim, job)
    }  # the Deployments are deleted, their pods drain
    observed = dataclasses.replace(empty(), children=children, pods=pods)
    gone = service(body({"model": {"uri": "pvc://shapes"}}, decode=pool()))
    kept = plan_cache(gone, observed, Images(), {}).kept
    assert kept == (frozenset() if finished else frozenset(children))
