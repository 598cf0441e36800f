"""Every case of a service's life: its conditions, and what kstatus makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from support.fakes import DyingCluster, Saying, run_controllers
from support.world import World, body, external, kstatus, pool, rps
from vlm_operator import names
from vlm_operator.cluster import DEPLOYMENT, POD, VLM_SERVICE, Manifest
from vlm_operator.errors import ClusterError
from vlm_operator.status.causes import split

DEADLINE = 600


def service(world: World) -> Manifest:
    return world.cluster.all(VLM_SERVICE)[0]


def pods(world: World, role: str) -> list[Manifest]:
    found = world.cluster.all(POD)
    return [item for item in found if item["metadata"]["labels"][names.LABEL_ROLE] == role]


def set_pod(
    world: World, pod: Manifest, status: dict[str, Any], *, node: str | None = "n1"
) -> None:
    """Give a pod a status, as kubelet or the scheduler would."""
    stamp = world.cluster.clock.stamp()
    status = copy.deepcopy(status)
    for item in status.setdefault("conditions", []):
        item.setdefault("lastTransitionTime", stamp)

    def change(item: Manifest) -> None:
        if node:
            item["spec"]["nodeName"] = node
        item["status"] = status

    meta = pod["metadata"]
    world.cluster.edit(POD, meta["namespace"], meta["name"], change, manager="kubelet")


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return _container({"state": state})


def crashing(
    reason: str = "Error", code: int = 1, message: str = "", *, restarts: int = 3, **times: str
) -> dict[str, Any]:
    ended = {"reason": reason, "exitCode": code, "message": message, **times}
    return _container(
        {
            "restartCount": restarts,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": ended},
        }
    )


def _container(status: dict[str, Any]) -> dict[str, Any]:
    conditions = [
        {"type": "PodScheduled", "status": "True"},
        {"type": "ContainersReady", "status": "False"},
        {"type": "Ready", "status": "False"},
    ]
    container = {"name": "worker", "ready": False, "restartCount": 0, **status}
    ip = {"podIP": "127.0.1.1"}
    return {"phase": "Pending", "conditions": conditions, "containerStatuses": [container], **ip}


def unscheduled(message: str) -> dict[str, Any]:
    condition = {"type": "PodScheduled", "status": "False", "message": message}
    return {"phase": "Pending", "conditions": [condition]}


NO_CPU = "0/3 nodes are available: 3 Insufficient cpu."
NO_CLAIM = '0/3 nodes are available: persistentvolumeclaim "shapes" not found.'
UNBOUND = "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims."

SOON = {"startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:02Z"}

# case → status of the decode pod of a new service, R/P/S at once and once the delay is over,
# the reason of DecodeReady, and words of its message
BROKEN: dict[str, tuple[dict[str, Any], str, float, str, str, tuple[str, ...]]] = {
    "no node": (unscheduled(NO_CPU), "F/T/F", DEADLINE, "F/F/T", "Unschedulable",
        ("free cpu", "add nodes")),
    "a claim that is missing": (unscheduled(NO_CLAIM), "F/T/F", 60, "F/F/T", "MissingReference",
        ('PersistentVolumeClaim "shapes" not found', "model.uri")),
    "a claim without a volume": (unscheduled(UNBOUND), "F/T/F", DEADLINE, "F/F/T", "VolumePending",
        ("not bound",)),
    "an image": (waiting("ErrImagePull", "no such image"), "F/T/F", 120, "F/F/T",
        "ImagePullFailed", ("no such image", "imagePullSecrets")),
    "a Secret that is missing": (
        waiting("CreateContainerConfigError", 'secret "tok" not found'), "F/T/F", 60, "F/F/T",
        "MissingReference", ('Secret "tok" not found', "create it or change")),
    "a crash": (crashing(message="level=INFO started\nno such flag: --x\n"), "F/F/T", 0, "F/F/T",
        "CrashLoop", ("exit code 1: no such flag: --x",)),
    "too little memory": (crashing("OOMKilled", 137), "F/F/T", 0, "F/F/T", "CrashLoop",
        ("OOMKilled", "limits.memory")),
    "liveness": (crashing("Error", 137), "F/F/T", 0, "F/F/T", "CrashLoop", ("liveness",)),
    "more KV than memory": (
        crashing(message="vlm-worker: [Errno 12] Cannot allocate memory"), "F/F/T", 0, "F/F/T",
        "CrashLoop", ("Cannot allocate memory", "limits.memory or lower kv.memory"),
    ),
    "an argument that makes it end": (
        crashing("Completed", 0, "usage: vlm-worker", **SOON), "F/F/T", 0, "F/F/T", "CrashLoop",
        ("exit code 0: usage: vlm-worker", "pools.decode.engine.extraArgs or its image", "logs"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN.values(), ids=BROKEN)
def test_a_first_rollout_that_is_broken_ends_as_failed_with_cause_and_fix(case: Any):
    status, first, delay, last, reason, words = case
    world = World(body(decode=pool()))
    world.turn()
    run_controllers(
        world.cluster, start=lambda item: item["metadata"]["labels"][names.LABEL_ROLE] != "decode"
    )
    (decode,) = pods(world, "decode")
    set_pod(world, decode, status, node=None if _false(status) == "PodScheduled" else "n1")
    world.turn()
    assert rps(world) == first
    assert kstatus(service(world)) == {"F/T/F": "InProgress", "F/F/T": "Failed"}[first]
    world.turn(seconds=delay + 1)
    assert rps(world) == last
    assert kstatus(service(world)) == "Failed"
    assert world.condition("DecodeReady")["reason"] == reason
    for kind in ("DecodeReady", "Stalled"):
        for word in words:
            assert word in world.condition(kind)["message"], kind
    assert split(world.condition("Stalled")["message"])[1]
    # healed, it goes on
    run_controllers(world.cluster)
    world.converge()
    assert rps(world) == "T/F/F"


SCALES = {
    "layers": "Int8",
    "activationScales": {"configMapKeyRef": {"name": "scales", "key": "k"}, "sha256": "0f" * 32},
}


@pytest.mark.parametrize("is_running", [False, True])
def test_scales_in_a_config_map_that_is_missing_are_reported_with_their_field(is_running: bool):
    """Of a new service, and of one that runs without scales: kubelet mounts no volume."""
    world = World(body(decode=pool()))
    if is_running:
        world.turn()
        run_controllers(world.cluster)
        world.converge()
        assert rps(world) == "T/F/F"
    before = {item["metadata"]["name"] for item in pods(world, "decode")}
    world.apply(body({"model": {"uri": "pvc://shapes", "weights": SCALES}}, decode=pool()))
    world.turn()
    run_controllers(
        world.cluster, start=lambda item: item["metadata"]["labels"][names.LABEL_ROLE] != "decode"
    )
    (decode,) = (one for one in pods(world, "decode") if one["metadata"]["name"] not in before)
    status = waiting("ContainerCreating")
    del status["podIP"]
    set_pod(world, decode, status)
    world.turn()
    world.turn(seconds=61)
    stalled = world.condition("Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "VolumesNotMounted")
    for word in ("not mounted", "keys", 'ConfigMap "scales"', "model.weights.activationScales"):
        assert word in stalled["message"]
    set_pod(world, decode, waiting("ContainerCreating"))  # the ConfigMap exists
    run_controllers(world.cluster)
    world.converge()
    assert rps(world) == "T/F/F"


def _false(status: dict[str, Any]) -> str:
    return next((i["type"] for i in status["conditions"] if i["status"] == "False"), "")


def test_progress_resets_the_deadline():
    world = World(body(decode=pool()))
    world.turn()
    run_controllers(world.cluster, start=False)
    world.turn(seconds=DEADLINE - 10)
    assert rps(world) == "F/T/F"
    (decode,) = pods(world, "decode")
    set_pod(world, decode, waiting("ContainerCreating"))  # it got its node
    world.turn(seconds=20)
    assert rps(world) == "F/T/F"
    world.turn(seconds=DEADLINE - 30)
    assert rps(world) == "F/T/F"
    world.turn(seconds=60)
    assert rps(world) == "F/F/T"


def test_a_new_operator_process_does_not_start_the_deadline_anew():
    world = World(body(decode=pool()))
    world.turn()
    run_controllers(world.cluster, start=False)
    world.turn(seconds=DEADLINE - 100)
    world.loop = world.new_loop()
    world.turn(seconds=50)
    assert rps(world) == "F/T/F"
    world.turn(seconds=60)
    assert rps(world) == "F/F/T"


def refused(spec: Manifest) -> World:
    """A service that serves, then gets a manifest that is refused."""
    world = World(body(decode=pool()))
    world.converge()
    world.apply(spec)
    world.turn()
    return world


def test_a_refused_manifest_is_failed_and_says_nothing_false():
    world = World(body(decode=pool(rollout={"maxSurge": -1})))
    world.turn()
    assert (rps(world), kstatus(service(world))) == ("F/F/T", "Failed")
    assert world.condition("Stalled")["reason"] == "SpecInvalid"
    assert_no_false_words(world)
    world = refused(body(decode=pool(rollout={"maxSurge": -1})))
    assert (rps(world), kstatus(service(world))) == ("T/F/T", "Failed")
    assert (
        "the refused manifest is not rolled out"
        in (world.condition("RolloutProgressing")["message"])
    )


class Refusing(DyingCluster):
    """An API server that refuses a Deployment's pod template in the dry run."""

    async def apply(
        self, manifest: Manifest, *, manager: str, subresource: str = "", dry_run: bool = False
    ) -> Manifest:
        if dry_run and manifest["kind"] == DEPLOYMENT.kind:
            message = "spec.containers[0].resources.requests: must be less than the limit"
            raise ClusterError(422, "Invalid", message)
        return await super().apply(
            manifest, manager=manager, subresource=subresource, dry_run=dry_run
        )


