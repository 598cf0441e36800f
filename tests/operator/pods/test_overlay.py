"""A podTemplate is merged as a strategic merge patch, and what the operator sets stays."""

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from support.world import body, empty, pool, service
from vlm_operator.api.pod_template import PodTemplate
from vlm_operator.autoscale.decide import Memory
from vlm_operator.pods.overlay import with_overlay
from vlm_operator.reconcile.decisions import Options, plan_turn

Manifest = dict[str, Any]
SPREAD = {"app": "x"}


def template() -> Manifest:
    return {
        "metadata": {"labels": {"triptych.dev/role": "decode"}},
        "spec": {
            "serviceAccountName": "own",
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {"name": "worker", "image": "w", "env": [{"name": "A", "value": "1"}]},
            ],
            "volumes": [{"name": "triptych-tmp", "emptyDir": {}}],
        },
    }


def merged(spec: Manifest, **metadata: Any) -> Manifest:
    overlay = PodTemplate.model_validate({"spec": spec, "metadata": metadata})
    return with_overlay(template(), overlay, spread=SPREAD)


def planned(manifest: Manifest) -> dict[str, Manifest]:
    """Pod templates by role."""
    objects = plan_turn(service(manifest), empty(), Memory(), options=Options()).plan.objects
    return {
        item["metadata"]["labels"]["triptych.dev/role"]: item["spec"]["template"]
        for item in objects
        if item["kind"] == "Deployment"
    }


def test_without_changes_the_template_is_the_same_object():
    base = template()
    assert with_overlay(base, PodTemplate(), spread=SPREAD) is base


def test_objects_are_merged_and_null_removes_a_field():
    spec = merged({"securityContext": {"seccompProfile": None, "fsGroup": 7}})["spec"]
    assert spec["securityContext"] == {"runAsNonRoot": True, "fsGroup": 7}


def test_items_are_merged_by_their_key_and_others_are_appended():
    spec = merged(
        {
            "containers": [
                {"name": "sidecar", "image": "s"},
                {
                    "name": "worker",
                    "env": [{"name": "B", "value": "2"}, {"name": "A", "value": "3"}],
                },
            ],
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
        }
    )["spec"]
    assert [item["name"] for item in spec["containers"]] == ["worker", "sidecar"]
    assert spec["containers"][0] == {
        "name": "worker",
        "image": "w",
        "env": [{"name": "A", "value": "3"}, {"name": "B", "value": "2"}],
    }
    assert [item["name"] for item in spec["volumes"]] == ["triptych-tmp", "shm"]


def test_the_operators_labels_win_and_a_spread_gets_the_pools_selector():
    other = {"labelSelector": {"matchLabels": {"own": "x"}}}
    found = merged(
        {"topologySpreadConstraints": [{"topologyKey": "zone"}, {"topologyKey": "host", **other}]},
        labels={"team": "a"},
        annotations={"b": "c"},
    )
    assert found["metadata"] == {
        "labels": {"team": "a", "triptych.dev/role": "decode"},
        "annotations": {"b": "c"},
    }
    zone, host = found["spec"]["topologySpreadConstraints"]
    assert zone["labelSelector"] == {"matchLabels": SPREAD}
    assert host["labelSelector"] == other["labelSelector"]


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.text("ab", max_size=2),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


@given(_VALUES.filter(lambda value: isinstance(value, dict)))
@settings(max_examples=200, deadline=None)
def test_merging_twice_is_merging_once_and_changes_no_argument(patch: Manifest):
    base, overlay = template(), PodTemplate(spec={"other": copy.deepcopy(patch)})
    once = with_overlay(base, overlay, spread=SPREAD)
    assert with_overlay(once, overlay, spread=SPREAD) == once
    assert base == template()
    assert overlay.spec == {"other": patch}


def test_every_role_and_the_gateway_take_it():
    sidecar = {"spec": {"containers": [{"name": "sidecar", "image": "s"}]}}
    found = planned(
        body(
            {"gateway": {"podTemplate": sidecar}},
            encoder=pool(podTemplate=sidecar),
            prefill=pool(podTemplate=sidecar),
            decode=pool(podTemplate=sidecar),
        )
    )
    assert {
        role: [item["name"] for item in one["spec"]["containers"]] for role, one in found.items()
    } == {
        "encoder": ["worker", "sidecar"],
        "prefill": ["worker", "sidecar"],
        "decode": ["worker", "sidecar"],
        "gateway": ["gateway", "sidecar"],
    }


def test_a_change_of_it_is_a_new_revision_of_that_role_only():
    plain = planned(body(prefill=pool(), decode=pool()))
    changed = planned(
        body(prefill=pool(), decode=pool(podTemplate={"spec": {"runtimeClassName": "nvidia"}}))
    )
    same = {role for role in plain if plain[role] == changed[role]}
    assert same == {"prefill", "gateway"}
    assert changed["decode"]["spec"]["runtimeClassName"] == "nvidia"
