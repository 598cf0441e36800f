"""Rules and boards use names and labels that exist; alerts have runbooks, panels are complete.

docs/metrics.md lists the metrics: tests/contracts/test_metrics_page.py compares it with the code.
"""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vlm_operator import names
from vlm_worker.types import STAGES

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "triptych"
ROW = re.compile(r"^\| `(triptych_\w+)` \| (\w+) \| (.*?) \|", re.MULTILINE)
# labels that Prometheus and the PodMonitors of the chart add
OF_TARGETS = {"namespace", "pod", "service", "role", "variant"}
SELECTOR = re.compile(r"\b((?:triptych_|service:|pool:)[\w:]+)(?:\{([^}]*)\})?")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
GROUPING = re.compile(r"\b(?:by|on|group_left)\s*\(([^)]*)\)")
HEADINGS = ["Symptoms", "Check", "Causes and fixes"]
MAX_BYTES = 100_000  # of all boards: a release of Helm is one Secret of at most 1 MiB


def metrics() -> dict[str, set[str]]:
    """Labels by the name of each series on the wire."""
    found: dict[str, set[str]] = {}
    for name, kind, text in ROW.findall((ROOT / "docs/metrics.md").read_text()):
        labels = set(re.findall(r"`(\w+)`", text)) | OF_TARGETS
        series = {name: labels}
        if kind == "histogram":
            series = {f"{name}_{part}": labels for part in ("sum", "count")}
            series[f"{name}_bucket"] = labels | {"le"}
        for one, its in series.items():
            found[one] = found.get(one, set()) | its
    return found


def problems(expression: str, known: dict[str, set[str]]) -> Iterator[str]:
    """What an expression uses and no process exposes."""
    usable: set[str] = set(
        re.findall(r'label_replace\(.*?"(\w+)", "[^"]*", "", ""', expression, re.DOTALL)
    )
    for name, selector in SELECTOR.findall(expression):
        if name not in known:
            yield f"no metric {name}"
            continue
        usable |= known[name]
        yield from (
            f"{name} has no label {label}"
            for label in LABEL.findall(selector)
            if label not in known[name]
        )
    for group in GROUPING.findall(expression):
        wanted = {label.strip() for label in group.split(",")} - {""}
        yield from (f"no label {label} in {expression}" for label in wanted - usable)


def recorded(rules: dict[str, Any], known: dict[str, set[str]]) -> dict[str, set[str]]:
    """Labels by the name of each recorded series."""
    found: dict[str, set[str]] = {}
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "record" in rule:
                kept = re.search(r"\bby\s*\(([^)]*)\)", rule["expr"])
                named = kept[1].split(",") if kept else ["namespace", "service"]
                found[rule["record"]] = {label.strip() for label in named} - {"le"}
    return found


@pytest.fixture(scope="module")
def known(rules: dict[str, Any]) -> dict[str, set[str]]:
    """All series: those of processes and the recorded ones."""
    found = metrics()
    return found | recorded(rules, found)


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def test_rules_use_metrics_and_labels_that_exist(
    rules: dict[str, Any], known: dict[str, set[str]]
) -> None:
    all_rules = [rule for group in rules["groups"] for rule in group["rules"]]
    assert not [one for rule in all_rules for one in problems(rule["expr"], known)]


def test_boards_use_metrics_and_labels_that_exist(
    boards: dict[str, dict[str, Any]], known: dict[str, set[str]]
) -> None:
    texts = [
        target["expr"]
        for board in boards.values()
        for panel in panels(board)
        for target in panel["targets"]
    ]
    texts += [item["expr"] for item in boards["service"]["annotations"]["list"]]
    for board in boards.values():
        variables = [item["query"] for item in board["templating"]["list"]]
        texts += [item["query"] for item in variables if isinstance(item, dict)]
    assert len(texts) > 100
    assert not [one for text in texts for one in problems(text, known)]


