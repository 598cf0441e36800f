"""What is held is never older than what was written here, and in the end it is what is there."""

from __future__ import annotations

import copy
from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from vlm_operator import names
from vlm_operator.cluster import CONFIG_MAP, NODE, POD, VLM_POOL, Kind
from vlm_operator.object_store import Store, transform
from vlm_operator.observe import pod_states
from vlm_operator.status.classes import class_status

Manifest = dict[str, Any]
LABELS = {names.LABEL_SERVICE: "demo"}
NAMES = ("a", "b")


def item(name: str, version: int, *, uid: str = "u", **meta: Any) -> Manifest:
    found = {
        "name": name,
        "namespace": "ns",
        "uid": uid,
        "resourceVersion": str(version),
        "labels": LABELS,
    }
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {**found, **meta}}


def store(kind: Kind = CONFIG_MAP) -> Store:
    return Store(kind)


def versions(found: Store, service: str = "demo") -> dict[str, int]:
    listed = found.list("ns", {names.LABEL_SERVICE: service})
    return {one["metadata"]["name"]: int(one["metadata"]["resourceVersion"]) for one in listed}


def test_an_event_older_than_our_own_write_changes_nothing_and_wakes_no_turn():
    found = store()
    found.changed(item("a", 1))
    found.written(item("a", 5))
    assert found.changed(item("a", 3)) == set()
    assert found.changed(item("a", 5)) == set()  # the write's own echo
    assert versions(found) == {"a": 5}
    assert found.changed(item("a", 6)) == {("ns", "demo")}


def test_an_answer_that_comes_after_the_end_of_its_object_brings_nothing_back():
    found = store()
    found.changed(item("a", 5))
    found.gone(item("a", 6))
    found.written(item("a", 5))
    assert versions(found) == {}


def test_what_was_created_here_after_a_list_began_outlives_it():
    found = store()
    found.written(item("a", 7))
    assert found.only(set(), 6) == set()
    assert versions(found) == {"a": 7}
    assert found.only(set(), 8) == {("ns", "demo")}
    assert versions(found) == {}


def test_what_was_deleted_here_is_hidden_until_it_is_said_to_be_on_its_way_out():
    found = store()
    found.changed(item("a", 1))
    found.deleted("u")
    assert versions(found) == {}
    found.changed(item("a", 2))  # from before the deletion
    assert versions(found) == {}
    found.changed(item("a", 3, deletionTimestamp="2026-01-01T00:00:00Z"))
    assert versions(found) == {"a": 3}
    found.gone(item("a", 4))
    found.changed(item("a", 5, uid="v"))  # made again
    assert versions(found) == {"a": 5}


def test_an_object_that_changes_hands_wakes_both_services():
    found = store()
    found.changed(item("a", 1))
    other = item("a", 2, labels={names.LABEL_SERVICE: "other"})
    assert found.changed(other) == {("ns", "demo"), ("ns", "other")}
    assert (versions(found), versions(found, "other")) == ({}, {"a": 2})


def test_a_list_takes_in_what_no_event_told():
    found = store()
    found.changed(item("a", 1))
    found.changed(item("b", 2))
    assert found.page([item("a", 4), item("c", 5)]) == {("ns", "demo")}
    assert found.only({"u"}, 6) == set()
    again = store()
    again.changed(item("b", 2, uid="w"))
    assert again.only({"u"}, 6) == {("ns", "demo")}


class Truth:
    """A history of a few objects, and what of it is still on its way to the store."""

    def __init__(self) -> None:
        self.live: dict[str, Manifest] = {}
        self.version = 0
        self.events: list[tuple[str, Manifest]] = []
        self.answers: list[tuple[str, Manifest]] = []

    def write(self, name: str, *, ours: bool) -> None:
        """Create or change an object."""
        self.version += 1
        known = self.live.get(name)
        uid = known["metadata"]["uid"] if known else f"{name}-{self.version}"
        self.live[name] = item(name, self.version, uid=uid)
        self.events.append(("changed", self.live[name]))
        if ours:
            self.answers.append(("written", self.live[name]))

    def delete(self, name: str, *, ours: bool) -> None:
        """Delete an object if there is one."""
        if name in self.live:
            self.version += 1
            gone = self.live.pop(name)
            meta = {**gone["metadata"], "resourceVersion": str(self.version)}
            self.events.append(("gone", {**gone, "metadata": meta}))
            if ours:
                self.answers.append(("deleted", gone))

    def listed(self, found: Store) -> None:
        """A list arrives; the watch that follows tells what happened after it."""
        found.page(copy.deepcopy(list(self.live.values())))
        found.only({one["metadata"]["uid"] for one in self.live.values()}, self.version)
        self.events.clear()

    @property
    def versions(self) -> dict[str, int]:
        return {name: int(one["metadata"]["resourceVersion"]) for name, one in self.live.items()}


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["ours", "theirs", "our end", "their end", "event", "lost event", "answer", "list"]
        ),
        st.sampled_from(NAMES),
    ),
    max_size=40,
)


