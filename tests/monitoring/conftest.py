"""The rules and boards of the chart, and the binaries of Prometheus.

rules      spec of the rendered PrometheusRule
boards     the boards by name
promtool   its path; the test is skipped if it is not built
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import prometheus
from vlm_local.settings import LocalSettings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "triptych"


@pytest.fixture(scope="session")
def rules() -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tools/helm.py"), "template", "triptych", str(CHART)]
    command += ["--set", "monitoring.rules.enabled=true"]
    command += ["--show-only", "templates/monitoring/rules.yaml"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spec: dict[str, Any] = yaml.safe_load(text)["spec"]
    return spec


@pytest.fixture(scope="session")
def boards() -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in (CHART / "boards").glob("*.json")}


def binary(name: str) -> Path:
    """The path of promtool or prometheus; skips the test if they are not built."""
    found = prometheus.built(LocalSettings.read())
    if found is None:
        pytest.skip("promtool is not built: run .venv/bin/python tools/prometheus.py")
    return found[name]


@pytest.fixture(scope="session")
def promtool() -> Path:
    return binary("promtool")
