"""A local port that leads to a pod's, by kubectl, as a user would open it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from vlm_operator import names
from vlm_operator.local.errors import LocalError
from vlm_operator.local.spawn import tied

OPEN_SECONDS = 20


@contextlib.asynccontextmanager
async def forward(kubectl: Path, kubeconfig: Path, *, pod: str, port: int) -> AsyncIterator[str]:
    """Keep `127.0.0.1:port` leading to the gateway while the block runs; yield the URL.

    Args:
        kubectl: The program.
        kubeconfig: Of the cluster.
        pod: As `namespace/name`.
        port: The local one.

    Raises:
        LocalError: kubectl ended, or did not begin in time.
    """
    namespace, _, name = pod.partition("/")
    words = ["-n", namespace, "port-forward", f"pod/{name}", f"{port}:{names.PORT_GATEWAY}"]
    process = await asyncio.create_subprocess_exec(
        *tied([kubectl, f"--kubeconfig={kubeconfig}", *words]),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    reading: asyncio.Task[bytes] | None = None
    try:
        await _opened(process.stdout, pod)
        reading = asyncio.create_task(process.stdout.read())  # a full pipe would stop kubectl
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        if reading is not None:
            await reading


async def _opened(output: asyncio.StreamReader, pod: str) -> None:
    try:
        async with asyncio.timeout(OPEN_SECONDS):
            first = (await output.readline()).decode()
    except TimeoutError as error:
        raise LocalError(f"kubectl port-forward to pod {pod} did not begin.", "") from error
    if not first.startswith("Forwarding from"):
        said = first + (await output.read()).decode()
        raise LocalError(f"kubectl port-forward to pod {pod} failed: {said.strip()}", "")
