"""promtool accepts the rules; each alert fires when it should, and only then."""

import copy
import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

CASES = Path(__file__).with_name("alerts.yaml")


def alerts(rules: dict[str, Any]) -> list[dict[str, Any]]:
    return [rule for group in rules["groups"] for rule in group["rules"] if "alert" in rule]


def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(
    rules: dict[str, Any],
) -> None:
    fires: set[str] = set()
    silent: set[str] = set()
    for case in yaml.safe_load(CASES.read_text())["tests"]:
        for test in case.get("alert_rule_test", []):
            (fires if test["exp_alerts"] else silent).add(test["alertname"])
    assert fires == silent == {rule["alert"] for rule in alerts(rules)}


def test_promtool_finds_no_fault_in_rules_and_templates(
    rules: dict[str, Any], promtool: Path, tmp_path: Path
) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(rules))
    command = [str(promtool), "check", "rules", "--lint=all", "--lint-fatal", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    number = sum(len(group["rules"]) for group in rules["groups"])
    assert f"{number} rules found" in done.stdout


def test_rules_record_and_alerts_fire_as_their_cases_say(
    rules: dict[str, Any], promtool: Path, tmp_path: Path
) -> None:
    bare = copy.deepcopy(rules)
    for rule in alerts(bare):
        del rule["annotations"]  # promtool compares them too; `check rules` parses them
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(bare))
    cases = tmp_path / "alerts.yaml"
    cases.write_text(CASES.read_text())
    done = subprocess.run(
        [promtool, "test", "rules", cases], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_scrape_configuration_of_the_page(
    promtool: Path, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs/monitoring.md").read_text()
    (text,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", page, re.DOTALL)
    file = tmp_path / "prometheus.yaml"
    file.write_text(text)
    command = [str(promtool), "check", "config", "--syntax-only", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_parses_every_expression_of_a_board(
    boards: dict[str, dict[str, Any]], promtool: Path, tmp_path: Path
) -> None:
    found = [
        target["expr"].replace("$__rate_interval", "5m")
        for board in boards.values()
        for panel in board["panels"]
        for target in panel.get("targets", ())
    ]
    found += [item["expr"] for item in boards["service"]["annotations"]["list"]]
    rules = [{"record": f"board:{number}", "expr": text} for number, text in enumerate(found)]
    file = tmp_path / "boards.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "boards", "rules": rules}]}))
    command = [str(promtool), "check", "rules", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
