"""`vlm chat` against real servers: through the API server's port-forward, and directly."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from vlm_cli.output import Format

from .asking import PNG, ask, failure, straight, through


async def test_the_answer_the_stages_and_the_usage_are_shown(
    openai: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    await ask(straight(openai.url))
    out = capsys.readouterr().out
    assert out.startswith("a red circle\n")
    rows = [line.split()[:3] for line in out.splitlines() if "%" in line]
    assert rows == [
        ["gateway", "2.0", "5%"],
        ["media", "5.5", "14%"],
        ["encode", "12.5", "31%"],
        ["prefill", "20.0", "50%"],
        ["TTFT", "40.0", "100%"],
    ]
    assert "60 prompt tokens (36 image, 24 text, 0 cached), 2 answer tokens" in out


async def test_bars_follow_each_other_and_fill_the_width(
    openai: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    await ask(straight(openai.url))
    bars = [
        line[line.index("%") + 3 :] for line in capsys.readouterr().out.splitlines() if "█" in line
    ]
    ends = [len(bar.rstrip()) for bar in bars]
    starts = [len(bar) - len(bar.lstrip()) for bar in bars]
    assert starts == [0, *ends[:-1]]
    assert ends[-1] == 40


async def test_images_travel_as_data_urls_before_the_question(openai: Any, tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    image.write_bytes(PNG)
    await ask(straight(openai.url), image, image, detail="low")
    (body,) = openai.bodies
    first, second, text = body["messages"][0]["content"]
    assert first == second
    assert first["image_url"]["detail"] == "low"
    assert first["image_url"]["url"] == "data:image/png;base64," + base64.b64encode(PNG).decode()
    assert text == {"type": "text", "text": "What shape?"}
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("shapes", 16, 0.0)
    assert body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("form", "read"),
    [
        pytest.param(Format.JSON, json.loads, id="JSON"),
        pytest.param(Format.YAML, yaml.safe_load, id="YAML"),
    ],
)
async def test_machines_get_one_document(
    openai: Any,
    capsys: pytest.CaptureFixture[str],
    form: Format,
    read: Callable[[str], dict[str, Any]],
) -> None:
    await ask(straight(openai.url + "/v1/", model="other"), output=form)
    answer = read(capsys.readouterr().out)
    assert answer["answer"] == "a red circle"
    assert answer["finishReason"] == "stop"
    assert answer["ttftMilliseconds"] == 40.0
    assert list(answer["stagesMilliseconds"]) == ["gateway", "media", "encode", "prefill"]
    assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 36
    assert 0 < answer["clientTtftMilliseconds"] <= answer["totalMilliseconds"]
    assert openai.bodies[0]["model"] == "other"


async def test_a_server_without_stage_times_is_said_to_have_none(
    openai: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    openai.timing = False
    await ask(straight(openai.url))
    assert "reports no stage times" in capsys.readouterr().out


async def test_a_service_is_reached_through_the_api_server(
    openai: Any,
    api: Any,
    kubeconfig: str,
    add_service: Any,
    add_gateway: Any,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    api.target_port = urlsplit(openai.url).port
    add_service()
    add_gateway("demo-gateway-old", deleting=True)
    add_gateway("demo-gateway-new", ready=False)
    add_gateway("other-gateway", service="other")
    add_gateway("demo-gateway-a")
    openai.pieces = ("x" * 3000,) * 40  # more than one message of the WebSocket
    await ask(through(kubeconfig, api_key="sk-1"))
    captured = capsys.readouterr()
    assert captured.out.startswith("x" * 120_000)
    assert captured.err == ""
    assert [record for record in caplog.records if record.name == "asyncio"] == []
    assert set(api.forwarded) == {"demo-gateway-a:8000"}
    assert openai.keys == ["Bearer sk-1"]
    assert openai.bodies[0]["model"] == "shapes"


async def test_a_big_image_passes_the_port_forward(
    openai: Any, api: Any, kubeconfig: str, add_service: Any, add_gateway: Any, tmp_path: Path
) -> None:
    api.target_port = urlsplit(openai.url).port
    add_service()
    add_gateway("g")
    image = tmp_path / "big.png"
    image.write_bytes(PNG + bytes(3 << 20))
    await ask(through(kubeconfig), image)
    url = openai.bodies[0]["messages"][0]["content"][0]["image_url"]["url"]
    assert base64.b64decode(url.partition(",")[2]) == image.read_bytes()


async def test_an_unready_service_with_a_gateway_is_asked_with_a_warning(
    openai: Any,
    api: Any,
    kubeconfig: str,
    add_service: Any,
    add_gateway: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    api.target_port = urlsplit(openai.url).port
    message = "decode 1/2: pod x Pending"
    add_service(
        conditions=[{"type": "Ready", "status": "False", "reason": "Pods", "message": message}]
    )
    add_gateway("g")
    await ask(through(kubeconfig))
    captured = capsys.readouterr()
    assert captured.out.startswith("a red circle")
    assert f"warning: demo is not ready: Pods: {message}" in captured.err


@pytest.mark.parametrize(
    ("kind", "status"), [("Accepted", "False"), ("Stalled", "True"), ("Ready", "False")]
)
async def test_a_service_without_a_gateway_says_what_blocks_it(
    kubeconfig: str, add_service: Any, kind: str, status: str
) -> None:
    blocked = {"type": kind, "status": status, "reason": "Because", "message": "of this"}
    add_service(conditions=[blocked])
    error = await failure(through(kubeconfig))
    assert error.problem == "demo is not ready: Because: of this"
    assert error.remedy == "vlm status demo"


async def test_a_service_without_status_points_at_the_operator(
    kubeconfig: str, add_service: Any
) -> None:
    add_service(conditions=[])
    error = await failure(through(kubeconfig))
    assert "no status yet" in error.problem
    assert "operator" in error.remedy
