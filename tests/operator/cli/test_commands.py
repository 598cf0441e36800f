"""The command lines as processes: arguments, exit codes, standard output and error."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

# what the console scripts `vlm` and `kubectl-vlm` run
START = "from vlm_cli import main; main()"


async def vlm(*args: str, interrupt_when: Any = None) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", START, *args,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        preexec_fn=_as_background_job,
    )  # fmt: skip
    if interrupt_when is not None:
        async with asyncio.timeout(30):
            while not interrupt_when():  # noqa: ASYNC110 - another process's progress
                await asyncio.sleep(0.01)
        process.send_signal(signal.SIGINT)
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


def _as_background_job() -> None:
    """A script's background job starts with SIGINT ignored, and can be interrupted all the same."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


async def test_chat_takes_a_url_in_place_of_a_name(openai: Any) -> None:
    code, out, err = await vlm("chat", "--url", openai.url, "What shape?", "-o", "json")
    assert (code, err) == (0, "")
    assert json.loads(out)["answer"] == "a red circle"
    assert openai.bodies[0]["messages"][0]["content"] == "What shape?"


async def test_chat_finds_its_service_by_kubeconfig(kubeconfig: str, add_service: Any) -> None:
    add_service("demo")
    code, out, err = await vlm("chat", "dmo", "Hi?", "--kubeconfig", kubeconfig)
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        "error: there is no VLMService 'dmo' in namespace 'vision'",
        "  there is: demo",
    ]


async def test_status_prints_a_table(kubeconfig: str, add_service: Any) -> None:
    add_service("demo")
    code, out, err = await vlm("status", "--kubeconfig", kubeconfig)
    assert (code, err) == (0, "")
    assert out.startswith("NAME  READY  MODEL")


async def test_another_context_brings_its_own_namespace(kubeconfig: str, add_service: Any) -> None:
    add_service("here")
    add_service("other", namespace="speech")
    code, out, err = await vlm("status", "--context", "there", "--kubeconfig", kubeconfig)
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["NAME", "other"]
    code, out, err = await vlm("status", "--context", "nowhere", "--kubeconfig", kubeconfig)
    assert (code, out) == (1, "")
    assert "nowhere" in err


async def test_the_first_of_several_kubeconfigs_chooses_the_context(
    kubeconfig: str, add_service: Any, tmp_path: Path
) -> None:
    add_service("here")
    second = tmp_path / "second"
    context = {"name": "gone", "context": {"cluster": "gone", "user": "u", "namespace": "gone"}}
    cluster = {"name": "gone", "cluster": {"server": "http://127.0.0.1:1"}}
    config = {"contexts": [context], "clusters": [cluster], "current-context": "gone"}
    second.write_text(json.dumps(config))
    code, out, err = await vlm("status", "--kubeconfig", f"{kubeconfig}:{second}")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["NAME", "here"]


async def test_bench_reports_on_ctrl_c(openai: Any) -> None:
    openai.pause = 60
    code, out, _ = await vlm(
        "bench", "--url", openai.url, "--rate", "50", "--duration", "100", "-o", "json",
        interrupt_when=lambda: openai.num_open >= 3,
    )  # fmt: skip
    group = json.loads(out)["requests"]["all"]
    assert group["cancelled"] == group["sent"] >= 3
    assert code == 1  # nothing was answered


async def test_chat_ends_quietly_on_ctrl_c(openai: Any) -> None:
    openai.pause = 60
    code, out, err = await vlm(
        "chat", "--url", openai.url, "Hi?", interrupt_when=lambda: openai.num_open >= 1
    )
    assert (code, out, err) == (130, "", "")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        pytest.param(["chat", "demo"], "vlm chat NAME", id="no question"),
        pytest.param(["bench", "x", "--rate", "0"], "--rate", id="no rate"),
        pytest.param(["bench", "x", "--image-share", "2"], "--image-share", id="share"),
        pytest.param(["bench", "x", "--image-size", "9"], "WIDTHxHEIGHT", id="size"),
        pytest.param(["status", "-o", "xml"], "xml", id="format"),
        pytest.param(["demo", "--port", "99999"], "--port", id="port"),
        pytest.param(["demo", "--kubeconfig", "/none"], "--kubeconfig", id="kubeconfig"),
        pytest.param(["nothing"], "nothing", id="command"),
    ],
)
async def test_wrong_arguments_are_named(args: list[str], said: str) -> None:
    code, out, err = await vlm(*args)
    assert code == 2
    assert out == ""
    assert said in err
    assert "Traceback" not in err