def test_a_refused_template_is_failed_and_says_nothing_false():
    world = World(body(decode=pool()))
    world.loop = world.new_loop(Refusing(world.cluster, at=None))
    world.turn()
    assert (rps(world), kstatus(service(world))) == ("F/F/T", "Failed")
    for kind in ("Accepted", "Stalled"):
        assert world.condition(kind)["reason"] == "PodTemplateRefused"
        assert "must be less than the limit" in world.condition(kind)["message"]
    assert_no_false_words(world)


def assert_no_false_words(world: World) -> None:
    said = " ".join(item["message"] for item in world.status["conditions"])
    for words in (
        "nothing is left to do",
        "no user must act",
        "nothing needs a user",
        "all pods are of one revision",
        "every role serves",
        "pods are being created",
        "every pod has a node",
    ):
        assert words not in said


def lose(world: World, role: str) -> None:
    """The last pod of a role is gone and another one has not come yet."""
    for item in pods(world, role):
        world.cluster.remove(POD, "ns", item["metadata"]["name"])


def dead_node(world: World) -> None:
    """The node's controller takes Ready from the decode pod."""
    world.cluster.clock.now += 60
    (decode,) = pods(world, "decode")
    status = copy.deepcopy(decode["status"])
    for item in status["conditions"]:
        if item["type"] == "Ready":
            item |= {"status": "False", "lastTransitionTime": world.cluster.clock.stamp()}
    set_pod(world, decode, status, node="n3")


