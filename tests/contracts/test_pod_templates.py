"""Pods of a running service keep their template when the operator is upgraded.

templates/VERSION.json has the templates of the maximal service, by `Resolved.template`. Pods of an
older version do not change. If a template changes without a new version, an upgrade of the operator
restarts every pod of every service.
"""

import copy
import json
import pathlib
from typing import Any

import yaml

from support.world import empty, service
from vlm_operator import names
from vlm_operator.autoscale.decide import Memory
from vlm_operator.reconcile.decisions import Options, TurnPlan, plan_turn
from vlm_operator.state import NodeClassState, Resolved

HERE = pathlib.Path(__file__).parent
MAXIMAL = HERE.parent / "operator" / "crd" / "maximal.yaml"
FOLDER = HERE / "templates"
FIX = (
    "raise `Resolved.template` in vlm_operator/state/deployments.py, or the next upgrade of "
    "the operator restarts all pods of all services; then write templates/VERSION.json anew: "
    "PYTHONPATH=tests/operator python tests/contracts/test_pod_templates.py"
)


def planned() -> TurnPlan:
    """The first turn of the maximal service, without what only its user adds to the template."""
    manifest = copy.deepcopy(yaml.safe_load(MAXIMAL.read_text()))
    manifest["metadata"]["namespace"] = "ns"
    manifest["spec"]["stopped"] = False
    manifest["spec"]["model"].pop("cache")
    manifest["spec"]["model"].pop("weights")
    manifest["spec"]["model"]["revision"] = "8f4592b9"
    manifest["spec"].pop("tracing")
    manifest["spec"].pop("identity")
    manifest["spec"]["gateway"].pop("tls")
    manifest["spec"]["gateway"].pop("sessionPrefetch")
    manifest["spec"]["gateway"].pop("clientEmbeddings")
    for pool in manifest["spec"]["pools"].values():
        pool.pop("podTemplate", None)
        pool.get("kv", {}).pop("visualPercent", None)
        pool.pop("encoderCache", None)
        if pool.pop("maxLentRequests", 0):
            pool.pop("kv")
    classes = {"gpu-l40s": NodeClassState("gpu-l40s", accelerator="nvidia.com/gpu", accelerators=1)}
    observed = empty()
    observed = type(observed)(**{**vars(observed), "node_classes": classes})
    return plan_turn(service(manifest), observed, Memory(), options=Options())


def rendered() -> dict[str, Any]:
    """The pod template of each Deployment of the maximal service, by role and variant."""
    return {
        "/".join(
            item["metadata"]["labels"].get(label, "")
            for label in (names.LABEL_ROLE, names.LABEL_VARIANT)
        ): json.loads(json.dumps(item["spec"]["template"]))
        for item in planned().plan.objects
        if item["kind"] == "Deployment"
    }


def test_every_template_equals_the_snapshot_of_its_version():
    file = FOLDER / f"{Resolved.template}.json"
    assert file.exists(), f"no snapshot of this version: {FIX}"
    kept, now = json.loads(file.read_text()), rendered()
    assert set(kept) == set(now)
    changed = [name for name in now if now[name] != kept[name]]
    assert not changed, f"the pods of {', '.join(changed)} have changed: {FIX}"


def test_the_maximal_service_has_every_role_and_a_node_class():
    assert {name.partition("/")[0] for name in rendered()} == {*names.POOL_ROLES, "gateway"}
    assert "encoder/l40s" in rendered()


def test_a_renamed_field_changes_no_revision():
    """Digests of live Deployments use the field names of version 0.1."""
    found = planned().revisions
    assert {f"{role}/{name}": item.id for (role, name), item in found.items()} == {
        "encoder/cpu": "a588af85",
        "encoder/any": "77c4022f",
        "encoder/l40s": "3485feb6",
        "prefill/default": "ef88a1ac",
        "decode/default": "acbebb95",
        "gateway/": "e6a5d6f5",
    }


if __name__ == "__main__":
    text = json.dumps(rendered(), indent=1, sort_keys=True) + "\n"
    (FOLDER / f"{Resolved.template}.json").write_text(text)
