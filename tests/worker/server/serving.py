"""A worker's server in this process, over a checksum runner that the test holds."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

from vlm_worker.client import WorkerClient
from vlm_worker.core.families import load_family
from vlm_worker.serve.loading import Loaded
from vlm_worker.serve.worker import assembled
from vlm_worker.server.parts import Parts
from vlm_worker.server.state import ModelFacts
from vlm_worker.server.worker import WorkerServer
from vlm_worker.settings import WorkerSettings, parse
from vlm_worker.testing import ChecksumRunner, assert_idle, plain_positions

MODEL = Path(__file__).parents[3] / "examples/shapes/model"
FAMILY = load_family(MODEL)


@dataclasses.dataclass
class Serving:
    """A server, its parts, what it computes with, and a client of it."""

    server: WorkerServer
    parts: Parts
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
async def serving(role: str, *flags: str) -> AsyncIterator[Serving]:
    settings = settings_of(role, "--max-model-len=512", *flags)
    runner = ChecksumRunner(129, block_size=4)
    facts = ModelFacts(8, 8, 1276, 0)
    loaded = Loaded(runner, FAMILY, plain_positions, (), "checksum", 512, facts)
    server = WorkerServer(settings)
    await server.open()
    try:
        async with (
            assembled(server, loaded) as parts,
            WorkerClient(f"127.0.0.1:{server.grpc_port}") as client,
        ):
            await server.attach(parts)
            yield Serving(server, parts, runner, client)
            runner.gate.set()
            await server.close()
    finally:
        runner.gate.set()
        await server.close()
