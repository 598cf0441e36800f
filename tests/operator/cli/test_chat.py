"""`vlm chat` against real servers: through the API server's port-forward, and straight."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from vlm_operator.cli.chat import Question, chat
from vlm_operator.cli.errors import CliError
from vlm_operator.cli.output import Format
from vlm_operator.cli.target import Options

PNG = b"\x89PNG\r\n\x1a\n" + bytes(40)


def straight(url: str | None, **changes: Any) -> Options:
    fields = {"name": None, "url": url, "namespace": None, "kubeconfig": None}
    return Options(**(fields | {"api_key": None, "model": None} | changes))


def through(kubeconfig: str, name: str = "demo", **changes: Any) -> Options:
    return straight(None, name=name, kubeconfig=kubeconfig, **changes)


def question(*images: Path, **changes: Any) -> Question:
    fields: dict[str, Any] = {"text": "What shape?", "images": images, "detail": None}
    return Question(**(fields | {"max_tokens": 16, "temperature": 0.0} | changes))


async def ask(
    options: Options, asked: Question | None = None, form: Format = Format.TABLE, **changes: Any
) -> None:
    await chat(options, asked or question(), form=form, **{"timeout": 10.0} | changes)


async def failure(options: Options, asked: Question | None = None, **changes: Any) -> CliError:
    with pytest.raises(CliError) as caught:
        await ask(options, asked, **changes)
    return caught.value


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


async def test_pictures_travel_as_data_urls_before_the_question(
    openai: Any, tmp_path: Path
) -> None:
    image = tmp_path / "a.png"
    image.write_bytes(PNG)
    await ask(straight(openai.url), question(image, image, detail="low"))
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
    await ask(straight(openai.url + "/v1/", model="other"), form=form)
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


async def test_a_big_picture_passes_the_port_forward(
    openai: Any, api: Any, kubeconfig: str, add_service: Any, add_gateway: Any, tmp_path: Path
) -> None:
    api.target_port = urlsplit(openai.url).port
    add_service()
    add_gateway("g")
    image = tmp_path / "big.png"
    image.write_bytes(PNG + bytes(3 << 20))
    await ask(through(kubeconfig), question(image))
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


async def test_an_unknown_service_names_those_that_exist(kubeconfig: str, add_service: Any) -> None:
    error = await failure(through(kubeconfig, name="dmo"))
    assert "none at all" in error.remedy
    add_service("demo")
    add_service("other")
    add_service("far", namespace="elsewhere")
    error = await failure(through(kubeconfig, name="dmo"))
    assert error.problem == "there is no VLMService 'dmo' in namespace 'vision'"
    assert error.remedy == "there is: demo, other"
    error = await failure(through(kubeconfig, name="far"))
    assert error.remedy == "there is one in another: -n elsewhere"


async def test_without_a_cluster_the_way_to_one_is_named(tmp_path: Path) -> None:
    error = await failure(through(str(tmp_path / "none")))
    assert "no kubeconfig" in error.problem
    assert "vlm demo" in error.remedy
    broken = tmp_path / "broken"
    broken.write_text("current-context: x")
    assert "cannot be used" in (await failure(through(str(broken)))).problem


async def test_a_cluster_that_is_gone_is_named(api: Any, kubeconfig: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.write_text((tmp_path / "kubeconfig").read_text().replace(api.url, "http://127.0.0.1:1"))
    error = await failure(through(str(gone)))
    assert "http://127.0.0.1:1 does not answer" in error.problem
    assert "--kubeconfig" in error.remedy


async def test_a_missing_right_is_named(api: Any, kubeconfig: str, add_service: Any) -> None:
    api.status = 403
    error = await failure(through(kubeconfig))
    assert "pods is forbidden" in error.problem
    assert "can-i" in error.remedy


async def test_a_refused_port_forward_is_named(
    api: Any, kubeconfig: str, add_service: Any, add_gateway: Any
) -> None:
    add_service()
    add_gateway("g")
    api.forward_status = 403
    error = await failure(through(kubeconfig))
    assert "port-forward to pod g was refused: 403" in error.problem
    assert "pods/portforward" in error.remedy


async def test_a_pod_that_does_not_listen_is_a_failed_connection(
    api: Any, kubeconfig: str, add_service: Any, add_gateway: Any
) -> None:
    add_service()
    add_gateway("g")
    api.target_port = 1
    assert "failed" in (await failure(through(kubeconfig))).problem


@pytest.mark.parametrize(
    ("status", "error", "said"),
    [
        pytest.param(
            400,
            {
                "message": "No.",
                "type": "invalid_request_error",
                "param": "messages[0]",
                "code": "x",
            },
            "the gateway answered x: No. (messages[0])",
            id="OpenAI's shape",
        ),
        pytest.param(500, "text", "the gateway answered http_500: text", id="a string"),
        pytest.param(503, None, "the gateway answered overloaded: busy", id="overloaded"),
    ],
)
async def test_a_refusal_is_passed_on(openai: Any, status: int, error: Any, said: str) -> None:
    openai.status, openai.error = status, error
    assert (await failure(straight(openai.url, model="m"))).problem == said


async def test_a_stream_that_breaks_off_is_an_error(openai: Any) -> None:
    openai.break_off = True
    problem = (await failure(straight(openai.url))).problem
    assert problem == "the gateway answered cut_off: the stream ended before [DONE]"
    openai.error = {"message": "decode died", "type": "server_error", "code": "peer_lost"}
    assert "peer_lost: decode died" in (await failure(straight(openai.url))).problem


async def test_a_slow_answer_is_given_up(openai: Any) -> None:
    openai.pause = 30
    error = await failure(straight(openai.url, model="m"), timeout=0.2)
    assert error.problem == "no answer within 0.2 s"


async def test_pictures_that_are_none_are_named(openai: Any, tmp_path: Path) -> None:
    error = await failure(straight(openai.url), question(tmp_path / "none.png"))
    assert "none.png cannot be read: No such file" in error.problem
    text = tmp_path / "a.txt"
    text.write_text("hello")
    error = await failure(straight(openai.url), question(text))
    assert "a.txt is no PNG, JPEG, WebP or GIF" in error.problem
    assert openai.bodies == []


async def test_addresses_that_are_no_api_are_named(openai: Any, api: Any) -> None:
    assert "does not answer" in (await failure(straight("http://127.0.0.1:1"))).problem
    openai.status = 401
    assert "asks for a key" in (await failure(straight(openai.url))).problem
    assert "no service is named" in (await failure(straight(None))).problem
