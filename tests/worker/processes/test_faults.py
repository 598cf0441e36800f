"""A worker killed, frozen, drained, or a request given up, in each stage: the right tokens or one
error, and every block, lease and task back.

Each fault happens inside a stage that is held open by `--inject-delay-ms`. Bounds are awaited at
three times the promise.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from worker.processes.alone import expected
from worker.processes.conftest import png
from worker.processes.driver import Attempt, Driver, Prompt
from worker.processes.workers import Worker, is_idle, started

from vlm_worker.client import WorkerClient
from vlm_worker.errors import CancelledError, GoneError, PeerLostError, WorkerError
from vlm_worker.settings.timers import PRODUCTION
from vlm_worker.types import FinishReason, RequestKey

PROMISE_SECONDS = 5.0
# a fifth of the usual: what a vanished consumer holds is back after the lease
LEASE_SECONDS = 2.0
FROZEN_SECONDS = LEASE_SECONDS / PRODUCTION.lease * PRODUCTION.frozen
SLACK = 3

# Where each stage runs in E -> P -> D.
STAGES = {
    "media": "encoder",
    "encoder_queue": "encoder",
    "encode": "encoder",
    "decode_reserve": "decode",
    "prefill_queue": "prefill",
    "embed_transfer": "prefill",
    "prefill": "prefill",
    "kv_transfer": "decode",
}


@dataclasses.dataclass
class Pools:
    """One worker a role, and a gateway's connections to them."""

    driver: Driver
    workers: dict[str, Worker]
    clients: dict[str, WorkerClient]

    def attempt(self, prompt: Prompt) -> Attempt:
        return Attempt(self.driver, prompt, self.driver.key())

    async def run(self, attempt: Attempt) -> list[int]:
        answer = await attempt.run(
            *(self.clients[role] for role in ("encoder", "prefill", "decode"))
        )
        return answer.token_ids

    async def cancel(self, key: RequestKey) -> None:
        """As a gateway does when an attempt has failed."""
        for client in self.clients.values():
            with contextlib.suppress(WorkerError):
                await client.cancel(key, timeout=1.0)

    async def until_idle(self, *, seconds: float, without: str = "") -> None:
        for role, worker in self.workers.items():
            if role != without:
                await worker.until_idle(seconds=seconds)


@contextlib.asynccontextmanager
async def pools(
    driver: Driver, stage: str = "", milliseconds: int = 20_000
) -> AsyncIterator[Pools]:
    """E, P and D; the worker of `stage` stays in it for so long."""
    async with AsyncExitStack() as stack:
        workers, clients = {}, {}
        for role in ("encoder", "prefill", "decode"):
            flags = ["--max-model-len=16000", f"--timer-scale={LEASE_SECONDS / PRODUCTION.lease:g}"]
            if STAGES.get(stage) == role:
                flags.append(f"--inject-delay-ms={stage}={milliseconds}")
            workers[role] = await stack.enter_async_context(started(role, *flags))
        for role, worker in workers.items():
            clients[role] = await stack.enter_async_context(WorkerClient(worker.address))
        yield Pools(driver, workers, clients)


def prompt_for(driver: Driver) -> Prompt:
    image = driver.family.image_token_id
    images = [png((9, 9, 200)), png((200, 9, 9), 56, 84)]
    return Prompt([101, image, 102, 103, image, 104], images, max_tokens=20)


async def error_of(task: asyncio.Task[list[int]], *, seconds: float) -> WorkerError:
    """The one error that an attempt ended in."""
    try:
        async with asyncio.timeout(seconds):
            tokens = await task
    except (WorkerError, BaseExceptionGroup) as error:
        for leaf in _leaves(error):
            return leaf
        raise
    raise AssertionError(f"the attempt was to fail, but answered {tokens}")


def _leaves(error: BaseException) -> list[WorkerError]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error] if isinstance(error, WorkerError) else []


async def reach(pools: Pools, stage: str) -> asyncio.Task[list[int]]:
    """Start an attempt and wait until it is inside the stage."""
    task = asyncio.create_task(pools.run(pools.attempt(prompt_for(pools.driver))))
    worker = pools.workers[STAGES[stage]]
    await worker.until(lambda stats: not is_idle(stats), seconds=SLACK * PROMISE_SECONDS)
    return task


@pytest.mark.parametrize("stage", STAGES)
async def test_a_worker_killed_in_a_stage_is_one_error_and_the_others_get_all_back(
    driver: Driver, stage: str
) -> None:
    async with pools(driver, stage) as all_three:
        task = await reach(all_three, stage)
        victim = STAGES[stage]
        all_three.workers[victim].signal(signal.SIGKILL)
        assert await all_three.workers[victim].process.wait() == -signal.SIGKILL
        error = await error_of(task, seconds=SLACK * PROMISE_SECONDS)
        assert isinstance(error, PeerLostError | GoneError), error
        # nobody cancels: the killed one's peers notice by themselves, at the latest by the lease
        await all_three.until_idle(seconds=SLACK * LEASE_SECONDS, without=victim)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_cancel_in_a_stage_frees_everything_everywhere(driver: Driver, stage: str) -> None:
    async with pools(driver, stage) as all_three:
        attempt = all_three.attempt(prompt_for(driver))
        task = asyncio.create_task(all_three.run(attempt))
        worker = all_three.workers[STAGES[stage]]
        await worker.until(lambda stats: not is_idle(stats), seconds=SLACK * PROMISE_SECONDS)
        await all_three.cancel(attempt.key)
        error = await error_of(task, seconds=SLACK * PROMISE_SECONDS)
        assert isinstance(error, CancelledError | GoneError | PeerLostError), error
        await all_three.until_idle(seconds=SLACK * PROMISE_SECONDS)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_gateway_that_vanishes_in_a_stage_leaves_nothing(
    driver: Driver, stage: str
) -> None:
    async with pools(driver, stage) as all_three:
        task = await reach(all_three, stage)
        for client in all_three.clients.values():
            await client.close()
        await error_of(task, seconds=SLACK * PROMISE_SECONDS)
        await all_three.until_idle(seconds=SLACK * LEASE_SECONDS)


