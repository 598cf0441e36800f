"""What tests of downloads share: a source at an address of its own, and `vlm-worker fetch`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Mapping

from aiohttp import web


@contextlib.asynccontextmanager
async def serving(app: web.Application, host: str = "127.0.0.1") -> AsyncIterator[str]:
    """Serve `app` at a free port of `host`; yields its URL."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, host, 0).start()
    address = f"[{host}]" if ":" in host else host
    try:
        yield f"http://{address}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def start(*arguments: str, env: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Start `vlm-worker fetch` with these variables beside those of the test."""
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "vlm_worker", "fetch", *arguments,
        env={**os.environ, **env},  # noqa: TID251
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def ended(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """Wait for the end; returns exit code and standard error."""
    _, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, errors.decode()
