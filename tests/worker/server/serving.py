"""A worker's server in this process, over a checksum runner that the test holds."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import aiohttp
from worker.idle import assert_idle

from vlm_worker.client import WorkerClient
from vlm_worker.core.families import load_family
from vlm_worker.serve.loading import Loaded
from vlm_worker.serve.worker import build_components
from vlm_worker.server.components import WorkerComponents
from vlm_worker.server.state import ModelFacts
from vlm_worker.server.worker_server import WorkerServer
from vlm_worker.settings import WorkerSettings, parse
from vlm_worker.testing import ChecksumRunner, plain_positions
from vlm_worker.types import Narrow, Request, RequestKey, SamplingParams, Stage
from vlm_worker.wire.messages import Accepted, PrefillCall

MODEL = Path(__file__).parents[3] / "examples/shapes/model"
FAMILY = load_family(MODEL)
KEY = RequestKey("r-1", 1)
TIMEOUT = 60.0


@dataclasses.dataclass
class Serving:
    """A server, its components, what it computes with, and a client of it."""

    server: WorkerServer
    components: WorkerComponents
    runner: ChecksumRunner
    client: WorkerClient

    async def until_idle(self) -> None:
        await assert_idle(self.server)


def settings_of(role: str, *flags: str) -> WorkerSettings:
    own = ["--bind=127.0.0.1", "--grpc-port=0", "--http-port=0", "--block-size=4", "--strict"]
    settings = parse([role, f"--model={MODEL}", "--served-name=shapes", *own, *flags], {})
    assert isinstance(settings, WorkerSettings)
    return settings


@contextlib.asynccontextmanager
async def serving(role: str, *flags: str, narrow: Narrow | None = None) -> AsyncIterator[Serving]:
    settings = settings_of(role, "--max-model-len=512", *flags)
    has_kv = settings.stages != {Stage.ENCODER}
    runner = ChecksumRunner(129, block_size=4, has_kv=has_kv, narrow=narrow)
    facts = ModelFacts(8, 8, 1276, 0, "int64")
    loaded = Loaded(runner, FAMILY, plain_positions, (), 512, facts)
    server = WorkerServer(settings)
    await server.open()
    try:
        async with (
            build_components(server, loaded) as components,
            WorkerClient(f"127.0.0.1:{server.grpc_port}") as client,
        ):
            await server.attach(components)
            yield Serving(server, components, runner, client)
            runner.gate.set()
            await server.close()
    finally:
        runner.gate.set()
        await server.close()


def request_of(num_tokens: int = 20, key: RequestKey = KEY) -> Request:
    return Request(key, tuple(range(100, 100 + num_tokens)), num_tokens, SamplingParams(8))


async def prefill_until_accepted(worker: Serving, request: Request) -> Accepted:
    """Start a prefill in the background of the test; it ends with the server."""
    call = PrefillCall(request, "t-1", ())
    async with aclosing(worker.client.prefill(call, timeout=TIMEOUT)) as replies:
        async for reply in replies:
            if isinstance(reply.event, Accepted):
                accepted = reply.event
        return accepted


async def page(worker: WorkerServer, path: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{worker.http_port}{path}"
    async with aiohttp.ClientSession() as session, session.get(url) as reply:
        return reply.status, await reply.text()
