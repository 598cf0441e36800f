"""Shells complete commands, flags and names of services, and never wait for a cluster for long."""

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

START = "import sys; sys.argv[0] = 'vlm'; from vlm_cli import main; main()"
KUBECTL = "from vlm_cli import complete_for_kubectl; complete_for_kubectl()"


async def printed(code: str, *args: str, **env: str) -> str:
    values = (f"{name}={value}" for name, value in env.items())
    process = await asyncio.create_subprocess_exec(
        "env", *values, sys.executable, "-c", code, *args,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(60):
        out, err = await process.communicate()
    assert err.decode() == ""
    return out.decode()


async def in_bash(*words: str, **env: str) -> list[str]:
    """What bash gets for these words; the last one is not complete yet."""
    found = await printed(
        START,
        _VLM_COMPLETE="complete_bash",
        COMP_WORDS=" ".join(("vlm", *words)),
        COMP_CWORD=str(len(words)),
        **env,
    )
    return found.split()


async def test_commands_flags_and_values_are_completed() -> None:
    assert await in_bash("st") == ["status"]
    assert await in_bash("top", "--on") == ["--once"]
    assert await in_bash("logs", "x", "--role", "de") == ["decode"]


async def test_names_of_services_come_from_the_cluster(kubeconfig: str, add_service: Any) -> None:
    for name in ("shapes", "shop", "other"):
        add_service(name)
    add_service("shy", namespace="speech")
    for command in ("top", "status", "logs", "chat"):
        assert await in_bash(command, "sh", KUBECONFIG=kubeconfig) == ["shapes", "shop"]
    found = await in_bash("top", "--context", "there", "sh", KUBECONFIG=kubeconfig)
    assert found == ["shy"]


async def test_without_a_cluster_there_are_no_names(tmp_path: Path) -> None:
    assert await in_bash("top", "", KUBECONFIG=str(tmp_path / "none")) == []


def moved(kubeconfig: str, old: str, new: str) -> str:
    """The path of a kubeconfig whose API server has another address."""
    path = Path(kubeconfig).with_name("moved")
    path.write_text(Path(kubeconfig).read_text().replace(old, new))
    return str(path)


async def test_a_cluster_that_does_not_answer_is_given_up(api: Any, kubeconfig: str) -> None:
    hung = asyncio.Event()

    async def never(request: web.Request) -> web.Response:
        hung.set()
        await asyncio.Event().wait()
        raise AssertionError

    app = web.Application()
    app.router.add_get("/{path:.*}", never)
    server = TestServer(app)
    await server.start_server()
    path = moved(kubeconfig, api.url, str(server.make_url("")).rstrip("/"))
    assert await in_bash("top", "", KUBECONFIG=path) == []
    assert hung.is_set()
    await server.close()


@pytest.mark.parametrize(
    ("shell", "part"), [("bash", "complete -o"), ("zsh", "#compdef vlm"), ("fish", "complete --")]
)
async def test_a_script_is_printed_for_each_shell(shell: str, part: str) -> None:
    script = await printed(START, "completion", shell)
    assert part in script
    assert "_VLM_COMPLETE" in script


async def test_bash_accepts_its_script() -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    script = await printed(START, "completion", "bash")
    process = await asyncio.create_subprocess_exec(
        bash, "--norc", "-c", f"{script}\ncomplete -p vlm", stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert "_vlm_completion vlm" in out.decode()


async def test_kubectl_gets_words_and_a_directive(kubeconfig: str, add_service: Any) -> None:
    add_service("shapes")
    assert (await printed(KUBECTL, "sta")).splitlines() == ["status", ":4"]
    found = await printed(KUBECTL, "top", "s", KUBECONFIG=kubeconfig)
    assert found.splitlines() == ["shapes", ":4"]
    flag, directive = (await printed(KUBECTL, "top", "--on")).splitlines()
    assert (flag.split("\t")[0], directive) == ("--once", ":4")
    assert (await printed(KUBECTL, "bundle", "x", "--output", "")).splitlines() == [":0"]
