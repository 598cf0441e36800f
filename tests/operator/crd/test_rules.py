"""What a user's manifest is refused for, asked of a real API server: each rule with both sides."""

import copy
import pathlib
import re
from typing import Any

import pytest
import yaml

from vlm_operator import api as api_types
from vlm_operator.crd.reference import all_rules
from vlm_operator.local.client import ApiError
from vlm_operator.local.controlplane import ControlPlane

pytestmark = pytest.mark.cluster

SERVICES = "/apis/triptych.dev/v1alpha1/namespaces/default/vlmservices"
CASES = yaml.safe_load((pathlib.Path(__file__).parent / "rules.yaml").read_text())
# It speaks of a change, so it has a test of its own.
OF_CHANGES = {"served-name-immutable"}
MINIMAL = {
    "apiVersion": "triptych.dev/v1alpha1",
    "kind": "VLMService",
    "metadata": {"name": "demo"},
    "spec": {
        "model": {"uri": "pvc://shapes"},
        "pools": {"decode": {"scaling": {"mode": "Manual", "replicas": 1}}},
    },
}


def merged(base: Any, patch: Any) -> Any:
    """Apply a JSON merge patch; None removes."""
    if not isinstance(patch, dict) or not isinstance(base, dict):
        return copy.deepcopy(patch)
    kept = {key: value for key, value in base.items() if patch.get(key, "") is not None}
    changed = {
        key: merged(kept.get(key), value) for key, value in patch.items() if value is not None
    }
    return kept | changed


def test_every_rule_stands_in_the_table() -> None:
    assert {placed.rule.name for placed in all_rules()} == set(CASES) | OF_CHANGES


def test_what_is_not_built_says_so_and_nothing_else_does() -> None:
    unbuilt = {name for name, case in CASES.items() if case.get("forbidden")}
    rules = [placed.rule for placed in all_rules()]
    assert {rule.name for rule in rules if rule.message.startswith("not built yet: ")} == unbuilt
    assert {rule.name for rule in rules if rule.reason == "FieldValueForbidden"} == unbuilt


@pytest.mark.parametrize("name", sorted(CASES))
async def test_a_broken_rule_names_the_field_and_the_fix(
    name: str, api_server: ControlPlane
) -> None:
    case = CASES[name]
    async with api_server.client() as api:
        with pytest.raises(ApiError) as refusal:
            await api.request(
                "POST", SERVICES, body=merged(MINIMAL, case["refused"]), params={"dryRun": "All"}
            )
    kind = "Forbidden" if case.get("forbidden") else "(Invalid value|Required value)"
    where = re.escape(f"{case['path']}: ")
    # One cause ends where the next begins: `, spec.`
    within = rf"{where}{kind}((?!, spec\.).)*{re.escape(case['message'])}"
    assert re.search(within, str(refusal.value)), str(refusal.value)


@pytest.mark.parametrize("name", sorted(CASES))
async def test_a_kept_rule_lets_the_manifest_in(name: str, api_server: ControlPlane) -> None:
    async with api_server.client() as api:
        body = merged(MINIMAL, CASES[name].get("accepted", {}))
        created = await api.request(
            "POST", SERVICES, body=body, params={"dryRun": "All", "fieldValidation": "Strict"}
        )
    assert created["spec"] == body["spec"], "the API server drops or adds nothing"
    assert api_types.parse(created).spec, "what the API server takes, the operator reads"


async def test_the_served_name_cannot_change(api_server: ControlPlane) -> None:
    async with api_server.client() as api:
        await api.create(SERVICES, merged(MINIMAL, {"metadata": {"name": "named"}}))
        path = f"{SERVICES}/named"
        with pytest.raises(ApiError, match=r"spec\.model\.servedName: .* is immutable"):
            await api.patch(path, {"spec": {"model": {"servedName": "other"}}})
        await api.patch(path, {"spec": {"model": {"dtype": "Float32"}}})
        await api.delete(path)