@pytest.mark.parametrize("stage", STAGES)
async def test_a_worker_told_to_stop_in_a_stage_finishes_the_answer_first(
    driver: Driver, stage: str
) -> None:
    async with pools(driver, stage, milliseconds=700) as all_three:
        task = await reach(all_three, stage)
        worker = all_three.workers[STAGES[stage]]
        worker.signal(signal.SIGTERM)
        await worker.until(lambda stats: stats["phase"] == "draining", seconds=PROMISE_SECONDS)
        assert await task == expected(driver, prompt_for(driver))
        async with asyncio.timeout(SLACK * PROMISE_SECONDS):
            assert await worker.process.wait() == 0


async def test_a_decode_worker_killed_between_two_tokens_is_continued_elsewhere(
    driver: Driver,
) -> None:
    prompt = Prompt([101, 102, 103], max_tokens=12_000)
    async with pools(driver) as all_three, started("decode", "--max-model-len=16000") as other:
        attempt = all_three.attempt(prompt)
        task = asyncio.create_task(all_three.run(attempt))
        async with asyncio.timeout(SLACK * PROMISE_SECONDS):
            await attempt.second_token.wait()
        all_three.workers["decode"].signal(signal.SIGKILL)
        error = await error_of(task, seconds=SLACK * PROMISE_SECONDS)
        assert isinstance(error, PeerLostError)
        delivered = [attempt.tokens[i] for i in range(len(attempt.tokens))]
        assert 1 < len(delivered) < prompt.max_tokens, "the kill came too late to be one"
        rest = dataclasses.replace(prompt, max_tokens=len(delivered) + 20)
        answer = await driver.answer(
            rest,
            encoder=None,
            prefill=all_three.workers["prefill"].address,
            decode=other.address,
            key=RequestKey(attempt.key.request_id, 2),
            delivered=tuple(delivered),
        )
        assert answer.token_ids == expected(driver, rest)
        await all_three.until_idle(seconds=SLACK * LEASE_SECONDS, without="decode")


async def test_an_answer_at_the_drain_deadline_ends_as_drained_with_its_tokens_right(
    driver: Driver,
) -> None:
    prompt = Prompt([101, 102, 103], max_tokens=12_000)
    long = "--max-model-len=16000"
    async with started("prefill", long) as p:
        async with started("decode", long, "--drain-timeout-seconds=0") as d:
            clients = [WorkerClient(worker.address) for worker in (p, d)]
            attempt = Attempt(driver, prompt, driver.key())
            task = asyncio.create_task(attempt.run(None, *clients))
            async with asyncio.timeout(SLACK * PROMISE_SECONDS):
                await attempt.second_token.wait()
            d.signal(signal.SIGTERM)
            answer = await task
            assert answer.reason is FinishReason.DRAINED
            assert len(answer.token_ids) < prompt.max_tokens
            short = dataclasses.replace(prompt, max_tokens=len(answer.token_ids))
            assert answer.token_ids == expected(driver, short)
            async with asyncio.timeout(SLACK * PROMISE_SECONDS):
                assert await d.process.wait() == 0
            for client in clients:
                await client.close()
        await p.until_idle(seconds=SLACK * PROMISE_SECONDS)


async def test_a_frozen_producer_is_noticed_and_fenced_when_it_wakes(driver: Driver) -> None:
    async with pools(driver, "prefill") as all_three:
        task = await reach(all_three, "prefill")
        frozen = all_three.workers["prefill"]
        await all_three.workers["decode"].until(
            lambda stats: stats["inflight"] > 0, seconds=PROMISE_SECONDS
        )
        frozen.signal(signal.SIGSTOP)
        begun = time.monotonic()
        await until_state(frozen.process.pid, "T")
        error = await error_of(task, seconds=SLACK * FROZEN_SECONDS)
        print(f"noticed after {time.monotonic() - begun:.1f} s (promised {FROZEN_SECONDS:g})")
        assert isinstance(error, PeerLostError)
        frozen.signal(signal.SIGCONT)
        await all_three.until_idle(seconds=SLACK * LEASE_SECONDS)


async def until_state(pid: int, state: str) -> None:
    """The fault has taken effect: the process is in this state."""
    async with asyncio.timeout(PROMISE_SECONDS):
        while _state_of(pid) != state:  # noqa: ASYNC110  the kernel has no event for this
            await asyncio.sleep(0.01)


def _state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
