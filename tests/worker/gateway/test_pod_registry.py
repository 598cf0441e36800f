"""What the gateway makes of a worker's word about its load, which is a second old at times."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest
from worker.server.serving import serving

from vlm_worker.client import WorkerClient
from vlm_worker.gateway.discovery import KnownPod
from vlm_worker.gateway.pod_registry import PodConnection, Registry
from vlm_worker.types import Role, Stage
from vlm_worker.wire.messages import Hello, Limits, Load


@pytest.fixture
async def peer() -> PodConnection:
    found = PodConnection(KnownPod("a", "127.0.0.1:1"), WorkerClient("127.0.0.1:1"))
    limits = Limits(block_size=16, kv_capacity_tokens=4096, max_model_len=4096, max_requests=16)
    found.hello = Hello(
        Role.DECODE, frozenset({Stage.DECODE}), "m", "r", "a", "u", b"boot", b"kv", b"rows", "", "",
        limits,
    )  # fmt: skip
    return found


async def test_what_ended_here_since_a_report_is_not_counted_on(peer: PodConnection) -> None:
    registry = Registry(served_name="m")
    registry.peers["a"] = peer
    with contextlib.ExitStack() as mine:
        for _ in range(2):
            mine.enter_context(registry.use("a"))
        peer.report(_load(num_inflight=5))
        assert _counted(peer) == 5
    assert _counted(peer) == 3, "those of others"
    with registry.use("a"):
        assert _counted(peer) == 4


async def test_a_report_that_does_not_know_of_ours_yet_hides_none(peer: PodConnection) -> None:
    registry = Registry(served_name="m")
    registry.peers["a"] = peer
    with registry.use("a"), registry.use("a"):
        peer.report(_load(num_inflight=0))
        assert _counted(peer) == 2
    assert _counted(peer) == 0


async def test_lent_requests_and_images_count_before_and_after_a_report(
    peer: PodConnection,
) -> None:
    registry = Registry(served_name="m")
    registry.peers["a"] = peer
    with contextlib.ExitStack() as mine:
        mine.enter_context(registry.borrows("a", num_tokens=100))
        mine.enter_context(registry.encodes("a", 3))
        assert _lending(peer) == (0, 1, 3), "no report yet: it lends nothing"
        load = dataclasses.replace(_load(num_inflight=0), max_lent=4, num_lent=2, num_images=4)
        peer.report(load)
        assert _lending(peer) == (4, 2, 4)
    assert _lending(peer) == (4, 1, 1), "those of others"
    with registry.borrows("unknown", num_tokens=1), registry.encodes("unknown", 1):
        assert _lending(peer) == (4, 1, 1)
    assert registry.num_lent_total == 1


async def test_a_burst_of_lent_requests_is_counted_against_free_kv_until_it_is_reported(
    peer: PodConnection,
) -> None:
    registry = Registry(served_name="m")
    registry.peers["a"] = peer
    peer.report(dataclasses.replace(_load(num_inflight=0), kv_free_tokens=250, max_lent=4))

    def free() -> int:
        assert peer.candidate is not None
        return peer.candidate.kv_free_tokens

    with registry.borrows("a", num_tokens=100), registry.borrows("a", num_tokens=100):
        assert free() == 50
        peer.report(dataclasses.replace(_load(num_inflight=2), kv_free_tokens=40, max_lent=4))
        assert free() == 40


async def test_an_encoder_serves_images_alone_until_it_has_reported_what_it_lends(
    peer: PodConnection,
) -> None:
    assert peer.hello is not None
    peer.hello = dataclasses.replace(peer.hello, role=Role.ENCODER, stages=frozenset(Stage))
    assert peer.candidate is not None
    assert peer.candidate.stages == {Stage.ENCODER}
    peer.report(dataclasses.replace(_load(num_inflight=0), max_lent=4))
    assert peer.candidate.stages == frozenset(Stage)
    assert not peer.candidate.serves(Stage.DECODE)


def _lending(peer: PodConnection) -> tuple[int, int, int]:
    candidate = peer.candidate
    assert candidate is not None
    return candidate.max_lent, candidate.num_lent, candidate.num_images


def _counted(peer: PodConnection) -> int:
    candidate = peer.candidate
    assert candidate is not None
    return candidate.num_inflight


def _load(*, num_inflight: int) -> Load:
    return Load(num_inflight, 0, 0.0, 4096, 4096, True, b"boot")


@pytest.mark.parametrize(
    ("theirs", "unusable_reason"),
    [("", "its compat is not set"), ("c2", "its compat is c2, not c1"), ("c1", "")],
)
async def test_a_worker_of_no_or_another_compat_gets_no_request(
    theirs: str, unusable_reason: str
) -> None:
    """Whoever answers at a worker's address must be of the set that the gateway fronts."""
    async with serving("decode", f"--compat={theirs}") as worker:
        registry = Registry(served_name="shapes", compat="c1")
        registry.apply([KnownPod("a", worker.client.address)])
        peer = registry.peers["a"]
        try:
            async with asyncio.timeout(60):
                while not peer.unusable_reason and not peer.hello:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert peer.unusable_reason.startswith(unusable_reason)
            assert bool(registry.candidates()) == (not unusable_reason)
        finally:
            await registry.close()
