"""The gateway as a process: what it imports, what its flags do, how it ends."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
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


async def start(*args: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *tied([sys.executable, "-m", "vlm_worker", *COMMAND, *args]),
        stderr=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[3] / "worker",
    )


async def until_logged(process: asyncio.subprocess.Process, message: str) -> dict[str, str]:
    assert process.stderr is not None
    async with asyncio.timeout(60):
        async for line in process.stderr:
            entry: dict[str, str] = json.loads(line)
            if entry["message"] == message:
                return entry
    raise AssertionError(f"it ended before it logged {message!r}")


async def test_it_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, vlm_worker.gateway.gateway_server; print(*sys.modules)"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[3] / "worker",
    )  # fmt: skip
    out, _ = await process.communicate()
    loaded = out.decode().split()
    assert "starlette" in loaded
    assert not {"torch", "transformers", "vlm_worker.engine", "vlm_worker.model"} & set(loaded)


async def test_a_request_is_served_and_sigterm_ends_it_with_0() -> None:
    async with stack(*COLOCATED) as served:
        (worker,) = served.workers
        process = await start(f"--worker={worker.address}", "--drain-timeout-seconds=5")
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
