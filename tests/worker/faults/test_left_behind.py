"""A test run that is killed leaves no pod of ours behind."""

from __future__ import annotations

import asyncio
import sys

from worker.faults.harness import MODEL
from worker.faults.process import ROOT, state_of, until

RUN = f"""
import asyncio
from worker.faults.process import Pod

FLAGS = ("--model={MODEL}", "--served-name=shapes", "--bind=127.0.0.1", "--block-size=4",
         "--grpc-port=0", "--http-port=0", "--runner=checksum")

async def main():
    pod = Pod("encoder-0", None, FLAGS)
    await pod.start()
    print(pod.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_a_pod_ends_with_the_run_that_started_it() -> None:
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN, stdout=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": f"{ROOT / 'operator'}:{ROOT / 'worker'}:{ROOT / 'tests'}"},
    )  # fmt: skip
    assert run.stdout is not None
    pid = int(await run.stdout.readline())
    assert state_of(pid) not in ("", "Z")
    run.kill()
    await run.wait()
    await until(lambda: state_of(pid) in ("", "Z"), seconds=5, what="the pod ends")
