"""`vlm simulate`: files in, a table, data, a chart and records out."""

import json
from xml.etree import ElementTree

import pytest
import yaml
from typer.testing import CliRunner

from vlm_cli.app import app
from vlm_operator.autoscale.record import differences, load_record, replay

CLASS = {
    "apiVersion": "triptych.dev/v1alpha1",
    "kind": "VLMNodeClass",
    "metadata": {"name": "large"},
    "spec": {
        "accelerator": {"resourceName": "nvidia.com/gpu", "count": 2},
        "cost": {"perHour": "3"},
        "expectedStartupSeconds": 60,
    },
}


def pool(least: int = 1) -> dict:
    return {
        "scaling": {"mode": "Auto", "minReplicas": least, "maxReplicas": 6},
        "variants": [{"name": "large", "nodeClassRef": {"name": "large"}}],
    }


SERVICE = {
    "apiVersion": "triptych.dev/v1alpha1",
    "kind": "VLMService",
    "metadata": {"name": "mine"},
    "spec": {
        "model": {"uri": "pvc://model", "maxModelLen": 4096},
        "slo": {"ttftP95Milliseconds": 2500},
        "pools": {"encoder": pool(), "prefill": pool(), "decode": pool(2)},
    },
}


@pytest.fixture
def policy(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump_all([SERVICE, CLASS]))
    return path


def vlm(*args: object) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["simulate", *map(str, args)])
    return done.exit_code, done.stdout, done.stderr


def test_a_manifest_s_policy_runs_on_a_recorded_trace(policy, tmp_path):
    trace = tmp_path / "mine.jsonl"
    line = '{"at": %d, "text_tokens": 200, "output_tokens": 20, "patches": [900]}\n'
    trace.write_text("".join(line % second for second in range(300)))
    code, out, _ = vlm("--trace", trace, "--policy", policy, "-o", "json")
    assert code == 0
    (row,) = json.loads(out)["runs"]
    assert (row["trace"], row["autoscaler"], row["requests"]) == ("mine", "triptych", 300)
    assert row["acceleratorHours"] == pytest.approx(4 * 2 * 300 / 3600, rel=0.03)
    assert row["cost"] == pytest.approx(row["acceleratorHours"] / 2 * 3, rel=0.03)
    assert (row["missedMinutes"], row["unserved"]) == (0, 0)


def test_decisions_are_recorded_so_that_they_replay(policy, tmp_path):
    record = tmp_path / "record.jsonl"
    code, _, _ = vlm("--seconds", 300, "--policy", policy, "--record", record)
    assert code == 0
    records = [load_record(line) for line in record.read_text().splitlines()]
    assert records
    assert all(item.changes_something for item in records)
    assert all(differences(item, replay(item)) == [] for item in records)


def test_a_baseline_runs_beside_it_and_a_chart_is_drawn(tmp_path):
    plot = tmp_path / "front.svg"
    code, out, _ = vlm(
        "--trace", "steady", "--seconds", 120, "--against", "pod-p95", "--plot", plot
    )
    assert code == 0
    assert "triptych" in out
    assert "pod-p95" in out
    names = [item.text for item in ElementTree.fromstring(plot.read_text()).iter() if item.text]
    assert {"triptych", "pod-p95"} <= set(names)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--trace", "nope"], "no trace 'nope'"),
        (["--against", "nope"], "no baseline 'nope'"),
        (["--plot", "x.gif"], "write FILE.svg"),
        (["--policy", "/nowhere.yaml"], "cannot be read"),
    ],
)
def test_what_is_not_there_is_said(args, words):
    code, _, err = vlm(*args)
    assert code == 1
    assert words in err


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        ([CLASS], "has 0 VLMServices"),
        ([SERVICE], "VLMNodeClass large does not exist"),
        (
            [SERVICE | {"spec": SERVICE["spec"] | {"pools": {"decode": pool()}}}, CLASS],
            "no prefill pool",
        ),
    ],
)
def test_a_policy_that_cannot_run_is_refused(tmp_path, documents, words):
    path = tmp_path / "policy.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    code, _, err = vlm("--policy", path)
    assert code == 1
    assert words in err


def test_a_plant_s_wrong_field_is_named(tmp_path):
    path = tmp_path / "hardware.yaml"
    path.write_text("kv_tokens: many\n")
    code, _, err = vlm("--hardware", path)
    assert code == 1
    assert "kv_tokens must be a number" in err
