"""The chart renders objects for Prometheus and Grafana where they are wanted, and no others."""

import json
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import yaml

Helm = Callable[..., subprocess.CompletedProcess[str]]
Manifest = dict[str, Any]
CRDS = ("--api-versions", "monitoring.coreos.com/v1")
BOARDS = ("--set", "monitoring.boards.enabled=true")
KINDS = ("PodMonitor", "PrometheusRule")


def rendered(helm: Helm, chart: str, *arguments: str) -> list[Manifest]:
    text = helm("template", "triptych", chart, "-n", "triptych-system", *arguments).stdout
    return [item for item in yaml.safe_load_all(text) if item]


def names_of(manifests: list[Manifest], *kinds: str) -> list[str]:
    return sorted(item["metadata"]["name"] for item in manifests if item["kind"] in kinds)


def alerts(manifests: list[Manifest]) -> dict[str, Manifest]:
    (item,) = (item for item in manifests if item["kind"] == "PrometheusRule")
    rules = [rule for group in item["spec"]["groups"] for rule in group["rules"]]
    return {rule["alert"]: rule for rule in rules if "alert" in rule}


def test_nothing_is_rendered_without_the_prometheus_operator(helm: Helm, chart: str) -> None:
    manifests = rendered(helm, chart)
    assert names_of(manifests, *KINDS, "ConfigMap") == []


def test_monitors_and_rules_are_rendered_where_their_api_exists(helm: Helm, chart: str) -> None:
    manifests = rendered(helm, chart, *CRDS)
    assert names_of(manifests, "PodMonitor") == ["triptych-operator", "triptych-operator-services"]
    assert names_of(manifests, "PrometheusRule") == ["triptych-operator"]
    assert names_of(manifests, "ConfigMap") == [], "boards are disabled by default"


@pytest.mark.parametrize("part", ["podMonitor", "rules"])
def test_true_and_false_take_precedence_over_the_api(helm: Helm, chart: str, part: str) -> None:
    kind = "PodMonitor" if part == "podMonitor" else "PrometheusRule"
    value = f"monitoring.{part}.enabled"
    assert names_of(rendered(helm, chart, "--set", f"{value}=true"), kind)
    assert not names_of(rendered(helm, chart, *CRDS, "--set", f"{value}=false"), kind)


def test_the_monitor_of_services_follows_the_watched_namespaces(helm: Helm, chart: str) -> None:
    def selector(*arguments: str) -> Manifest:
        monitors = rendered(helm, chart, *CRDS, *arguments)
        (item,) = (one for one in monitors if one["metadata"]["name"].endswith("-services"))
        found: Manifest = item["spec"]["namespaceSelector"]
        return found

    assert selector() == {"any": True}
    assert selector("--set", "watchNamespaces={a,b}") == {"matchNames": ["a", "b"]}


def test_the_operators_labels_are_kept(helm: Helm, chart: str) -> None:
    """Its metrics have the labels namespace, service and role of a VLMService."""
    monitors = rendered(helm, chart, *CRDS)
    (item,) = (one for one in monitors if one["metadata"]["name"] == "triptych-operator"
               and one["kind"] == "PodMonitor")  # fmt: skip
    (endpoint,) = item["spec"]["podMetricsEndpoints"]
    assert endpoint["honorLabels"] is True


def test_labels_interval_and_namespace_reach_the_objects(helm: Helm, chart: str) -> None:
    sets = "namespace=monitoring,labels.release=stack,podMonitor.interval=15s"
    arguments = [word for one in sets.split(",") for word in ("--set", f"monitoring.{one}")]
    manifests = rendered(helm, chart, *CRDS, *BOARDS, *arguments)
    found = [item for item in manifests if item["kind"] in (*KINDS, "ConfigMap")]
    assert len(found) == 6
    for item in found:
        assert item["metadata"]["namespace"] == "monitoring"
        assert item["metadata"]["labels"]["release"] == "stack"
        for endpoint in item["spec"].get("podMetricsEndpoints", []) if "spec" in item else []:
            assert endpoint["interval"] == "15s"


def test_boards_have_the_label_of_grafanas_sidecar_and_fit_into_a_release(
    helm: Helm, chart: str
) -> None:
    manifests = rendered(helm, chart, *BOARDS, "--set", "monitoring.boards.annotations.f=Triptych")
    boards = [item for item in manifests if item["kind"] == "ConfigMap"]
    assert names_of(boards, "ConfigMap") == [
        f"triptych-operator-board-{name}" for name in ("fleet", "operator", "service")
    ]
    for item in boards:
        assert item["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert item["metadata"]["annotations"] == {"f": "Triptych"}
        (text,) = item["data"].values()
        assert json.loads(text)["uid"].startswith("triptych-")
    assert len(yaml.safe_dump_all(manifests)) < 700_000  # a Secret has at most 1 MiB


def test_an_alert_can_be_changed_and_disabled(
    helm: Helm, chart: str, tmp_path: pathlib.Path
) -> None:
    file = tmp_path / "values.yaml"
    overrides = {
        "TriptychKVSaturated": {"for": "20m", "severity": "info"},
        "TriptychOutOfMemory": {"enabled": False},
    }
    rules = {"alerts": overrides, "alertLabels": {"team": "ml"}, "runbooks": "https://x/runbooks/"}
    file.write_text(yaml.safe_dump({"monitoring": {"rules": rules}}))
    plain = alerts(rendered(helm, chart, *CRDS))
    changed = alerts(rendered(helm, chart, *CRDS, "--values", str(file)))
    assert set(plain) - set(changed) == {"TriptychOutOfMemory"}
    saturated = changed["TriptychKVSaturated"]
    assert (saturated["for"], saturated["labels"]) == ("20m", {"severity": "info", "team": "ml"})
    page = "https://x/runbooks/TriptychKVSaturated.md"
    assert saturated["annotations"]["runbook_url"] == page
    assert saturated["expr"] == plain["TriptychKVSaturated"]["expr"]


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("monitoring.rules.alerts.KVFull.for=1m", "there is no alert KVFull"),
        ("monitoring.rules.alerts.TriptychKVSaturated.for=soon", "for"),
        ("monitoring.podMonitor.enabled=maybe", "enabled"),
        ("monitoring.boards.label=x", "label"),
    ],
)
def test_invalid_values_are_refused_by_name(
    helm: Helm, chart: str, argument: str, says: str
) -> None:
    answer = helm("template", "triptych", chart, *CRDS, "--set", argument, check=False)
    assert answer.returncode != 0
    assert says in answer.stderr


def test_the_notes_name_what_prometheus_still_needs(helm: Helm, chart: str) -> None:
    def notes(*arguments: str) -> str:
        command = ("install", "t", chart, "--dry-run=client", *arguments)
        return helm(*command).stdout.partition("NOTES:")[2]

    on = ("--set", "monitoring.podMonitor.enabled=true")
    assert "network.monitoringNamespace is empty" in notes(*on)
    ready = (*on, "--set", "network.monitoringNamespace=m", "--set", "monitoring.labels.release=x")
    assert "Prometheus" not in notes(*ready)
    assert "Prometheus" not in notes()


@pytest.mark.parametrize("more", [(), CRDS], ids=["without CRDs", "with CRDs"])
def test_helm_3_and_4_render_the_same_objects(
    each_helm: Helm, helm: Helm, chart: str, more: tuple[str, ...]
) -> None:
    def objects(program: Helm) -> dict[tuple[str, ...], Manifest]:
        found = rendered(program, chart, *more, *BOARDS)
        return {
            (one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]): one
            for one in found
        }

    assert objects(each_helm) == objects(helm)