LATER: dict[str, tuple[Manifest, Callable[[World], None], str, str, str]] = {
    "serving": (body(decode=pool()), lambda _: None, "T/F/F", "T/F/F", "AllReady"),
    "some pod is missing": (
        body(decode=pool(2, rollout={"maxUnavailable": 1})),
        lambda world: world.cluster.remove(POD, "ns", pods(world, "decode")[0]["metadata"]["name"]),
        "T/F/F", "T/F/F", "Degraded",
    ),
    "below the floor": (
        body(decode=pool()), lambda world: lose(world, "decode"), "F/F/F", "F/F/T", "PodsMissing",
    ),
    "a node that is lost": (body(decode=pool()), dead_node, "F/F/F", "F/F/T", "NodeNotReady"),
    "an autoscaler's pod has no node": (
        body(decode=external(1, 4)),
        lambda world: (
            world.scale("decode", 2),
            world.turn(),
            run_controllers(world.cluster, start=False),
        ),
        "T/F/F", "T/F/F", "Degraded",
    ),
    "stopped": (
        body(decode=pool()),
        lambda world: (world.apply(body({"stopped": True}, decode=pool())), world.converge()),
        "T/F/F", "T/F/F", "Stopped",
    ),
    "paused": (
        body({"paused": True}, decode=pool()), lambda _: None, "F/F/T", "F/F/T", "Creating",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LATER.values(), ids=LATER)
def test_a_service_that_was_reached_says_what_it_is_now_and_after_the_deadline(case: Any):
    manifest, happen, now, later, reason = case
    world = World(manifest)
    world.converge()
    happen(world)
    world.turn()
    assert rps(world) == now
    assert world.condition("DecodeReady")["reason"] == reason
    world.turn(seconds=DEADLINE + 1)
    assert rps(world) == later
    if later.endswith("T"):
        assert split(world.condition("Stalled")["message"])[1]


def test_a_pod_that_starts_for_ever_ends_as_failed_with_where_to_look():
    world = World(body(decode=pool()))
    world.turn()
    run_controllers(world.cluster, start=False)
    (decode,) = pods(world, "decode")
    set_pod(world, decode, waiting("ContainerCreating"))
    world.turn()
    world.turn(seconds=DEADLINE + 1)
    stalled = world.condition("Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "PodsStarting")
    name = decode["metadata"]["name"]
    for words in (
        f"kubectl -n ns describe pod {name}",
        f"kubectl -n ns logs {name}",
        "raise rollout.progressDeadlineSeconds",
    ):
        assert words in split(stalled["message"])[1]


def test_a_crash_whose_pauses_outlast_the_deadline_ends_as_failed_with_cause_and_fix():
    world = World(body({"rollout": {"progressDeadlineSeconds": 60}}, decode=pool()))
    world.turn()
    run_controllers(world.cluster, start=False)
    (decode,) = pods(world, "decode")
    set_pod(world, decode, crashing(message="no folder; give one", restarts=1))
    world.turn()
    assert rps(world) == "F/T/F"
    world.turn(seconds=61)
    assert rps(world) == "F/F/T"
    assert world.condition("DecodeReady")["reason"] == "PodsFailing"
    cause, fix = split(world.condition("Stalled")["message"])
    assert cause.endswith("crashes with exit code 1: no folder, give one")
    assert fix == "correct what the error names"


def test_a_gateway_without_a_node_is_offered_what_a_gateway_has():
    world = World(body(decode=pool()))
    world.turn()
    run_controllers(
        world.cluster, start=lambda item: item["metadata"]["labels"][names.LABEL_ROLE] == "decode"
    )
    (gateway,) = pods(world, "gateway")
    set_pod(world, gateway, unscheduled(NO_CPU), node=None)
    world.turn()
    fix = split(world.condition("GatewayReady")["message"])[1]
    assert "gateway.placement" in fix
    assert "variant" not in fix


def test_a_surge_pod_without_a_node_is_named_and_the_service_serves_on():
    world = World(body(decode=pool()))
    world.converge()
    world.apply(body(decode=pool(engine={"extraArgs": ["--max-requests=8"]})))
    world.turn()
    run_controllers(world.cluster, start=lambda item: "nodeName" in item["spec"])
    fresh = next(item for item in pods(world, "decode") if "nodeName" not in item["spec"])
    set_pod(world, fresh, unscheduled(NO_CPU), node=None)
    world.turn()
    assert rps(world) == "T/T/F"
    found = world.condition("RolloutProgressing")
    assert found["reason"] == "NoSpareCapacity"
    assert f"pod {fresh['metadata']['name']}: no node with" in found["message"]
    world.turn(seconds=DEADLINE + 1)
    assert rps(world) == "T/F/T"
    assert "free cpu" in world.condition("Stalled")["message"]


def test_a_name_that_is_taken_is_failed_with_the_fix():
    world = World(body(decode=pool()))
    head = {"apiVersion": "v1", "kind": "ConfigMap"}
    world.cluster.hardware({**head, "metadata": {"name": "demo-gateway", "namespace": "ns"}})
    world.turn()
    assert kstatus(service(world)) == "Failed"
    assert world.condition("Stalled")["reason"] == "NameConflict"
    assert "rename the VLMService" in world.condition("Stalled")["message"]


def test_a_quota_that_allows_no_pod_is_named():
    world = World(body(decode=pool()))
    world.turn()
    message = (
        'pods "demo-x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, '
        "used: requests.nvidia.com/gpu=4, limited: requests.nvidia.com/gpu=4"
    )
    name = next(
        item["metadata"]["name"]
        for item in world.cluster.all(DEPLOYMENT)
        if "decode" in item["metadata"]["name"]
    )
    condition = {"type": "ReplicaFailure", "status": "True", "message": message}
    condition["lastTransitionTime"] = world.cluster.clock.stamp()
    world.cluster.edit(
        DEPLOYMENT, "ns", name, lambda item: item.update(status={"conditions": [condition]})
    )
    world.turn(seconds=61)
    stalled = world.condition("Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "QuotaExceeded")
    assert "ResourceQuota gpus allows requests.nvidia.com/gpu=4" in stalled["message"]
    assert rps(world) == "F/F/T"
    # a refusal of what the next manifest replaces says nothing of the next manifest
    world.apply(body(decode=pool(engine={"extraArgs": ["--max-requests=8"]})))
    world.turn()
    assert rps(world) == "F/T/F"


def test_a_number_of_a_manual_pool_that_is_put_back_is_told_of():
    world = World(body(decode=pool()))
    world.converge()
    world.scale("decode", 3)
    world.turn()
    world.turn(seconds=60)
    found = world.condition("ScalingActive")
    assert (found["status"], found["reason"]) == ("False", "ScalingConflict")
    assert "use mode External" in found["message"]
    world.turn(seconds=DEADLINE)
    assert world.condition("ScalingActive")["status"] == "True"


DENIED = "the API server denies the list of pods: 403 Forbidden"
SAID: dict[str, tuple[Saying, float, str, tuple[str, ...]]] = {
    "a model": (
        Saying("decode", phase="failed", accepting=False, message="weights end early"), 0,
        "ModelFailed", ("the model failed: weights end early", "correct spec.model"),
    ),
    "a model that cannot be had": (
        Saying(
            "decode", phase="failed", accepting=False,
            message="--model: hf://me/x: the model is gated; accept its licence on the hub",
        ), 0,
        "ModelFailed",
        ("hf://me/x: the model is gated; accept its licence on the hub",),
    ),
    "a gateway without rights": (
        Saying("gateway", accepting=False, message=DENIED), 60,
        "AccessDenied", ("403 Forbidden", "Role and RoleBinding"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID.values(), ids=SAID)
def test_what_a_worker_says_of_its_failure_ends_as_failed_with_cause_and_fix(case: Any):
    saying, delay, reason, words = case
    world = World(body(decode=pool()))
    world.scraper = saying
    world.loop = world.new_loop()
    world.turn()
    run_controllers(world.cluster)
    for pod in pods(world, saying.role):
        status = copy.deepcopy(pod["status"])
        for item in status["conditions"]:
            if item["type"] == "Ready":
                item |= {"status": "False", "lastTransitionTime": world.cluster.clock.stamp()}
        set_pod(world, pod, status)
    world.turn()
    world.turn(seconds=delay + 1)
    assert (rps(world), kstatus(service(world))) == ("F/F/T", "Failed")
    assert world.condition("Stalled")["reason"] == reason
    for word in words:
        assert word in world.condition("Stalled")["message"]
