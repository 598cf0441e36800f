"""The operator's own settings are for new revisions: a changed one restarts no pod."""

import dataclasses
import json
from typing import Any

import pytest

from support.world import World, body, pool
from vlm_operator.cluster import DEPLOYMENT, POD, Manifest
from vlm_operator.plan.deployments import Options as PlanOptions
from vlm_operator.pods.parts import Images
from vlm_operator.reconcile.decisions import Options
from vlm_operator.state.deployments import ANNOTATION_RESOLVED

BEFORE = Options(plan=PlanOptions(images=Images(pull_policy="IfNotPresent", bind="::")))
AFTER = Options(plan=PlanOptions(images=Images(pull_policy="Always", bind="0.0.0.0")))
MORE = {"engine": {"extraArgs": ["--new"]}}


def container(item: Manifest) -> dict[str, Any]:
    found: dict[str, Any] = item["spec"]["template"]["spec"]["containers"][0]
    return found


def settings(item: Manifest) -> tuple[str | None, str]:
    bind = next(arg for arg in container(item)["args"] if arg.startswith("--bind="))
    return container(item).get("imagePullPolicy"), bind.removeprefix("--bind=")


def world() -> World:
    found = World(body(encoder=pool(1), decode=pool(2)), **fields(BEFORE))
    found.converge()
    return found


def fields(options: Options) -> dict[str, Any]:
    return {item.name: getattr(options, item.name) for item in dataclasses.fields(options)}


def templates(found: World) -> dict[str, Manifest]:
    return {
        item["metadata"]["name"]: item["spec"]["template"] for item in found.cluster.all(DEPLOYMENT)
    }


def uids(found: World) -> set[str]:
    return {item["metadata"]["uid"] for item in found.cluster.all(POD)}


def test_a_changed_setting_changes_no_live_deployment():
    found = world()
    before, pods = found.snapshot(), uids(found)
    found.loop = found.new_loop(options=AFTER)
    found.converge()
    assert found.snapshot() == before
    assert uids(found) == pods


def test_a_new_revision_takes_the_settings_of_today_and_others_keep_theirs():
    found = world()
    found.loop = found.new_loop(options=AFTER)
    found.apply(body(encoder=pool(1), decode=pool(2, **MORE)))
    found.converge(turns=40)
    seen = {
        item["metadata"]["labels"]["triptych.dev/role"]: settings(item)
        for item in found.cluster.all(DEPLOYMENT)
    }
    assert seen == {
        "encoder": ("IfNotPresent", "::"),
        "gateway": ("IfNotPresent", "::"),
        "decode": ("Always", "0.0.0.0"),
    }


@pytest.mark.parametrize("policy", ["", "IfNotPresent"])
def test_what_version_0_1_made_keeps_its_pods_under_other_settings(policy: str):
    """It stored neither setting: both are read off the pods."""
    was = Options(plan=PlanOptions(images=Images(pull_policy=policy, bind="::")))
    found = World(body(encoder=pool(1), decode=pool(2)), **fields(was))

    def default(item: Manifest, new: bool) -> None:
        del new
        if item["kind"] == "Deployment":
            container(item).setdefault("imagePullPolicy", "IfNotPresent")

    found.cluster.admission.append(default)
    found.converge()
    for item in found.cluster.all(DEPLOYMENT):

        def forget(live: Manifest) -> None:
            notes = live["metadata"]["annotations"]
            stored = json.loads(notes[ANNOTATION_RESOLVED])
            del stored["pull_policy"], stored["bind"]
            notes[ANNOTATION_RESOLVED] = json.dumps(stored)

        found.cluster.edit(DEPLOYMENT, "ns", item["metadata"]["name"], forget)
    before, pods = templates(found), uids(found)
    found.loop = found.new_loop(options=AFTER)
    found.converge()
    assert templates(found) == before
    assert uids(found) == pods
    found.loop = found.new_loop(options=BEFORE)
    found.converge()
    assert templates(found) == before
