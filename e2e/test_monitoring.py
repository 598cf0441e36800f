"""A real Prometheus scrapes a service as docs/monitoring.md configures it; no panel is empty."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from served import ANSWER, EXAMPLES, Served, found, place

import prometheus
from vlm_local.client import Object
from vlm_local.controlplane import ControlPlane
from vlm_local.demo.line import MODEL
from vlm_local.settings import LocalSettings
from vlm_local.subprocesses import tied
from vlm_local.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[1]
NAME = "node-types"  # its node classes have costs
NAMESPACE = "monitored"
VARIABLES = {"$namespace": NAMESPACE, "$service": NAME, "$role": ".*", "$modality": ".*"}
RATE = "30s"  # instead of $__rate_interval: Prometheus scrapes each second
TARGETS = {"encoder", "prefill", "decode", "gateway", ""}  # the operator has no role
PATIENCE_SECONDS = 180.0


def manifests() -> tuple[list[Object], Object]:
    """The example with one replica per pool, and a TTFT target that no request meets."""
    items = [yaml.safe_load(file.read_text()) for file in sorted((EXAMPLES / NAME).glob("*.yaml"))]
    classes = [item for item in items if item["kind"] == "VLMNodeClass"]
    (service,) = (item for item in items if item["kind"] == "VLMService")
    service["metadata"].pop("namespace", None)
    for pool in service["spec"]["pools"].values():
        pool["scaling"] = {"mode": "Auto", "minReplicas": 1, "maxReplicas": 1}
    service["spec"]["slo"] = {"ttftP95Milliseconds": 1, "itlP95Milliseconds": 60}
    return classes, service


@pytest.fixture
def rule_file(tmp_path: Path) -> Path:
    command = [sys.executable, str(ROOT / "tools/helm.py"), "template", "t"]
    command += [str(ROOT / "helm/triptych"), "--set", "monitoring.rules.enabled=true"]
    command += ["--show-only", "templates/monitoring/rules.yaml"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    spec = yaml.safe_load(text)["spec"]
    for group in spec["groups"]:
        group["interval"] = "1s"
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(spec))
    return file


def configuration(cluster: ControlPlane, rules: Path) -> Object:
    """The jobs of the page, with the credentials of this cluster."""
    (text,) = re.findall(
        r"```yaml\n(scrape_configs:.*?)```", (ROOT / "docs/monitoring.md").read_text(), re.DOTALL
    )
    content: Object = yaml.safe_load(text)
    for job in content["scrape_configs"]:
        for discovery in job["kubernetes_sd_configs"]:
            discovery["kubeconfig_file"] = str(cluster.kubeconfig)
    content["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    content["rule_files"] = [str(rules)]
    return content


class Prometheus:
    """A running Prometheus at an address of this machine."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def get(self, path: str, **parameters: str) -> Any:
        """`data` of an answer of its API."""
        async with httpx.AsyncClient(timeout=30) as client:
            answer = await client.get(f"{self._url}/api/v1/{path}", params=parameters)
        content = answer.json()
        assert content["status"] == "success", f"{parameters}: {content}"
        return content["data"]

    async def has_data(self, expression: str) -> bool:
        """Whether an expression has a value that is a number."""
        result = (await self.get("query", query=expression))["result"]
        return any(series["value"][1] != "NaN" for series in result)


@contextlib.contextmanager
def started(
    cluster: ControlPlane, folder: Path, rules: Path
) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process of Prometheus with its data below `folder`, and its log."""
    binaries = prometheus.built(LocalSettings.read())
    if binaries is None:
        pytest.skip("prometheus is not built: run .venv/bin/python tools/prometheus.py")
    config, log = folder / "prometheus.yaml", folder / "prometheus.log"
    config.write_text(yaml.safe_dump(configuration(cluster, rules)))
    command = [str(binaries["prometheus"]), f"--config.file={config}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", "--web.listen-address=127.0.0.1:0"]
    with log.open("wb") as output:
        process = subprocess.Popen(tied(command), stdout=output, stderr=output)
    try:
        yield process, log
    finally:
        process.terminate()
        process.wait(timeout=30)


async def listening(process: subprocess.Popen[bytes], log: Path) -> Prometheus:
    """Wait until Prometheus has logged its address."""

    async def address() -> str | None:
        text = log.read_text()  # noqa: ASYNC240
        assert process.poll() is None, text
        line = re.search(r'msg="Listening on".* address=(\S+)', text)
        return line[1] if line else None

    return Prometheus(f"http://{await found(address, seconds=60, awaited='Prometheus to listen')}")


def expressions() -> Iterator[tuple[str, str]]:
    """Board and panel, and an expression of it with its variables replaced."""
    for file in sorted((ROOT / "helm/triptych/boards").glob("*.json")):
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel.get("targets", ()):
                text = target["expr"].replace("$__rate_interval", RATE)
                values = VARIABLES if file.stem != "operator" else {"$namespace": ".*"}
                for variable, value in values.items():
                    text = text.replace(variable, value)
                yield f"{file.stem}: {panel['title']}: {target['legendFormat']}", text


async def test_every_panel_has_data_and_every_rule_is_evaluated(
    operator: ControlPlane, tmp_path: Path, rule_file: Path
) -> None:
    classes, service = manifests()
    with (
        contextlib.ExitStack() as at_the_end,
        started(operator, tmp_path, rule_file) as (process, log),
        place(operator, NAMESPACE, MODEL),
    ):
        for item in classes:
            operator.kubectl("apply", "-f", "-", stdin=json.dumps(item))
            at_the_end.callback(operator.kubectl, "delete", "vlmnc", item["metadata"]["name"])
        monitor = await listening(process, log)
        async with operator.client() as api:
            served = Served(operator, api, NAMESPACE, NAME)
            await served.apply(service)
            await served.ready()
            await _all_panels_have_data(served, monitor)
            targets = (await monitor.get("targets"))["activeTargets"]
            assert {target["labels"].get("role", "") for target in targets} == TARGETS
            down = [target["lastError"] for target in targets if target["health"] != "up"]
            assert not down
            groups = (await monitor.get("rules"))["groups"]
            rules = [rule for group in groups for rule in group["rules"]]
            assert len(rules) > 20
            assert not [rule["lastError"] for rule in rules if rule["health"] != "ok"]


async def _all_panels_have_data(served: Served, monitor: Prometheus) -> None:
    """Send requests until each expression has data; fail with those that have none."""
    missing = dict(expressions())
    assert len(missing) > 80

    async def complete() -> bool:
        assert await served.ask() == ANSWER
        for where, text in list(missing.items()):
            if await monitor.has_data(text):
                del missing[where]
        return not missing

    with contextlib.suppress(TimeoutError):
        await until(complete, seconds=PATIENCE_SECONDS, awaited="data in each panel", every=1.0)
    assert not missing, "\n".join(f"{where}: {text}" for where, text in missing.items())
