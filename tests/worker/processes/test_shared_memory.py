"""Real processes that share memory: the answer is that of the stream, and nothing stays behind."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path

from worker.processes.alone import expected
from worker.processes.conftest import png
from worker.processes.driver import Driver, Prompt
from worker.processes.workers import Worker, started


def segments(directory: Path) -> list[str]:
    return [file.name for file in directory.iterdir() if file.name != "triptych-domain"]


async def exposed(worker: Worker) -> float:
    """Bytes that peers of a worker may be reading."""
    _, page = await worker.get("/metrics")
    [line] = [x for x in page.splitlines() if x.startswith('triptych_exposed_bytes{state="used"}')]
    return float(line.split()[-1])


async def test_three_processes_pass_images_and_kv_through_memory(
    driver: Driver, directory: Path
) -> None:
    flags = ("--transport=shared-memory", f"--shared-memory-dir={directory}", "--timer-scale=0.2")
    image = driver.family.image_token_id
    images = [png((9, 9, 200)), png((200, 9, 9), 56, 84)]
    prompt = Prompt([101, image, 102, 103, image, 104], images, max_tokens=20)
    async with AsyncExitStack() as stack:
        slow = "--inject-delay-ms=kv_transfer=1500"
        own = {"encoder": (), "prefill": (), "decode": (slow,)}
        workers = {
            role: await stack.enter_async_context(started(role, *flags, *extra))
            for role, extra in own.items()
        }
        addresses = {role: worker.address for role, worker in workers.items()}
        task = asyncio.create_task(driver.answer(prompt, **addresses))
        async with asyncio.timeout(20):
            while not await exposed(workers["prefill"]):  # noqa: ASYNC110  another process
                await asyncio.sleep(0.02)
        assert 1 <= len(segments(directory)) <= 3, "the KV, and images until they are released"
        assert (await task).token_ids == expected(driver, prompt)
        for worker in workers.values():
            await worker.until_idle(seconds=15)
            assert await exposed(worker) == 0
        for worker in workers.values():
            worker.signal(signal.SIGTERM)
            assert await worker.process.wait() == 0
        assert segments(directory) == [], "those that were kept go with their owner"
