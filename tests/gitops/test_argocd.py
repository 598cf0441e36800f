"""Argo CD's health scripts and actions, run with Lua 5.1 as Argo CD runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

import argocd
from support.world import kstatus

from . import argo_lua, phases

FOLDER = phases.FOLDER
RESTARTED = "triptych.dev/restarted-at"
KINDS = sorted(path.parent for path in FOLDER.glob("*/health.lua"))
SAME = {
    "Healthy": {"Current"},
    "Degraded": {"Failed"},
    "Progressing": {"InProgress"},
    "Suspended": {"Current", "Failed"},
}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


HEALTH = [
    pytest.param(kind, case, id=f"{kind.name}/{Path(case['inputPath']).stem}")
    for kind in KINDS
    for case in read(kind / "health_test.yaml")["tests"]
]
ACTIONS = FOLDER / "VLMService/actions"
ACTION_TESTS = read(ACTIONS / "action_test.yaml")


@pytest.mark.parametrize(("kind", "case"), HEALTH)
def test_a_health_script_returns_status_and_message_of_each_case(kind: Path, case: dict[str, Any]):
    script, manifest = (kind / "health.lua").read_text(), read(kind / case["inputPath"])
    assert argo_lua.health(script, manifest) == case["healthStatus"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_testdata_is_a_case_and_its_name_is_the_status(kind: Path):
    cases = read(kind / "health_test.yaml")["tests"]
    files = sorted(f"testdata/{path.name}" for path in (kind / "testdata").iterdir())
    assert sorted(case["inputPath"] for case in cases) == files
    for case in cases:
        status = Path(case["inputPath"]).stem.partition("_")[0]
        assert case["healthStatus"]["status"].lower() == status
        assert case["healthStatus"]["message"]


@pytest.mark.parametrize("path", phases.MAKERS)
def test_testdata_is_what_the_operator_writes(path: str):
    again = "PYTHONPATH=operator:tests/operator .venv/bin/python tests/gitops/phases.py writes it"
    assert (FOLDER / path).read_text() == phases.testdata(path), again


def test_there_is_no_other_testdata():
    files = {str(path.relative_to(FOLDER)) for path in FOLDER.glob("*/testdata/*")}
    assert files == set(phases.MAKERS)


@pytest.mark.parametrize("name", phases.SERVICES)
def test_health_is_the_status_of_kstatus(name: str):
    manifest = yaml.safe_load(phases.testdata(f"VLMService/testdata/{name}.yaml"))
    script = (FOLDER / "VLMService/health.lua").read_text()
    found = argo_lua.health(script, manifest)
    assert kstatus(manifest) in SAME[found["status"]]
    spec = manifest["spec"]
    if found["status"] == "Suspended":
        assert spec.get("stopped") or spec.get("paused")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_deleted_object_is_progressing_and_no_status_is_no_error(kind: Path):
    script = (kind / "health.lua").read_text()
    manifest = yaml.safe_load(phases.testdata(f"{kind.name}/testdata/healthy.yaml"))
    manifest["metadata"]["deletionTimestamp"] = "2027-01-15T08:00:00Z"
    assert argo_lua.health(script, manifest)["status"] == "Progressing"
    del manifest["metadata"]["deletionTimestamp"]
    statuses: tuple[Any, ...] = (None, {}, {"conditions": []})
    for status in statuses:
        assert argo_lua.health(script, {**manifest, "status": status})["message"]


@pytest.mark.parametrize("case", ACTION_TESTS["discoveryTests"], ids=lambda case: case["inputPath"])
def test_a_service_offers_the_actions_that_change_it(case: dict[str, Any]):
    script = (ACTIONS / "discovery.lua").read_text()
    assert argo_lua.discover(script, read(ACTIONS / case["inputPath"])) == case["result"]


@pytest.mark.parametrize(
    "case",
    ACTION_TESTS["actionTests"],
    ids=lambda case: f"{case['action']}/{Path(case['inputPath']).stem}",
)
def test_an_action_makes_the_expected_object(case: dict[str, Any]):
    script = (ACTIONS / case["action"] / "action.lua").read_text()
    before, wanted = (read(ACTIONS / case[key]) for key in ("inputPath", "expectedOutputPath"))
    found = argo_lua.act(script, before)
    if case["action"] == "restart":
        notes = found["metadata"]["annotations"]
        assert notes[RESTARTED] > "2026-01-01T00:00:00Z"
        notes[RESTARTED] = "0001-01-01T00:00:00Z"
    assert found == wanted


def test_each_action_is_offered_and_tested():
    names = {path.parent.name for path in ACTIONS.glob("*/action.lua")}
    assert names == {case["action"] for case in ACTION_TESTS["actionTests"]}
    for case in ACTION_TESTS["discoveryTests"]:
        assert {item["name"] for item in case["result"]} == names


def test_the_config_map_contains_the_scripts():
    written = (FOLDER.parents[1] / "argocd-cm.yaml").read_text()
    assert written == argocd.config_map(argocd.FOLDER)
    data = yaml.safe_load(written)["data"]
    script = data["resource.customizations.health.triptych.dev_VLMService"]
    assert script == (FOLDER / "VLMService/health.lua").read_text()
    actions = yaml.safe_load(data["resource.customizations.actions.triptych.dev_VLMService"])
    assert set(actions) == {"discovery.lua", "definitions"}
    for item in actions["definitions"]:
        assert item["action.lua"] == (ACTIONS / item["name"] / "action.lua").read_text()


@pytest.mark.parametrize("name", ["string", "io", "math", "debug", "coroutine", "python"])
def test_scripts_run_without_the_libraries_that_argo_cd_does_not_open(name: str):
    assert argo_lua.run(f"return {name} == nil and getmetatable('').__index == nil", {}) is True
    assert argo_lua.run("return require('os').exit == nil", {}) is True
