"""A decode process that freezes amid an answer: the gateway notices, and the answer goes on."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import AsyncIterator

import httpx
from worker.gateway.stack import gateway_settings, serving
from worker.processes.test_faults import until_state
from worker.processes.workers import Worker, started

from vlm_worker.settings.timers import PRODUCTION

NUM_TOKENS = 2000
FREEZE_AFTER = 20
SCALE = 0.2
TIMERS = PRODUCTION.scaled(SCALE)
FLAGS = ("--max-model-len=4000", f"--timer-scale={SCALE}")
PROMISE_SECONDS = 15.0
IDLE_SECONDS = 15.0
SLACK = 3


async def texts(url: str) -> AsyncIterator[str]:
    """The pieces of a streamed answer as they come."""
    body = {
        "model": "shapes",
        "messages": [{"role": "user", "content": "What is this?"}],
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body) as reply,
    ):
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                yield event["choices"][0]["delta"].get("content") or ""


async def busy(*workers: Worker) -> Worker:
    """The one that has an answer in work."""
    (found,) = [worker for worker in workers if (await worker.stats())["inflight"]]
    return found


async def test_an_answer_goes_on_identically_when_its_decode_process_freezes() -> None:
    assert PRODUCTION.frozen <= PROMISE_SECONDS
    async with (
        started("prefill", *FLAGS) as p,
        started("decode", *FLAGS) as one,
        started("decode", *FLAGS) as other,
        serving(gateway_settings([p, one, other], timers=TIMERS)) as gateway,  # type: ignore[list-item]
    ):
        expected = "".join([text async for text in texts(gateway.url)])
        got: list[str] = []
        gap, last = 0.0, time.monotonic()
        frozen: Worker | None = None
        async for text in texts(gateway.url):
            got.append(text)
            gap, last = max(gap, time.monotonic() - last), time.monotonic()
            if len(got) == FREEZE_AFTER:
                frozen = await busy(one, other)
                frozen.signal(signal.SIGSTOP)
                await until_state(frozen.process.pid, "T")
                gap, last = 0.0, time.monotonic()
        print(f"noticed after {gap:.1f} s (promised {TIMERS.frozen:g})")
        assert frozen is not None
        assert "".join(got) == expected
        assert TIMERS.ping_timeout / 2 < gap < SLACK * TIMERS.frozen
        frozen.signal(signal.SIGCONT)
        for worker in (p, one, other):
            await worker.until_idle(seconds=IDLE_SECONDS)
