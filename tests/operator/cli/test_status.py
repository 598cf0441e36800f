"""`vlm status`: a service as tables and as data."""

import datetime
import io
import json
from typing import Any

import pytest
import yaml
from rich.console import Console

from vlm_cli.output import CliError, Format
from vlm_cli.status import age, print_service, service_view, status

FULL: dict[str, Any] = {
    "url": "http://demo-gateway.vision.svc.cluster.local:8000/v1",
    "topology": "EncoderPrefillDecode",
    "currentRevision": "1a2b3c4d",
    "updateRevision": "5e6f7a8b",
    "summary": {
        "encoder": "1/1",
        "prefill": "2/2",
        "decode": "1/2",
        "ttftP95": "840ms",
        "kvOccupancyPercent": "35",
        "dominantStage": "encode",
    },
    "pools": {
        "encoder": {"desiredReplicas": 1, "readyReplicas": 1, "updatedReplicas": 1},
        "decode": {
            "desiredReplicas": 2,
            "readyReplicas": 1,
            "startingReplicas": 1,
            "lastDecision": {"from": 1, "to": 2, "reason": "KvOccupancy", "time": "x"},
        },
    },
    "slo": [
        {
            "modality": "Image",
            "ttftP95Milliseconds": 840,
            "targetMilliseconds": 800,
            "stages": {"prefill": 20, "encode": 60, "other": 20},
        }
    ],
    "cost": {"perHour": "4.50", "currency": "EUR"},
}
NOT_READY = [
    {"type": "Ready", "status": "False", "reason": "PodsPending", "message": "decode 1/2: [x]"},
    {"type": "Reconciling", "status": "True", "reason": "Rolling", "message": ""},
    {"type": "Stalled", "status": "False", "reason": "Fine", "message": ""},
    {"type": "RolloutProgressing", "status": "False", "reason": "Complete", "message": ""},
]


async def show(kubeconfig: str, name: str | None = None, **changes: Any) -> None:
    await status(name, kubeconfig=kubeconfig, **changes)


async def test_all_services_are_a_table(
    kubeconfig: str, add_service: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    add_service("demo", conditions=NOT_READY, **FULL)
    add_service("fine")
    await show(kubeconfig)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "NAME READY MODEL ENC PRE DEC TTFT-P95 KV% STAGE AGE",
        "demo False shapes 1/1 2/2 1/2 840ms 35 encode 30m",
        "fine True shapes - - - - - - 30m",
        "demo: PodsPending: decode 1/2: [x]",
    ]


async def test_a_service_at_zero_is_asleep_and_says_how_it_wakes(
    kubeconfig: str, add_service: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "all pools are at zero; a request starts them"
    ready = {"type": "Ready", "status": "True", "reason": "ScaledToZero", "message": told}
    add_service("demo", conditions=[ready], **FULL)
    await show(kubeconfig)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["demo", "True"]
    assert lines[2] == f"demo: ScaledToZero: {told}"
    await show(kubeconfig, "demo")
    assert "True asleep" in capsys.readouterr().out


async def test_all_namespaces_are_shown_on_demand(
    kubeconfig: str, add_service: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    add_service("far", namespace="elsewhere")
    with pytest.raises(CliError, match="no VLMService in namespace 'vision'"):
        await show(kubeconfig)
    await show(kubeconfig, everywhere=True)
    assert "elsewhere  far" in capsys.readouterr().out
    await show(kubeconfig, namespace="elsewhere")
    assert "far" in capsys.readouterr().out


async def test_one_service_is_shown_in_full(
    kubeconfig: str, add_service: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    add_service("demo", conditions=NOT_READY, **FULL)
    await show(kubeconfig, "demo")
    out = capsys.readouterr().out
    for part in (
        "vision/demo",
        "http://demo-gateway.vision.svc.cluster.local:8000/v1",
        "1a2b3c4d → 5e6f7a8b",
        "4.50 EUR per hour",
        "1 → 2 KvOccupancy",
        "encode 60%, prefill 20%, other 20%",
        "840 ms",
        "800 ms",
        "PodsPending",
        "decode 1/2: [x]",
    ):
        assert part in out
    assert "prefill  " not in out.partition("MODALITY")[0]


async def test_health_is_green_also_where_false_is_healthy(add_service: Any) -> None:
    out = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    service = add_service(conditions=NOT_READY)
    print_service(service_view(service, datetime.datetime.now(datetime.UTC)), out)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    green, red = "\x1b[32m", "\x1b[31m"
    words = {
        line.split()[0]: line.split()[1]
        for line in text.splitlines()
        if "alse" in line or "True" in line
    }
    assert words["Stalled"].startswith(f"{green}False")
    assert words["RolloutProgressing"].startswith(f"{green}False")
    assert words["Reconciling"].startswith(f"{red}True")
    assert words["Ready"].startswith(f"{red}False")


async def test_a_service_without_an_operator_is_reported(
    kubeconfig: str, add_service: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    add_service(conditions=[])
    await show(kubeconfig, "demo")
    out = capsys.readouterr().out
    assert "Unknown" in out
    assert "is the operator running?" in out


@pytest.mark.parametrize(
    ("form", "read"),
    [
        pytest.param(Format.JSON, json.loads, id="JSON"),
        pytest.param(Format.YAML, yaml.safe_load, id="YAML"),
    ],
)
async def test_machines_get_stable_names(
    kubeconfig: str, add_service: Any, capsys: pytest.CaptureFixture[str], form: Format, read: Any
) -> None:
    add_service("demo", conditions=NOT_READY, **FULL)
    await show(kubeconfig, "demo", output=form)
    view = read(capsys.readouterr().out)
    assert (view["ready"], view["reason"]) == (False, "PodsPending")
    assert 1800 <= view["ageSeconds"] < 1860
    assert view["pools"]["decode"]["readyReplicas"] == 1
    assert view["slo"][0]["stages"]["encode"] == 60
    await show(kubeconfig, output=form)
    [again] = read(capsys.readouterr().out)
    assert again == view | {"ageSeconds": again["ageSeconds"]}


async def test_machines_get_an_empty_list_where_there_is_nothing(
    kubeconfig: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await show(kubeconfig, output=Format.JSON)
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (119, "119s"), (125, "2m5s"), (300, "5m"), (7200, "120m"), (10800, "3h"),
     (172800, "2d")],
)  # fmt: skip
def test_ages_read_as_in_kubectl(seconds: int, text: str) -> None:
    assert age(seconds) == text
