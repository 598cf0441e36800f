"""A process from its first signal to its last: start, stop, and what a wrong start says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from worker.processes.driver import Attempt, Driver, Prompt
from worker.processes.workers import read_until, spawn, started

from vlm_local.subprocesses import tied
from vlm_worker.client import WorkerClient
from vlm_worker.errors import EngineError
from vlm_worker.types import Request, RequestKey, SamplingParams
from vlm_worker.wire.messages import PrefillCall

MODEL = Path(__file__).parents[3] / "examples/shapes/model"
PROMISE_SECONDS = 2.0
SLACK = 3


async def test_sigterm_while_the_model_loads_ends_the_process_soon() -> None:
    process = await spawn("decode", runner="model")
    log: list[dict[str, Any]] = []
    await read_until(process, log, "listening")
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(SLACK * PROMISE_SECONDS):
        assert await process.wait() == 0
    print(f"exited after {time.monotonic() - begun:.2f} s (promised {PROMISE_SECONDS:g})")
    process._transport.close()  # type: ignore[attr-defined]
    assert not any(fields["message"] == "ready" for fields in log), "the signal came too late"


async def test_sigterm_is_heard_before_anything_is_imported() -> None:
    """The first process of a container gets only signals that it listens for."""
    process = await spawn("decode", runner="model")
    async with asyncio.timeout(SLACK * PROMISE_SECONDS):
        while not _listens_for(process.pid, signal.SIGTERM):  # noqa: ASYNC110  no event for it
            await asyncio.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    assert process.stderr is not None
    assert await process.stderr.read() == b"", "the signal came too late"
    process._transport.close()  # type: ignore[attr-defined]


def _listens_for(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


async def test_threads_that_wait_leave_their_cores_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("OMP_DISPLAY_ENV", "TRUE")  # OpenMP itself says what holds
    async with started("encoder", runner="model") as worker:
        lines = [
            fields["message"] for fields in worker.log if "OMP_WAIT_POLICY" in fields["message"]
        ]
    assert lines
    assert all("'PASSIVE'" in line for line in lines)


async def test_an_idle_worker_stops_at_once_with_0() -> None:
    async with started("decode") as worker:
        worker.signal(signal.SIGTERM)
        async with asyncio.timeout(SLACK * PROMISE_SECONDS):
            assert await worker.process.wait() == 0


async def test_a_second_sigterm_does_not_wait_for_the_answer(driver: Driver) -> None:
    long = "--max-model-len=16000"
    async with (
        started("prefill", long) as p,
        started("decode", long) as d,
        WorkerClient(p.address) as prefill,
        WorkerClient(d.address) as decode,
    ):
        attempt = Attempt(driver, Prompt([101, 102], max_tokens=12_000), driver.key())
        task = asyncio.create_task(attempt.run(None, prefill, decode))
        await attempt.second_token.wait()
        d.signal(signal.SIGTERM)
        await d.until(lambda stats: stats["phase"] == "draining", seconds=PROMISE_SECONDS)
        d.signal(signal.SIGTERM)
        async with asyncio.timeout(SLACK * PROMISE_SECONDS):
            assert await d.process.wait() == 128 + signal.SIGTERM
        (ending,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(ending, BaseExceptionGroup), "the second signal came too late"


async def test_no_decode_child_outlives_its_worker(driver: Driver) -> None:
    async with started("encoder") as worker:
        children = _children_of(worker.process.pid)
        assert children, "the media pool has processes of its own"
        worker.signal(signal.SIGKILL)
        await worker.process.wait()
        async with asyncio.timeout(SLACK * PROMISE_SECONDS):
            while any(_lives(pid) for pid in children):  # noqa: ASYNC110  they are not ours to wait for
                await asyncio.sleep(0.02)


async def _fails(*flags: str, runner: str = "checksum") -> str:
    """The last line of a process that cannot start."""
    process = await spawn("decode", *flags, runner=runner)
    assert process.stderr is not None
    err = await process.stderr.read()
    assert await process.wait() == 1
    return err.decode().strip().splitlines()[-1]


async def test_a_taken_port_is_said_in_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for flag in ("--http-port", "--grpc-port"):
            line = await _fails(f"{flag}={port}")
            assert line.startswith("vlm-worker: ")
            assert str(port) in line


async def test_a_model_that_is_not_there_is_said_in_one_line(tmp_path: Path) -> None:
    assert "is no directory" in await _fails(f"--model={tmp_path}/gone")
    assert "config.json" in await _fails(f"--model={tmp_path}")


async def test_more_tokens_than_kv_is_said_with_the_numbers() -> None:
    line = await _fails("--max-model-len=100000")
    assert "100000" in line
    assert "--max-model-len" in line


def _children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


async def test_a_process_whose_device_is_lost_says_so_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing but a new process can have the device again, and the kubelet starts one."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    async with started("prefill", module="worker.processes.lost_device") as worker:
        async with WorkerClient(worker.address) as client:
            request = Request(RequestKey("r-1", 1), (1, 2, 3), 3, SamplingParams(8))
            call = PrefillCall(request, "t-1", ())
            with pytest.raises(EngineError, match="illegal memory access"):
                _ = [reply async for reply in client.prefill(call, timeout=5.0)]
        begun = time.monotonic()
        async with asyncio.timeout(SLACK * PROMISE_SECONDS):
            assert await worker.process.wait() == 1
        print(f"exited after {time.monotonic() - begun:.2f} s (promised {PROMISE_SECONDS:g})")


async def test_serve_ends_with_a_message_when_its_engine_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else every answer would fail until somebody comes."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    command = (
        sys.executable, "-m", "worker.processes.lost_device", "serve", str(MODEL),
        "--served-name=shapes", "--port=0", "--max-model-len=512", "--runner=checksum",
    )  # fmt: skip
    process = await asyncio.create_subprocess_exec(*tied(command), stderr=asyncio.subprocess.PIPE)
    try:
        assert process.stderr is not None
        async with asyncio.timeout(110):
            url = None
            while url is None:
                line = (await process.stderr.readline()).decode()
                assert line, "it ended before it served"
                if found := re.search(r"is served at (\S+);", line):
                    url = found[1]
            body = {"model": "shapes", "prompt": "a", "max_tokens": 4}
            async with aiohttp.ClientSession() as session:
                with contextlib.suppress(aiohttp.ClientError):  # it may be gone by then
                    async with session.post(f"{url}/completions", json=body) as reply:
                        assert reply.status >= 500
            rest = (await process.stderr.read()).decode()
            assert await process.wait() == 1
        assert "stopped: the engine cannot go on: the device is lost" in rest
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
