"""`vlm chat` without an answer: each failure names the problem and a remedy."""

from pathlib import Path
from typing import Any

import pytest

from .asking import failure, straight, through


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


@pytest.mark.parametrize("text", ["# a page", "{}", "[]", "current-context: x", ": :"])
async def test_a_file_that_is_not_a_kubeconfig_is_named(text: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text(text)
    assert "broken cannot be used" in (await failure(through(str(broken)))).problem


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


async def test_images_that_are_none_are_named(openai: Any, tmp_path: Path) -> None:
    error = await failure(straight(openai.url), tmp_path / "none.png")
    assert "none.png cannot be read: No such file" in error.problem
    text = tmp_path / "a.txt"
    text.write_text("hello")
    error = await failure(straight(openai.url), text)
    assert "a.txt is not a PNG, JPEG, WebP or GIF" in error.problem
    assert openai.bodies == []


async def test_addresses_that_are_no_api_are_named(openai: Any, api: Any) -> None:
    assert "does not answer" in (await failure(straight("http://127.0.0.1:1"))).problem
    openai.status = 401
    assert "asks for a key" in (await failure(straight(openai.url))).problem
