"""What a user's manifest is refused for, asked of a real API server: each rule with both sides."""

import copy
import pathlib
import re
from typing import Any

import pytest
import yaml

from crd.reference import all_rules
from vlm_local.client import ApiError
from vlm_local.controlplane import ControlPlane
from vlm_operator import api as api_types

pytestmark = pytest.mark.cluster

GROUP = "/apis/triptych.dev/v1alpha1"
SERVICES = f"{GROUP}/namespaces/default/vlmservices"
PATHS = {
    "VLMService": SERVICES,
    "VLMPool": f"{GROUP}/namespaces/default/vlmpools",
    "VLMNodeClass": f"{GROUP}/vlmnodeclasses",
}
HERE = pathlib.Path(__file__).parent
CASES = yaml.safe_load((HERE / "rules.yaml").read_text())
VALUES = yaml.safe_load((HERE / "values.yaml").read_text())
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


BARE = {
    "VLMService": MINIMAL,
    "VLMPool": {**MINIMAL, "kind": "VLMPool", "spec": {"replicas": 1}},
    "VLMNodeClass": {**MINIMAL, "kind": "VLMNodeClass", "spec": {}},
}


def manifest(case: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """A small object of the case's kind, changed by the patch."""
    changed: dict[str, Any] = merged(BARE[case.get("kind", "VLMService")], patch)
    return changed


async def refusal(api_server: ControlPlane, body: dict[str, Any]) -> str:
    """What the API server says against a manifest, which it must refuse."""
    async with api_server.client() as api:
        with pytest.raises(ApiError) as error:
            await api.request("POST", PATHS[body["kind"]], body=body, params={"dryRun": "All"})
    assert error.value.status == 422
    return str(error.value)


async def taken(api_server: ControlPlane, body: dict[str, Any]) -> None:
    """The API server takes a manifest as it is, and so does the operator."""
    async with api_server.client() as api:
        created = await api.request(
            "POST",
            PATHS[body["kind"]],
            body=body,
            params={"dryRun": "All", "fieldValidation": "Strict"},
        )
    assert created["spec"] == body["spec"], "the API server drops or adds nothing"
    if body["kind"] == "VLMService":
        assert api_types.parse(created).spec, "what the API server takes, the operator reads"


def says(text: str, path: str, kind: str, message: str) -> bool:
    """Whether one cause of a refusal has all three; it ends where the next begins: `, spec.`"""
    within = rf"{re.escape(path)}: {kind}((?!, spec\.).)*{re.escape(message)}"
    return re.search(within, text) is not None


def merged(base: Any, patch: Any) -> Any:
    """Apply a JSON merge patch; None removes."""
    if not isinstance(patch, dict) or not isinstance(base, dict):
        return copy.deepcopy(patch)
    kept = {key: value for key, value in base.items() if patch.get(key, "") is not None}
    changed = {
        key: merged(kept.get(key), value) for key, value in patch.items() if value is not None
    }
    return kept | changed


def test_every_rule_is_in_the_table() -> None:
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
    text = await refusal(api_server, manifest(case, case["refused"]))
    kind = "Forbidden" if case.get("forbidden") else "(Invalid value|Required value)"
    assert says(text, case["path"], kind, case["message"]), text
    assert "evaluating rule" not in text, "a rule that fails says nothing of the fix"


@pytest.mark.parametrize("name", sorted(CASES))
async def test_a_kept_rule_lets_the_manifest_in(name: str, api_server: ControlPlane) -> None:
    case = CASES[name]
    await taken(api_server, manifest(case, case.get("accepted", {})))


@pytest.mark.parametrize("case", VALUES["refused"], ids=lambda case: str(case["spec"]))
async def test_a_wrong_value_is_refused_with_its_path_and_what_the_field_takes(
    case: dict[str, Any], api_server: ControlPlane
) -> None:
    text = await refusal(api_server, manifest(case, {"spec": case["spec"]}))
    assert says(text, case["path"], "(Invalid value|Unsupported value)", case["message"]), text
    assert "evaluating rule" not in text, "a rule that fails says nothing of the fix"


@pytest.mark.parametrize("case", VALUES["accepted"], ids=lambda case: str(case["spec"]))
async def test_a_right_value_is_taken(case: dict[str, Any], api_server: ControlPlane) -> None:
    await taken(api_server, manifest(case, {"spec": case["spec"]}))


async def test_the_served_name_cannot_change(api_server: ControlPlane) -> None:
    async with api_server.client() as api:
        await api.create(SERVICES, merged(MINIMAL, {"metadata": {"name": "named"}}))
        path = f"{SERVICES}/named"
        with pytest.raises(ApiError, match=r"spec\.model\.servedName: .* is immutable"):
            await api.patch(path, {"spec": {"model": {"servedName": "other"}}})
        await api.patch(path, {"spec": {"model": {"dtype": "Float32"}}})
        await api.delete(path)
