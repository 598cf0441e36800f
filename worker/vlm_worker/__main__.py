"""`vlm-worker COMMAND`: settings from argv, and the command's own module, imported only now."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from vlm_worker.errors import WorkerError
from vlm_worker.serve.compiler import keep_compiled
from vlm_worker.serve.logs import log_as_json, log_as_text
from vlm_worker.serve.memory import keep_freed_memory
from vlm_worker.settings import (
    GatewaySettings,
    ServeSettings,
    Settings,
    WorkerSettings,
    parse,
)


def main() -> None:
    """Run one command and exit with its code; a failed start ends in one line that says why."""
    # The first process of a container gets no SIGTERM that it does not ask for: until the command
    # listens for itself, a pod that is deleted would live on for all of its grace.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    environ = os.environ  # noqa: TID251  the one place that reads it
    settings = parse(sys.argv[1:], environ)
    # Threads of torch that spin while they wait keep, on shared cores, those from work that they
    # wait for: a step takes twenty times as long. OpenMP reads this when torch is imported.
    environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    keep_freed_memory(environ)
    keep_compiled(environ)
    if isinstance(settings, ServeSettings):
        log_as_text()
    else:
        log_as_json()
    try:
        sys.exit(_run(settings))
    except (WorkerError, OSError, ValueError) as error:
        sys.exit(f"vlm-worker: {error}")


def _run(settings: Settings) -> int:
    if not isinstance(settings, ServeSettings) and settings.parent is not None:
        from vlm_worker.serve.parent import exit_with

        exit_with(settings.parent)
    if isinstance(settings, WorkerSettings):
        from vlm_worker.serve.worker import run_worker

        return asyncio.run(run_worker(settings))
    if isinstance(settings, GatewaySettings):
        from vlm_worker.serve.gateway import run_gateway

        return asyncio.run(run_gateway(settings))
    if settings.split:
        from vlm_worker.serve.split import run_split

        return asyncio.run(run_split(settings))
    from vlm_worker.serve.local import run_local

    return asyncio.run(run_local(settings))


if __name__ == "__main__":
    main()
