"""VLMServices and VLMPools in each phase, with the status that the operator writes.

`python tests/gitops/phases.py` writes them as testdata of the health scripts. Revisions are
replaced by a constant, and fields of the status that no health script can need are removed: the
testdata changes only if conditions do.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from support.fakes import run_controllers
from support.world import World, body, external, pool
from vlm_operator import names
from vlm_operator.cluster import POD, VLM_POOL, VLM_SERVICE, Manifest
from vlm_operator.reconcile.class_and_pool_status import PoolLoop
from vlm_operator.status.refused import CLASS_SECONDS

FOLDER = Path(__file__).parents[2] / "examples/gitops/argocd/health/triptych.dev"
DEADLINE_SECONDS = 601  # rollout.progressDeadlineSeconds is 600
KEPT_STATUS = (
    "observedGeneration", "conditions", "topology", "url", "summary",
    "replicas", "readyReplicas", "selector",
)  # fmt: skip
REVISION = re.compile(r"\b[0-9a-f]{8}\b")
CHANGED: dict[str, Any] = {"engine": {"extraArgs": ["--max-requests=8"]}}


def _service(world: World) -> Manifest:
    (found,) = world.cluster.all(VLM_SERVICE)
    return _plain(found)


def _pool(world: World) -> Manifest:
    (found,) = world.cluster.all(VLM_POOL)
    return _plain(found)


def _plain(manifest: Manifest) -> Manifest:
    for key in ("managedFields", "resourceVersion", "annotations"):
        manifest["metadata"].pop(key, None)
    if "status" in manifest:
        status = manifest["status"]
        manifest["status"] = {key: status[key] for key in KEPT_STATUS if key in status}
    for condition in manifest.get("status", {}).get("conditions", []):
        condition["message"] = REVISION.sub("1a2b3c4d", condition["message"])
    return manifest


def _serving(spec: Manifest | None = None) -> World:
    world = World(spec or body(decode=pool()))
    world.converge()
    return world


def _changed(spec: Manifest) -> World:
    world = _serving()
    world.apply(spec)
    return world


def _no_status() -> Manifest:
    return _service(World(body(decode=pool())))


def _first_rollout() -> Manifest:
    world = World(body(decode=pool()))
    world.turn()
    return _service(world)


def _new_generation() -> Manifest:
    return _service(_changed(body(decode=pool(**CHANGED))))


def _rollout() -> Manifest:
    world = _changed(body(decode=pool(**CHANGED)))
    world.turn()
    return _service(world)


def _lost_pod() -> World:
    world = _serving()
    for item in world.cluster.all(POD):
        if item["metadata"]["labels"][names.LABEL_ROLE] == "decode":
            world.cluster.remove(POD, "ns", item["metadata"]["name"])
    world.turn()
    return world


def _stopping() -> Manifest:
    world = _changed(body({"stopped": True}, decode=pool()))
    world.turn()
    return _service(world)


def _deleting() -> Manifest:
    world = _serving()
    world.cluster.remove(VLM_SERVICE, "ns", "demo")
    world.turn()
    return _service(world)


def _some_pods() -> Manifest:
    world = _serving(body(decode=pool(2, rollout={"maxUnavailable": 1})))
    first = next(
        item["metadata"]["name"]
        for item in world.cluster.all(POD)
        if item["metadata"]["labels"][names.LABEL_ROLE] == "decode"
    )
    world.cluster.remove(POD, "ns", first)
    world.turn()
    return _service(world)


def _refused() -> Manifest:
    world = _changed(body(decode=pool(rollout={"maxSurge": -1})))
    world.turn()
    return _service(world)


def _no_node_class(seconds: float) -> Manifest:
    variant = {"name": "gpu", "nodeClassRef": {"name": "missing"}}
    world = World(body(decode=pool(variants=[variant])))
    world.turn()
    world.turn(seconds=seconds)
    return _service(world)


def _pods_missing_for_long() -> Manifest:
    world = _lost_pod()
    world.turn(seconds=DEADLINE_SECONDS)
    return _service(world)


def _crash_loop() -> Manifest:
    world = World(body(decode=pool()))
    world.turn()
    run_controllers(
        world.cluster, crash=lambda item: item["metadata"]["labels"][names.LABEL_ROLE] == "decode"
    )
    world.turn()
    return _service(world)


def _rollout_failed() -> Manifest:
    world = _changed(body(decode=pool(**CHANGED)))
    world.turn()
    run_controllers(world.cluster, start=lambda item: "nodeName" in item["spec"])
    world.turn()
    world.turn(seconds=DEADLINE_SECONDS)
    world.turn()
    return _service(world)


def _stopped() -> Manifest:
    world = _changed(body({"stopped": True}, decode=pool()))
    world.converge()
    return _service(world)


def _paused() -> Manifest:
    world = _changed(body({"paused": True}, decode=pool()))
    world.converge()
    return _service(world)


def _paused_before_a_change() -> Manifest:
    world = _changed(body({"paused": True}, decode=pool(**CHANGED)))
    world.turn()
    return _service(world)


def _pool_being_scaled() -> Manifest:
    world = _serving(body(decode=external(1, 4)))
    world.scale("decode", 2)
    world.turn()
    return _pool(world)


def _pool_without_service() -> Manifest:
    world = World()
    head = {"apiVersion": VLM_POOL.api_version, "kind": VLM_POOL.kind}
    meta = {"name": "mine", "namespace": "ns"}
    world.cluster.hardware({**head, "metadata": meta, "spec": {"replicas": 3}})
    asyncio.run(PoolLoop(world.cluster, namespaces=(), clock=world.cluster.clock).turn())
    return _pool(world)


def _pool_without_status() -> Manifest:
    found = _pool(_serving())
    del found["status"]
    return found


SERVICES: Mapping[str, Callable[[], Manifest]] = {
    "progressing_noStatus": _no_status,
    "progressing_firstRollout": _first_rollout,
    "progressing_newGeneration": _new_generation,
    "progressing_rollout": _rollout,
    "progressing_podsMissing": lambda: _service(_lost_pod()),
    "progressing_nodeClassMissing": lambda: _no_node_class(seconds=1),
    "progressing_stopping": _stopping,
    "progressing_deleting": _deleting,
    "healthy": lambda: _service(_serving()),
    "healthy_somePodsMissing": _some_pods,
    "degraded_specInvalid": _refused,
    "degraded_nodeClassMissing": lambda: _no_node_class(seconds=CLASS_SECONDS),
    "degraded_podsMissing": _pods_missing_for_long,
    "degraded_crashLoop": _crash_loop,
    "degraded_rolloutFailed": _rollout_failed,
    "suspended_stopped": _stopped,
    "suspended_paused": _paused,
    "suspended_pausedBeforeChange": _paused_before_a_change,
}
POOLS: Mapping[str, Callable[[], Manifest]] = {
    "progressing_noStatus": _pool_without_status,
    "healthy": lambda: _pool(_serving()),
    "healthy_scaling": _pool_being_scaled,
    "degraded_noService": _pool_without_service,
}

MAKERS = {
    **{f"VLMService/testdata/{name}.yaml": make for name, make in SERVICES.items()},
    **{f"VLMPool/testdata/{name}.yaml": make for name, make in POOLS.items()},
}


@functools.cache
def testdata(path: str) -> str:
    """Return the text of one file; `path` is a key of MAKERS, and below FOLDER."""
    return yaml.safe_dump(MAKERS[path](), sort_keys=False, width=120)


if __name__ == "__main__":
    for path in MAKERS:
        (FOLDER / path).write_text(testdata(path))
