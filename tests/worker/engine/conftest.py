"""Engines for tests: small pools, strict books, and a stop that reports what went wrong."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from worker.engine.disk_tier import SIZE, FaultyDirectory, Tier

from vlm_worker.engine import embedding_reads, engine
from vlm_worker.engine.embedding_files import EmbeddingFiles
from vlm_worker.engine.engine import Engine
from vlm_worker.engine.settings import EngineSettings
from vlm_worker.testing import ChecksumRunner, plain_positions

StartEngine = Callable[..., Engine]


@pytest.fixture
async def start() -> AsyncIterator[StartEngine]:
    """`start(runner=None, **settings)` gives a running engine that is stopped after the test."""
    engines: list[Engine] = []

    def start_engine(
        runner: ChecksumRunner | None = None,
        *,
        dies: bool = False,
        clock: Callable[[], float] = time.monotonic,
        files: EmbeddingFiles | None = None,
        **changes: Any,
    ) -> Engine:
        settings = EngineSettings(
            max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, strict=True
        )
        made = Engine(
            runner or ChecksumRunner(),
            settings=dataclasses.replace(settings, **changes),
            positions=plain_positions,
            clock=clock,
            files=files,
        )
        made.start(asyncio.get_running_loop())
        if not dies:
            engines.append(made)
        return made

    yield start_engine
    for one in engines:
        await one.stop()


@pytest.fixture
def until() -> Callable[..., Any]:
    """`await until(condition)`: until it holds; the test's timeout bounds it."""

    async def wait(condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110  # a snapshot has no event
            await asyncio.sleep(0.001)

    return wait


@pytest.fixture
def tier(
    start: Any, until: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Tier]]:
    """`tier(**settings)`, on the same directory each time; stop an engine before the next.

    No read times out, however busy this machine is.
    """
    for module in (embedding_reads, engine):
        monkeypatch.setattr(module, "READ_SECONDS", 600.0)
    gates = []

    def make(*, wall_clock: Callable[[], float] = time.time, **settings: Any) -> Tier:
        runner = ChecksumRunner()
        directory = FaultyDirectory(tmp_path / "disk")
        gates.append(directory.gate)
        files = EmbeddingFiles(directory, runner.embed_layout, wall_clock=wall_clock)
        defaults: dict[str, Any] = {"embedding_cache_bytes": SIZE, "max_image_tokens": 5}
        started = start(runner, files=files, **defaults | settings)
        return Tier(started, runner, directory, until)

    yield make
    for gate in gates:
        gate.set()