def test_an_unknown_name_or_label_is_found() -> None:
    known = metrics()
    assert list(problems("rate(triptych_nothing_total[5m])", known)) == [
        "no metric triptych_nothing_total"
    ]
    text = 'sum by (tier) (triptych_itl_seconds_count{kind="a"})'
    assert list(problems(text, known)) == [
        "triptych_itl_seconds_count has no label kind",
        f"no label tier in {text}",
    ]


def test_every_metric_of_the_issue_is_on_a_board(boards: dict[str, dict[str, Any]]) -> None:
    text = json.dumps(boards)
    wanted = ("busy", "cost_per_request", "encoder_cache_hit", "prefix_cache_hit", "itl_seconds",
              "visual_tokens", "requests", "out_of_memory", "stage_seconds",
              "kv_tokens")  # fmt: skip
    assert not [name for name in wanted if f"triptych_{name}" not in text]


def test_every_panel_has_a_unit_a_description_and_legends(
    boards: dict[str, dict[str, Any]],
) -> None:
    assert set(boards) == {"fleet", "service", "operator"}
    for name, board in boards.items():
        numbers = [panel["id"] for panel in board["panels"]]
        assert len(set(numbers)) == len(numbers)
        for panel in panels(board):
            where = f"{name}: {panel['title']}"
            assert panel["description"].endswith("."), where
            assert panel["fieldConfig"]["defaults"]["unit"], where
            assert all(target["legendFormat"] for target in panel["targets"]), where
            assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24, where


def test_panels_do_not_overlap(boards: dict[str, dict[str, Any]]) -> None:
    for name, board in boards.items():
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            at = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(at["x"], at["x"] + at["w"])
                for y in range(at["y"], at["y"] + at["h"])
            }
            assert not cells & taken, f"{name}: {panel['title']}"
            taken |= cells


def test_the_waterfall_has_every_stage_in_the_order_of_a_request(
    boards: dict[str, dict[str, Any]],
) -> None:
    (panel,) = [one for one in panels(boards["service"]) if one["title"] == "TTFT waterfall"]
    assert [target["legendFormat"] for target in panel["targets"]] == list(STAGES)


def test_the_boards_are_those_of_their_tables_and_small(boards: dict[str, dict[str, Any]]) -> None:
    assert boards == _tool("boards").boards(), "run make generate"
    size = sum(path.stat().st_size for path in (CHART / "boards").iterdir())
    assert size < MAX_BYTES


def test_every_alert_has_texts_a_severity_and_a_runbook(rules: dict[str, Any]) -> None:
    pages = set()
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "alert" not in rule:
                continue
            assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]
            assert rule["annotations"]["summary"].endswith("."), rule["alert"]
            assert rule["annotations"]["description"].endswith("."), rule["alert"]
            page = ROOT / rule["annotations"]["runbook_url"]
            assert rule["alert"] in page.read_text()
            assert rule["alert"].startswith(page.stem)
            pages.add(page)
    assert pages == set((ROOT / "docs/runbooks").glob("*.md"))


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs/runbooks").glob("*.md")), ids=lambda p: p.stem
)
def test_a_runbook_has_symptoms_three_commands_and_causes_with_fixes(page: Path) -> None:
    text = page.read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    check = text.partition("## Check")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```sh\n(.*?)```", check, re.DOTALL)
    assert len(block.strip().splitlines()) == 3
    causes = text.partition("## Causes and fixes")[2]
    assert re.search(r"^\| cause \| fix \|$", causes, re.MULTILINE)
    assert len(re.findall(r"^\| ", causes, re.MULTILINE)) >= 3


def test_pod_monitors_select_the_labels_of_our_pods() -> None:
    text = (CHART / "templates/monitoring/podmonitors.yaml").read_text()
    assert names.LABEL_SERVICE in text
    assert names.LABEL_ROLE in text
    assert f"values: [{', '.join(names.Role)}]" in text


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