@given(STEPS)
def test_whatever_is_late_or_lost_a_list_makes_the_store_what_is_there(steps):
    truth, found = Truth(), store()
    answered: dict[str, int] = {}
    for what, name in steps:
        match what:
            case "ours" | "theirs":
                truth.write(name, ours=what == "ours")
            case "our end" | "their end":
                truth.delete(name, ours=what == "our end")
            case "event" if truth.events:
                how, seen = truth.events.pop(0)
                getattr(found, how)(seen)
            case "lost event" if truth.events:
                truth.events.pop(0)
            case "answer" if truth.answers:
                how, seen = truth.answers.pop(0)
                meta = seen["metadata"]
                if how == "written":
                    found.written(seen)
                    answered[meta["name"]] = int(meta["resourceVersion"])
                else:
                    found.deleted(meta["uid"])
            case "list":
                truth.listed(found)
        for known, version in versions(found).items():
            # never older than what was written here
            assert version >= answered.get(known, 0)
    truth.listed(found)
    assert versions(found) == truth.versions
    # nor does an answer that comes even later spoil that
    for how, seen in truth.answers:
        if how == "written":
            found.written(seen)
    assert versions(found) == truth.versions


POD_MANIFEST: Manifest = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        **item("p", 9)["metadata"],
        "labels": {**LABELS, names.LABEL_ROLE: "decode", names.LABEL_REVISION: "r"},
        "annotations": {"controller.kubernetes.io/pod-deletion-cost": "-3", "other": "x" * 99},
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "managedFields": [{"manager": "kubelet"}],
    },
    "spec": {
        "nodeName": "n",
        "containers": [{"name": "worker", "resources": {"requests": {"gpu": "1"}}, "env": [{}]}],
    },
    "status": {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [
            {
                "type": kind,
                "status": "False",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
                "message": "0/3 nodes are available: 3 Insufficient gpu.",
                "reason": "Unschedulable",
            }
            for kind in ("PodScheduled", "Ready", "ContainersReady", names.GATE_ACCEPTING)
        ],
        "containerStatuses": [
            {
                "name": "worker",
                "ready": False,
                "restartCount": 2,
                "image": "i",
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": "m"}},
            }
        ],
    },
}


def test_of_a_pod_all_is_kept_that_is_read():
    small = transform(POD, POD_MANIFEST)
    assert pod_states([small]) == pod_states([POD_MANIFEST])
    running = copy.deepcopy(POD_MANIFEST)
    running["status"]["conditions"] = []
    assert pod_states([transform(POD, running)]) == pod_states([running])
    assert pod_states([running])[0].blocked != pod_states([POD_MANIFEST])[0].blocked
    assert "managedFields" not in small["metadata"]


def test_who_wrote_a_pools_number_is_kept():
    pool = {"apiVersion": "triptych.dev/v1alpha1", "kind": "VLMPool", **POD_MANIFEST}
    assert transform(VLM_POOL, pool)["metadata"]["managedFields"] == [{"manager": "kubelet"}]


def test_of_a_node_its_readiness_labels_and_devices_are_kept_and_its_images_are_not():
    images = [{"names": [f"registry/image:{number}"], "sizeBytes": 1} for number in range(50)]
    ready = {"type": "Ready", "status": "True", "message": "kubelet is posting ready status"}
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "one", "uid": "u", "resourceVersion": "1", "labels": {"type": "gpu"}},
        "spec": {"podCIDR": "10.0.0.0/24", "unschedulable": False},
        "status": {
            "allocatable": {"nvidia.com/gpu": "4"},
            "capacity": {"nvidia.com/gpu": "4"},
            "conditions": [{"type": "MemoryPressure", "status": "False"}, ready],
            "images": images,
        },
    }
    manifest = {
        "spec": {"nodeSelector": {"type": "gpu"}, "accelerator": {"resourceName": "nvidia.com/gpu"}}
    }

    def status(item: dict[str, Any]) -> dict[str, Any]:
        return class_status(manifest, [item], operator="one", in_use=0, starts=(), now=0.0)

    small = transform(NODE, node)
    assert status(small) == status(node)
    assert status(small)["allocatable"] == 4
    assert "images" not in small["status"]
