"""docs/metrics.md lists every metric there is, and none that is not."""

import pathlib
import re

from vlm_operator import metrics as operator_metrics
from vlm_worker import metrics as worker_metrics

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
ROW = re.compile(r"^\| `(vlm_\w+)` \| (\w+) \| (.*?) \|", re.MULTILINE)
OPERATOR, WORKER = (ROW.findall(part) for part in PAGE.split("## Gateway and workers"))


def test_the_operators_metrics_are_listed_with_type_and_labels():
    found = []
    for family in operator_metrics.REGISTRY.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        collector = operator_metrics.REGISTRY._names_to_collectors[family.name]
        labels = ", ".join(f"`{label}`" for label in collector._labelnames) or "none"
        found.append((name, family.type, labels))
    assert sorted(OPERATOR) == sorted(found)


def test_the_workers_metrics_are_listed():
    named = [
        value
        for name, value in vars(worker_metrics).items()
        if name.isupper() and isinstance(value, str)
    ]
    assert sorted(name for name, _, _ in WORKER) == sorted(named)
    assert all((name.endswith("_total")) <= (kind == "counter") for name, kind, _ in WORKER)
