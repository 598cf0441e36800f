"""Writes the boards of Grafana, helm/triptych/boards/*.json, from tools/boards/*.yaml.

boards.py FOLDER    Compact JSON, because a release of Helm is one Secret of at most 1 MiB.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

SERVICE = 'namespace="$namespace", service="$service"'
SOURCES = Path(__file__).parent / "boards"
COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Panel(NamedTuple):
    """One panel.

    Attributes:
        queries: `expr` and `legend` of each. $__rate_interval is at least four scrape intervals.
        unit: a unit of Grafana.
        kind: `timeseries`, `stat` or `bargauge`; the last two show the present value only.
        width: columns of 24.
        stack: whether the series are stacked.
        empty: text that is shown if there is no data, with the cause.
    """

    title: str
    description: str
    unit: str
    queries: Sequence[Mapping[str, str]]
    kind: str = "timeseries"
    width: int = 8
    stack: bool = False
    empty: str = ""


def rows_of(name: str) -> Iterator[tuple[str, list[Panel]]]:
    """The rows of a board: heading and panels."""
    for row in yaml.safe_load((SOURCES / f"{name}.yaml").read_text()):
        yield row["row"], [Panel(**panel) for panel in row["panels"]]


def target(index: int, query: Mapping[str, str], *, instant: bool) -> dict[str, Any]:
    return {
        "refId": chr(ord("A") + index),
        "expr": query["expr"],
        "legendFormat": query["legend"],
        "range": not instant,
        "instant": instant,
    }


def panel_of(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """The JSON of a panel at a place of the grid."""
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.empty:
        defaults["noValue"] = panel.empty
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}}
    if panel.kind == "timeseries":
        options = {"legend": {"displayMode": "list"}, "tooltip": {"mode": "multi", "sort": "desc"}}
        fill = 30 if panel.stack else 0
        mode = {"mode": "normal" if panel.stack else "none"}
        defaults["custom"] = {"fillOpacity": fill, "stacking": mode}
    elif panel.kind == "bargauge":
        options |= {"orientation": "horizontal", "displayMode": "basic"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": 4 if panel.kind == "stat" else 8},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            target(index, query, instant=panel.kind != "timeseries")
            for index, query in enumerate(panel.queries)
        ],
    }


def panels_of(name: str) -> list[dict[str, Any]]:
    """Place the rows below each other, and the panels of a row from left to right."""
    found: list[dict[str, Any]] = []
    y = 0
    for title, panels in rows_of(name):
        grid = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        found.append({"id": len(found) + 1, "type": "row", "title": title, "gridPos": grid})
        x, y, height = 0, y + 1, 0
        for panel in panels:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            found.append(panel_of(panel, len(found) + 1, x, y))
            x, height = x + panel.width, max(height, found[-1]["gridPos"]["h"])
        y += height
    return found


def variable(name: str, query: str, *, several: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": several,
        "includeAll": several,
    }
    return found | ({"allValue": ".*"} if several else {})


def board(name: str, title: str, *variables: dict[str, Any]) -> dict[str, Any]:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    return {
        "uid": f"triptych-{name}",
        "title": title,
        "tags": ["triptych"],
        "schemaVersion": 39,
        "editable": False,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, *variables]},
        "links": [
            {"type": "dashboards", "title": "Triptych", "tags": ["triptych"], "keepTime": True}
        ],
        "panels": panels_of(name),
    }


def boards() -> dict[str, dict[str, Any]]:
    """The boards by the name of their file."""
    pools = "triptych_desired_replicas"
    everywhere = variable("namespace", f"label_values({pools}, namespace)", several=True)
    one = (
        variable("namespace", f"label_values({pools}, namespace)", several=False),
        variable(
            "service", f'label_values({pools}{{namespace="$namespace"}}, service)', several=False
        ),
        variable("role", f"label_values({pools}{{{SERVICE}}}, role)", several=True),
        variable(
            "modality", f"label_values(triptych_ttft_seconds_count{{{SERVICE}}}, modality)",
            several=True,
        ),
    )  # fmt: skip
    own = variable("namespace", "label_values(triptych_operator_leader, namespace)", several=True)
    service = board("service", "Triptych service", *one)
    changes = {
        "name": "Scale decisions",
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": "blue",
        "expr": f"changes(max by (role) (triptych_desired_replicas{{{SERVICE}}})[2m:]) > 0",
        "titleFormat": "{{role}}: new number of replicas",
        "step": "30s",
    }
    return {
        "fleet": board("fleet", "Triptych fleet", everywhere),
        "service": service | {"annotations": {"list": [changes]}},
        "operator": board("operator", "Triptych operator", own),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    for name, content in boards().items():
        text = json.dumps(content, separators=(",", ":"))
        (folder / f"{name}.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
