"""KV through shared memory between two servers: the same answer, and nothing left in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from worker.answers import answer_alone
from worker.idle import assert_idle
from worker.server.pairs import (
    KEY,
    TIMEOUT,
    accept,
    kill,
    pair,
    request_of,
    until,
)
from worker.server.serving import serving

from vlm_worker.core.leases import LeaseKind
from vlm_worker.server.state import Phase
from vlm_worker.transfer.transport import ExposureAccount
from vlm_worker.wire.data_protocol import Fetch
from vlm_worker.wire.messages import FetchCall


@pytest.fixture
def shared(directory: Path) -> Iterator[tuple[Path, list[str]]]:
    """A directory in memory and the flags that opt in to it."""
    yield directory, ["--transport=shared-memory", f"--shared-memory-dir={directory}"]
    left = [file.name for file in directory.iterdir() if file.name != "triptych-domain"]
    assert left == [], "segments outlived their workers"


def exposures(account: ExposureAccount) -> list[int]:
    """Bytes of each exposure from now on."""
    exposed: list[int] = []
    take = account.take
    account.take = lambda n: (exposed.append(n), take(n))[1]  # type: ignore[method-assign]
    return exposed


async def test_kv_through_shared_memory_gives_the_same_answer(
    shared: tuple[Path, list[str]],
) -> None:
    _, flags = shared
    async with pair(*flags) as two:
        exposed = exposures(two.prefill.components.context.transport.account)
        request = request_of(101)
        assert await two.answer(request) == answer_alone(request)
        assert exposed == [26 * two.prefill.runner.kv_layout.block_bytes]  # type: ignore[union-attr]
        await two.idle()


async def test_a_producer_of_another_version_sends_the_bytes_in_frames(
    shared: tuple[Path, list[str]],
) -> None:
    """What one frame may speak for differs between versions only where its bytes are placed."""
    _, flags = shared
    async with pair(*flags) as two:
        transport = two.prefill.components.context.transport
        transport.name = "shared-memory"  # as the first version has it
        exposed = exposures(transport.account)
        request = request_of(101)
        assert await two.answer(request) == answer_alone(request)
        assert exposed == []
        await two.idle()


async def test_shared_memory_is_freed_if_its_consumer_ends_during_the_read(
    shared: tuple[Path, list[str]],
) -> None:
    path, flags = shared
    async with pair(*flags) as two:
        two.prefill.runner.gate.clear()
        task = asyncio.create_task(two.answer(request_of(101)))
        await until(lambda: two.prefill.components.context.transport.account.used > 0)
        assert len(list(path.iterdir())) == 2, "the domain and one segment"
        await kill(two.decode)
        with pytest.raises(ExceptionGroup):
            await task
        two.prefill.runner.gate.set()
        await assert_idle(two.prefill.server)
        assert two.prefill.components.context.transport.account.abandoned == 0


async def test_abandoned_memory_makes_the_worker_restart(
    shared: tuple[Path, list[str]],
) -> None:
    _, flags = shared
    async with serving("prefill", "--timer-scale=0.01", "--exposed-memory-bytes=5000", *flags) as p:
        context = p.components.context
        accepted = await accept(p, request_of(101))
        call = FetchCall(
            "t-1", accepted.boot_id, accepted.layout_fingerprint, KEY,
            transport=context.transport.name, invitation=context.transport.invitation(),
        )  # fmt: skip
        frames = [frame async for frame in p.client.fetch(Fetch.KV, call, timeout=TIMEOUT)]
        assert len(frames) > 2
        # it read everything, and then neither released nor renewed
        await until(lambda: context.attempts.leases.count(LeaseKind.QUARANTINED) == 1)
        async with asyncio.timeout(TIMEOUT):
            await p.server.failed()
        assert context.transport.account.abandoned == 26 * p.runner.kv_layout.block_bytes  # type: ignore[union-attr]
        assert p.server.state.phase is Phase.FAILED
        assert "never confirmed the end of their read" in p.server.state.message
