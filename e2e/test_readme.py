"""The commands of the README and of docs/scale-break-see.md, typed beside `make demo`."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from served import elapsed
from shell import commands, missing, terminal

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]
ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line.split("  #")[0].strip()
    for language, block in BLOCKS
    if not language
    for line in block.splitlines()
    if re.match(r"(make|vlm|kubectl|\.venv/bin/)", line)
]
ONCE = [c for c in COMMANDS if c.startswith("make demo") and "--once" in c]
BESIDE = [c for c in COMMANDS if re.match(r"vlm |kubectl ", c)]
PAGE = ROOT / "docs/scale-break-see.md"


@contextlib.asynccontextmanager
async def typed(command: str, **env: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A shell that runs a command in the repository; Ctrl-C at the end if it still runs."""
    process = await asyncio.create_subprocess_shell(
        f"exec {command}",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **env},  # noqa: TID251
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        await asyncio.wait_for(process.communicate(), 60)


async def run(command: str, **env: str) -> str:
    """The output of a command that ends well."""
    async with typed(command, **env) as process:
        output, _ = await process.communicate()
        print(f"$ {command}\n{output.decode()}")
        assert process.returncode == 0, command
        return output.decode()


async def line_of(process: asyncio.subprocess.Process, pattern: str) -> re.Match[str]:
    """The first line of output that has `pattern`."""
    assert process.stdout is not None
    async for line in process.stdout:
        print(line.decode(), end="")
        if found := re.search(pattern, line.decode()):
            return found
    raise AssertionError(f"ended without {pattern!r}")


def test_the_readme_has_the_commands_that_are_tested_here():
    assert "make demo" in COMMANDS
    assert "make test" in COMMANDS
    assert len(ONCE) == 2
    assert {c.split()[1] for c in BESIDE} >= {"status", "chat", "bench"}
    tested = {"make demo", "make test", *ONCE, *BESIDE}
    assert [c for c in COMMANDS if c not in tested and "vlm-worker serve" not in c] == []


async def test_beside_make_demo_the_other_commands_work(tmp_path: Path):
    async with typed("make demo") as demo:
        port = (await line_of(demo, r"The API is http://127.0.0.1:(\d+)/v1"))[1]
        kubeconfig = (await line_of(demo, r"export KUBECONFIG=(\S+)"))[1]
        path = (await line_of(demo, r"export PATH=(\S+)"))[1]
        for command in BESIDE:
            output = await run(command, KUBECONFIG=kubeconfig)
            assert output.strip(), command
        assert "True" in await run("kubectl get vlm", KUBECONFIG=kubeconfig)
        wait = "kubectl wait --for=condition=Ready vlm/shapes --timeout=30s"
        assert "condition met" in await run(wait, KUBECONFIG=kubeconfig)
        assert "pools" in await run("kubectl explain vlm.spec", KUBECONFIG=kubeconfig)
        await _type_page(tmp_path, port, full=False, KUBECONFIG=kubeconfig, PATH=path)


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_the_whole_page_scale_break_see_is_typed_beside_make_demo(tmp_path: Path):
    async with typed("make demo") as demo:
        port = (await line_of(demo, r"The API is http://127.0.0.1:(\d+)/v1"))[1]
        kubeconfig = (await line_of(demo, r"export KUBECONFIG=(\S+)"))[1]
        path = (await line_of(demo, r"export PATH=(\S+)"))[1]
        await _type_page(tmp_path, port, full=True, KUBECONFIG=kubeconfig, PATH=path)


async def _type_page(folder: Path, port: str, *, full: bool, **exported: str) -> None:
    """Type the console blocks of the page; each command prints what the page shows."""
    typed_commands = list(commands(PAGE, full=full))
    assert len(typed_commands) >= (30 if full else 12)
    began = time.monotonic()
    async with terminal() as shell:
        for name, value in exported.items():
            await shell.run(f'export {name}="{value}"')
        for command, shown in typed_commands:
            real = command.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
            printed, status = await shell.run(real.replace("/tmp/", f"{folder}/"))
            lost = missing(shown, printed)
            if status or lost:  # what a reader of this failure needs
                await shell.run("vlm status shapes; kubectl get events")
            assert (status, lost) == (0, []), command
    print(f"{len(typed_commands)} commands of {PAGE.name} in {elapsed(began)}")


def test_a_line_that_a_command_does_not_print_is_found():
    printed = "pod a-7b96bfcf4c-lkj2p is at 3.5 s\nshapes   True  1/1\n"
    assert missing(["pod a-6cf5596b99-hq94c is at 12 s", "…", "shapes True …"], printed) == []
    assert missing(["pod b-6cf5596b99-hq94c is at 12 s"], printed) != []
    assert missing(["shapes False …"], printed) == ["shapes False …"]


@pytest.mark.parametrize("command", ONCE)
async def test_make_demo_answers_once(command: str):
    assert "TTFT" in await run(command)


async def test_a_model_is_served_without_kubernetes_and_the_shown_client_asks_it():
    (command,) = [c for c in COMMANDS if "vlm-worker serve" in c]
    (client,) = [block for language, block in BLOCKS if language == "python"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    async with typed(command.replace("8000", port)) as server:
        await line_of(server, r"is served at")
        await asyncio.to_thread(_until_ready, f"http://127.0.0.1:{port}/readyz")
        script = client.replace("8000", port)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
    assert process.returncode == 0
    assert re.match(r"\w+ PromptTokensDetails\(.*image_tokens=\d+", output.decode()), output


def _until_ready(url: str) -> None:
    """Ask until the server is ready; the timeout of the test limits it."""
    while True:
        with (
            contextlib.suppress(urllib.error.HTTPError),
            urllib.request.urlopen(url, timeout=5) as answer,
        ):
            if answer.status == 200:
                return
