"""The gateway as a process: what it imports, what its flags do, how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from worker.gateway.stack import COLOCATED, MODEL, NOBODY, stack

from vlm_local.subprocesses import tied

COMMAND = (
    "gateway",
    f"--model={MODEL}",
    "--served-name=shapes",
    "--bind=127.0.0.1",
    "--block-size=4",
    "--http-port=0",
    "--admin-port=0",
)


ROOT = Path(__file__).parents[3]
AS_IN_ITS_IMAGE = """
import importlib.metadata, re, runpy, sys
lock = open(sys.argv.pop(1)).read()
locked = {re.sub("[-_.]+", "-", name) for name in re.findall(r"(?m)^([\\w.-]+)==", lock)}
installed = {
    module
    for module, owners in importlib.metadata.packages_distributions().items()
    if not {re.sub("[-_.]+", "-", owner.lower()) for owner in owners} & {*locked, "triptych"}
}
class OnlyLocked:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in installed or name == "vlm_kernels":
            raise ModuleNotFoundError(f"the gateway's image has no {name}", name=name)
sys.meta_path.insert(0, OnlyLocked)
runpy.run_module("vlm_worker", run_name="__main__", alter_sys=True)
"""


async def start(
    *args: str, how: Sequence[str] = ("-m", "vlm_worker")
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *tied([sys.executable, *how, *COMMAND, *args]),
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT / "worker",
    )


async def until_logged(process: asyncio.subprocess.Process, message: str) -> dict[str, str]:
    assert process.stderr is not None
    async with asyncio.timeout(60):
        async for line in process.stderr:
            entry: dict[str, str] = json.loads(line)
            if entry["message"] == message:
                return entry
    raise AssertionError(f"it ended before it logged {message!r}")


async def test_each_of_its_modules_can_be_imported_in_its_image() -> None:
    code = AS_IN_ITS_IMAGE.rpartition("runpy.run_module")[0] + (
        "import importlib, pkgutil, vlm_worker.gateway as gateway\n"
        "for module in pkgutil.walk_packages(gateway.__path__, 'vlm_worker.gateway.'):\n"
        "    importlib.import_module(module.name)\n"
        "import vlm_worker.serve.gateway, huggingface_hub, kubernetes.aio\n"
        "print(*sys.modules)\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(ROOT / "requirements/gateway.txt"),
        stdout=asyncio.subprocess.PIPE, cwd=ROOT / "worker",
    )  # fmt: skip
    out, _ = await process.communicate()
    loaded = out.decode().split()
    assert {"starlette", "kubernetes", "vlm_worker.gateway.discovery"} <= set(loaded)
    assert not {"torch", "transformers", "vlm_kernels", "vlm_worker.engine"} & set(loaded)


async def test_in_its_image_it_serves_a_request_and_sigterm_ends_it_with_0() -> None:
    async with stack(*COLOCATED) as served:
        (worker,) = served.workers
        process = await start(
            f"--worker={worker.address}",
            "--drain-timeout-seconds=5",
            how=("-c", AS_IN_ITS_IMAGE, str(ROOT / "requirements/gateway.txt")),
        )
        try:
            url = (await until_logged(process, "gateway serves"))["url"]
            await until_logged(process, "worker found")
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                answer = await client.post(
                    "/v1/completions", json={"model": "shapes", "prompt": "red", "max_tokens": 3}
                )
            assert answer.json()["usage"]["completion_tokens"] == 3
            line = await until_logged(process, "request")
            assert line["request_id"] == answer.headers["x-request-id"]
            assert line["outcome"] == "ok"
        finally:
            process.send_signal(signal.SIGTERM)
            _, rest = await process.communicate()
        assert process.returncode == 0, rest.decode()


async def test_it_declares_all_the_memory_that_it_may_take() -> None:
    process = await start(
        f"--worker={NOBODY}", "--max-connections=100", "--drain-timeout-seconds=0"
    )
    try:
        logged = await until_logged(process, "declared memory")
        url = (await until_logged(process, "gateway serves"))["admin_url"]
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            text = (await client.get("/metrics")).text
    finally:
        process.send_signal(signal.SIGTERM)
        await process.communicate()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    parts = {
        s.labels["part"]: s.value for s in samples if s.name == "triptych_memory_declared_bytes"
    }
    (total,) = (s.value for s in samples if s.name == "triptych_memory_declared_total_bytes")
    (resident,) = (s.value for s in samples if s.name == "triptych_memory_resident_bytes")
    assert total == sum(parts.values()) == logged["bytes"]
    assert parts["requests"] > parts["kept"] > parts["connections"] > 0
    assert parts["process"] <= resident < total


async def test_a_port_that_is_taken_is_said_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await start(f"--worker={NOBODY}", f"--http-port={port}")
        _, said = await process.communicate()
    assert process.returncode == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in said.decode().splitlines()[-1]
