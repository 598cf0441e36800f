"""Real worker processes for tests: on free ports, watched through /stats, never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

from vlm_local.subprocesses import tied

MODEL = Path(__file__).parents[3] / "examples/shapes/model"
START_SECONDS = 60.0  # three times what three workers together may take


@dataclasses.dataclass
class Worker:
    """One process that is ready."""

    role: str
    process: Process
    address: str
    http: str
    log: list[dict[str, Any]]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def stats(self) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.http}/stats") as reply:
            return await reply.json()

    async def get(self, path: str) -> tuple[int, str]:
        async with aiohttp.ClientSession() as session, session.get(f"{self.http}{path}") as reply:
            return reply.status, await reply.text()

    async def until(self, holds: Callable[[dict[str, Any]], bool], *, seconds: float) -> float:
        """Wait until /stats satisfies a condition; how long it took."""
        begun = time.monotonic()
        stats = await self.stats()
        while not holds(stats):
            if time.monotonic() - begun > seconds:
                raise AssertionError(f"{self.role} after {seconds} s: {stats}")
            await asyncio.sleep(0.02)
            stats = await self.stats()
        return time.monotonic() - begun

    async def until_idle(self, *, seconds: float) -> float:
        """Wait until every block, lease and task is back."""
        return await self.until(is_idle, seconds=seconds)


def is_idle(stats: dict[str, Any]) -> bool:
    """Nothing is owed to anybody, and every KV block is free or cached."""
    kv, leases = stats["kv"], stats["leases"]
    blocks_back = not kv or kv["free_tokens"] + kv["cached_tokens"] == kv["capacity_tokens"]
    owed = any(leases[state] for state in ("held", "reserved", "quarantined"))
    return stats["inflight"] == 0 and blocks_back and not owed


@contextlib.asynccontextmanager
async def started(
    role: str, *flags: str, runner: str = "checksum", module: str = "vlm_worker"
) -> AsyncIterator[Worker]:
    """A worker process; killed at the end where it still runs."""
    process = await spawn(role, *flags, runner=runner, module=module)
    log: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(START_SECONDS):
            fields = await read_until(process, log, "ready")
        assert process.stderr is not None
        reading = asyncio.create_task(read_until(process, log, None))
        try:
            yield Worker(
                role=role,
                process=process,
                address=f"127.0.0.1:{fields['grpc_port']}",
                http=f"http://127.0.0.1:{fields['http_port']}",
                log=log,
            )
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        # closes the pipe's transport while the loop still runs
        process._transport.close()  # type: ignore[attr-defined]


async def spawn(
    role: str, *flags: str, runner: str = "checksum", module: str = "vlm_worker"
) -> Process:
    """The bare process, as the operator starts it, or of a module that changes it first."""
    command = (
        sys.executable, "-m", module, role, f"--model={MODEL}", "--served-name=shapes",
        "--bind=127.0.0.1", "--grpc-port=0", "--http-port=0", "--max-model-len=1024",
        "--block-size=4", f"--runner={runner}", "--strict", *flags,
    )  # fmt: skip
    return await asyncio.create_subprocess_exec(*tied(command), stderr=PIPE, limit=1 << 20)


async def read_until(
    process: Process, log: list[dict[str, Any]], message: str | None
) -> dict[str, Any]:
    """Read log lines into `log` until one says `message`, which is returned."""
    assert process.stderr is not None
    async for raw in process.stderr:
        line = raw.decode()
        try:
            fields = json.loads(line)
        except ValueError:
            fields = {"level": "error", "message": line}
        log.append(fields)
        if message is not None and fields["message"] == message:
            return fields
    if message is None:
        return {}
    raise AssertionError(f"the process ended without {message!r}: {log}")
