"""A fault that does not happen is noticed: no test takes it for one that was survived.

Each injector is made to do nothing, and the test that relies on it has to fail.
"""

from __future__ import annotations

import random

import pytest
from worker.faults.blows import hit, strike
from worker.faults.harness import Cluster
from worker.faults.process import Pod

pytestmark = pytest.mark.asyncio(loop_scope="session")

SECONDS = 0.3


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM", "SIGSTOP"])
async def test_a_signal_that_is_not_sent_is_missed(
    service: Cluster, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    pod = service.pod("decode-0")
    monkeypatch.setattr(pod, "signal", lambda _: None)
    with pytest.raises(AssertionError, match="not within"):
        await hit(pod, number, seconds=SECONDS)


@pytest.mark.parametrize("blow", ["reset", "silence"])
async def test_a_network_that_is_not_broken_is_noticed(
    service: Cluster, monkeypatch: pytest.MonkeyPatch, blow: str
) -> None:
    pod = service.pod("decode-0")
    monkeypatch.setattr(pod.proxy, blow, lambda: None)
    with pytest.raises(AssertionError, match="not within"):
        await hit(pod, blow, seconds=SECONDS)


@pytest.mark.parametrize("stage", ["encode", "prefill", "token"])
async def test_a_request_that_is_not_held_is_missed(
    service: Cluster, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    hold = Pod.hold

    async def hold_at_the_gateway_alone(pod: Pod, at: str, nth: int = 1, **more: str) -> None:
        if pod is service.gateway:
            await hold(pod, at, nth, **more)

    monkeypatch.setattr(Pod, "hold", hold_at_the_gateway_alone)
    with pytest.raises(AssertionError, match="slipped"):
        await strike(service, stages=[stage], role="decode", blow="reset", rng=random.Random(0))
