"""The manifests of Argo CD and Flux name objects, paths, values and managers that exist."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from vlm_operator import names

ROOT = Path(__file__).parents[2]
GITOPS = ROOT / "examples/gitops"
SCHEMA = json.loads((ROOT / "helm/triptych/values.schema.json").read_text())
CLUSTER_SCOPED = (
    "Namespace",
    "CustomResourceDefinition",
    "ClusterRole",
    "ClusterRoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
)
WAVE = "argocd.argoproj.io/sync-wave"
Manifest = dict[str, Any]


def read(path: str) -> Manifest:
    found: Manifest = yaml.safe_load((GITOPS / path).read_text())
    return found


PROJECT = read("argocd/project.yaml")["spec"]
APPLICATIONS = {path: read(f"argocd/{path}.yaml") for path in ("operator", "services")}
FLUX = {
    path: read(f"flux/{path}.yaml")
    for path in ("source", "operator", "operator/release", "services")
}
SERVICES = [yaml.safe_load(path.read_text()) for path in sorted((GITOPS / "services").glob("*"))]


@pytest.mark.parametrize("values", [
    APPLICATIONS["operator"]["spec"]["source"]["helm"]["valuesObject"],
    FLUX["operator/release"]["spec"]["values"],
], ids=["argocd", "flux"])  # fmt: skip
def test_the_chart_takes_the_values(values: Manifest):
    defaults = yaml.safe_load((ROOT / "helm/triptych/values.yaml").read_text())
    jsonschema.validate(merged(defaults, values), SCHEMA)


def merged(defaults: Manifest, values: Manifest) -> Manifest:
    """Merge values as Helm does."""
    inner = {
        key: merged(defaults[key], value)
        for key, value in values.items()
        if isinstance(value, dict) and isinstance(defaults.get(key), dict)
    }
    return {**defaults, **values, **inner}


def test_paths_exist():
    for item in APPLICATIONS.values():
        assert (ROOT / item["spec"]["source"]["path"]).is_dir()
    for name in ("operator", "services"):
        assert (ROOT / FLUX[name]["spec"]["path"]).is_dir()
    chart = ROOT / FLUX["operator/release"]["spec"]["chart"]["spec"]["chart"]
    assert (chart / "Chart.yaml").is_file()


def test_the_project_permits_what_the_applications_apply():
    permitted = {(item["group"], item["kind"]) for item in PROJECT["clusterResourceWhitelist"]}
    chart = [item for item in yaml.safe_load_all((ROOT / "install.yaml").read_text()) if item]
    applied = [
        (item["apiVersion"].rpartition("/")[0], item["kind"])
        for item in [*chart, *SERVICES]
        if "namespace" not in item["metadata"]
    ]
    assert {kind for _, kind in applied} == {*CLUSTER_SCOPED, "VLMNodeClass"}
    assert permitted == set(applied)
    namespaces = {item["namespace"] for item in PROJECT["destinations"]}
    assert namespaces == {
        item["metadata"]["namespace"]
        for item in [*chart, *SERVICES]
        if "namespace" in item["metadata"]
    }
    for item in APPLICATIONS.values():
        assert item["spec"]["project"] == read("argocd/project.yaml")["metadata"]["name"]
        assert item["spec"]["source"]["repoURL"] in PROJECT["sourceRepos"]
        assert item["spec"]["destination"]["namespace"] in namespaces


def test_ignored_managers_are_those_of_the_operator():
    (ignored,) = APPLICATIONS["services"]["spec"]["ignoreDifferences"]
    assert ignored["group"] == names.GROUP
    wanted = [names.MANAGER, names.MANAGER_STATUS, names.MANAGER_AUTOSCALER]
    assert ignored["managedFieldsManagers"] == wanted
    page = (ROOT / "docs/gitops.md").read_text()
    line = f"managedFieldsManagers: [{', '.join(wanted)}]"
    assert line in page
    assert line in (GITOPS / "argocd/services.yaml").read_text()


def test_what_an_object_needs_is_in_an_earlier_wave():
    waves = {item["kind"]: int(item["metadata"]["annotations"][WAVE]) for item in SERVICES}
    assert waves[names.KIND_NODE_CLASS] < waves[names.KIND_SERVICE]
    # a Suspended object in an earlier wave would keep the sync running
    assert waves[names.KIND_SERVICE] == max(waves.values())
    first, second = (
        int(APPLICATIONS[name]["metadata"]["annotations"][WAVE])
        for name in ("operator", "services")
    )
    assert first < second
    options = APPLICATIONS["services"]["spec"]["syncPolicy"]["syncOptions"]
    assert "SkipDryRunOnMissingResource=true" in options


def test_references_of_flux_name_objects_of_the_example():
    objects = {(item["kind"], item["metadata"]["name"]) for item in FLUX.values()}
    operator, services = FLUX["operator"], FLUX["services"]
    for spec in (
        operator["spec"],
        services["spec"],
        FLUX["operator/release"]["spec"]["chart"]["spec"],
    ):
        assert (spec["sourceRef"]["kind"], spec["sourceRef"]["name"]) in objects
    (check,) = operator["spec"]["healthChecks"]
    release = FLUX["operator/release"]
    assert check == {
        "apiVersion": release["apiVersion"],
        "kind": release["kind"],
        "name": release["metadata"]["name"],
        "namespace": release["metadata"]["namespace"],
    }
    assert services["spec"]["dependsOn"] == [{"name": operator["metadata"]["name"]}]
    assert services["spec"]["wait"] is True
    assert "healthChecks" not in services["spec"]  # Flux ignores them beside wait


def test_the_repository_of_flux_contains_the_paths_that_it_uses():
    """The lines of `ignore` exclude all but helm and examples/gitops."""
    lines = FLUX["source"]["spec"]["ignore"].split()
    assert lines == ["/*", "!/helm", "!/examples", "/examples/*", "!/examples/gitops"]


@pytest.mark.parametrize("tool", ["argocd", "flux"])
def test_each_example_says_what_when_what_to_expect_and_how_to_clean_up(tool: str):
    page = (GITOPS / tool / "README.md").read_text()
    for part in ("**What.**", "**When.**", "**Expected.**", "**Clean up.**"):
        assert part in page
    for file in (GITOPS / tool).glob("*.yaml"):
        assert yaml.safe_load(file.read_text())["metadata"]["name"] in page
